"""Options of Slurm jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from datetime import timedelta
from math import ceil
from typing import Annotated

from typer import Option

from nnunet_cpr import studies
from nnunet_cpr.cli.study._options import TrainingOptions

_REFUSED = {
    "time": "use --time",
    "signal": "use --signal-delay",
    "array": "use --jobs",
    "no_requeue": "leave it out, as jobs requeue at their time limit",
}


@dataclass(frozen=True)
class SlurmOptions:
    """Options of ``study run --executor slurm``."""

    partition: Annotated[str | None, Option(help="Slurm partition.")] = None
    time: Annotated[str, Option(help="Time limit of a Slurm job, such as 24:00:00 or 2-0.")] = "48:00:00"
    cpus: Annotated[int, Option(min=1, help="CPU cores of each Slurm job.")] = 12
    memory: Annotated[str | None, Option(help="Memory of each Slurm job, such as 64G.")] = None
    sbatch: Annotated[
        list[str] | None, Option(help="Other option of sbatch, such as account=me; repeatable.")
    ] = None
    signal_delay: Annotated[int, Option(min=10, help="Seconds before the time limit to requeue.")] = 90
    wait: Annotated[bool, Option("--wait", help="Wait until all Slurm jobs have ended.")] = False

    def given(self) -> list[str]:
        """Return the names of the options that differ from their defaults."""
        changed = (field.name for field in fields(self) if getattr(self, field.name) != field.default)
        return [f"--{name.replace('_', '-')}" for name in changed]

    def executor(self, jobs: int, gpus: int, training: TrainingOptions) -> studies.Slurm:
        """Return the executor.

        Raises:
            StudyError: an option is invalid.
        """
        given = dict(parse_setting(text) for text in self.sbatch or ())
        requests_gpus = any(
            name.startswith("gpus") or (name in ("gres", "tres_per_task") and "gpu" in str(value))
            for name, value in given.items()
        )
        settings: dict[str, str | int | bool | None] = {
            "partition": self.partition,
            "mem": self.memory,
            "cpus_per_task": None if "cpus_per_gpu" in given else self.cpus,
            "gpus_per_node": None if requests_gpus else gpus,
            **given,
        }
        return studies.Slurm(
            settings={name: value for name, value in settings.items() if value},
            minutes=parse_minutes(self.time),
            gpus=gpus,
            at_once=jobs,
            signal_delay=self.signal_delay,
            device=training.device,
            options=training.nnunet_options,
        )


def parse_minutes(text: str) -> int:
    """Parse Slurm's minutes[:seconds], hours:minutes:seconds or days-hours[:minutes[:seconds]].

    Raises:
        StudyError: it is anything else.

    Example:
        >>> parse_minutes("90"), parse_minutes("24:00:00"), parse_minutes("2-12")
        (90, 1440, 3600)
    """
    matched = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d\d?))?(?::(\d\d?))?", text, re.ASCII)
    if not matched:
        raise studies.StudyError(
            f"--time: expected minutes, hours:minutes:seconds or days-hours:minutes, got {text!r}"
        )
    days, hours, minutes, seconds = (int(number or 0) for number in matched.groups())
    if not (matched[1] or matched[4]):
        hours, minutes, seconds = 0, hours, minutes  # the first number is minutes
    limit = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    return max(1, ceil(limit / timedelta(minutes=1)))


def parse_setting(text: str) -> tuple[str, str | bool]:
    """Parse an option of sbatch by its long name, with or without leading dashes and value.

    Returns:
        Its name with underscores, and its value or True.

    Raises:
        StudyError: it is not an option, or one that the command sets itself.

    Example:
        >>> parse_setting("--gres=gpu:a100:1"), parse_setting("exclusive"), parse_setting("account me")
        (('gres', 'gpu:a100:1'), ('exclusive', True), ('account', 'me'))
    """
    matched = re.fullmatch(r"(?:--)?([a-z][a-z-]+)(?:[= ](.+))?", text)
    name = matched[1].replace("-", "_") if matched else ""
    if not matched or name in _REFUSED:
        advice = _REFUSED.get(name, "give an option's long name, such as account=me or exclusive")
        raise studies.StudyError(f"--sbatch: cannot pass on {text!r}; {advice}")
    return name, matched[2] or True
