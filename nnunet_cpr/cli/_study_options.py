"""Parsing of the options of ``nnunet-cpr study run``."""

from __future__ import annotations

import os
import re

from nnunet_cpr.cli._errors import stop


def gpu_names(count: int | None, device: str | None) -> list[str]:
    """Return this machine's GPUs, at most ``count``, as in ``CUDA_VISIBLE_DEVICES``."""
    if device not in (None, "cuda"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
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


def parse_setting(text: str) -> tuple[str, str]:
    from nnunet_cpr.studies.definition import StudyError

    key, equals, value = text.lstrip("-").partition("=")
    if not key or not equals:
        raise StudyError(f"--sbatch: expected KEY=VALUE, got {text!r}")
    return key, value
