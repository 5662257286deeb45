"""Options of ``nnunet-cpr study run`` and the executor for Slurm that they describe."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from datetime import timedelta
from math import ceil
from typing import Annotated, Literal

from typer import Option

from nnunet_cpr import studies
from nnunet_cpr.cli.study._options import PreparationOptions

_OURS = {"signal": "--signal-delay", "time": "--time", "array": "--jobs"}
"""Options of sbatch that a job relies on, and ours that set them."""


@dataclass(frozen=True)
class SlurmOptions:
    """Options of Slurm jobs."""

    partition: Annotated[str | None, Option(help="Slurm partition.")] = None
    time: Annotated[str, Option(help="Time limit of a Slurm job, such as 24:00:00 or 2-0.")] = "48:00:00"
    cpus: Annotated[int, Option(min=1, help="CPU cores of each Slurm job.")] = 12
    memory: Annotated[str | None, Option(help="Memory of each Slurm job, such as 64G.")] = None
    sbatch: Annotated[
        list[str] | None, Option(help="Other option of sbatch, such as account=me; repeatable.")
    ] = None
    signal_delay: Annotated[int, Option(min=10, help="Seconds before the time limit to requeue.")] = 90
    wait: Annotated[bool, Option("--wait", help="Wait until all Slurm jobs have ended.")] = False


@dataclass(frozen=True)
class RunOptions(SlurmOptions, PreparationOptions):
    """Options of ``study run``."""

    executor: Annotated[Literal["local", "slurm"], Option(help="Where to train.")] = "local"
    jobs: Annotated[
        int | None, Option("--jobs", "-j", min=1, help="Trainings at a time: 1, or 16 on Slurm.")
    ] = None
    gpus: Annotated[
        int | None, Option(min=0, help="GPUs to share, by default all; on Slurm of each job, 1.")
    ] = None
    num_gpus: Annotated[int | None, Option("-num_gpus", hidden=True)] = None
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show the commands and training steps; change nothing.")
    ] = False

    def given_for_slurm(self) -> list[str]:
        """Return the names of the options of Slurm that differ from their defaults."""
        changed = (
            field.name for field in fields(SlurmOptions) if getattr(self, field.name) != field.default
        )
        return [f"--{name.replace('_', '-')}" for name in changed]

    def slurm(self) -> studies.Slurm:
        """Return the executor for Slurm.

        Raises:
            StudyError: the time limit or an option is invalid.
        """
        gpus = 1 if self.gpus is None else self.gpus
        minutes = parse_minutes(self.time)
        if 60 * minutes <= self.signal_delay:
            raise studies.StudyError(
                f"--time: expected more than the {self.signal_delay} s before its end at which a job "
                f"requeues, got {60 * minutes} s; give a longer one or a shorter --signal-delay"
            )
        given: dict[str, str | bool] = {}
        for option in self.sbatch or ():
            name, _, value = option.removeprefix("--").partition("=")
            given[name.replace("-", "_")] = value or True
        for name, option in _OURS.items():
            if name in given:
                raise studies.StudyError(f"--sbatch {name}: jobs need one of ours; use {option}")
        if "?" in str(given.get("dependency")):
            raise studies.StudyError(
                "--sbatch dependency: expected conditions that all must hold, as stages of a study add "
                f"theirs, got {given['dependency']!r}; replace '?' by ','"
            )
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
            minutes=minutes,
            gpus=gpus,
            at_once=self.jobs or 16,
            signal_delay=self.signal_delay,
            device=self.device,
            options=self.nnunet_options,
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
