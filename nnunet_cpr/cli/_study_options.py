"""Parsing of the options of ``nnunet-cpr study run``."""

from __future__ import annotations

import os
import re
from itertools import takewhile

from nnunet_cpr.cli._errors import stop


def gpu_names(count: int | None, device: str | None) -> list[str]:
    """Return this machine's GPUs, at most ``count``, as in ``CUDA_VISIBLE_DEVICES``."""
    if device not in (None, "cuda"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        given = [name.strip() for name in visible.split(",") if name.strip()]
        names = list(takewhile(lambda name: name != "-1", given))  # as CUDA reads it
    else:
        import torch

        names = [str(i) for i in range(torch.cuda.device_count())]
    if count is not None and count > len(names):
        stop(f"--gpus: expected at most {len(names)} on this machine, got {count}")
    return names[:count]


def parse_minutes(text: str) -> int:
    """Parse Slurm's minutes[:seconds], hours:minutes:seconds or days-hours[:minutes[:seconds]]."""
    from nnunet_cpr.studies.definition import StudyError

    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    written = [*parts, days if dash else "0"]
    if not all(re.fullmatch("[0-9]{1,6}", number) for number in written) or len(parts) > 3:
        raise StudyError(
            f"--time: expected minutes, hours:minutes:seconds or days-hours:minutes, got {text!r}"
        )
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return max(1, (int(days or 0) * 24 + hours) * 60 + minutes + (1 if seconds else 0))


_SHORT = {
    "A": "account", "C": "constraint", "G": "gpus", "J": "job_name", "N": "nodes", "c": "cpus_per_task",
    "d": "dependency", "p": "partition", "q": "qos", "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_OWN = {"time": "--time", "signal": "--signal-delay", "array": "--jobs"}


def parse_setting(text: str) -> tuple[str, str | bool]:
    """Parse an option of sbatch with or without leading dashes and value.

    Returns:
        Its long name with underscores, and its value or True.

    Raises:
        StudyError: it is no option, or one that the command sets itself.

    Example:
        >>> parse_setting("--gres=gpu:a100:1"), parse_setting("exclusive"), parse_setting("-A me")
        (('gres', 'gpu:a100:1'), ('exclusive', True), ('account', 'me'))
    """
    from nnunet_cpr.studies.definition import StudyError

    matched = re.fullmatch(r"-{0,2}([A-Za-z][A-Za-z_-]*)(?:\s*[=\s]\s*(.+))?", text.strip())
    if not matched:
        raise StudyError(f"--sbatch: expected an option such as account=me or exclusive, got {text!r}")
    name = _SHORT.get(matched[1], matched[1].replace("-", "_"))
    if name in _OWN:
        raise StudyError(
            f"--sbatch: expected an option without an own one, got {text!r}; use {_OWN[name]}"
        )
    if name == "no_requeue":
        raise StudyError(f"--sbatch: expected jobs that may requeue, got {text!r}; leave it out")
    return name, matched[2] or True
