"""Steps and time left of a study, estimated from trainings of the same data and plans."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TypeGuard

from nnunet_cpr.studies.definition import Run, Study
from nnunet_cpr.studies.run_state import Stage, State, parse_trainer, progress

LONGEST_SECONDS = 3e9
"""Seconds; a longer time comes from a damaged log."""
_DEFAULT_ITERATIONS = 250


@dataclass
class Measured:
    """Numbers measured in earlier trainings, such as the seconds of an epoch.

    Attributes:
        values: the numbers by data set, configuration and plans, and then by trainer without its seed.
    """

    values: dict[tuple[str, str, str], dict[str, list[float]]] = field(default_factory=dict)

    def add(self, run: Run, trainer: str, value: float) -> None:
        """Add a number of another training with the data set, configuration and plans of ``run``."""
        by_trainer = self.values.setdefault(_data_of(run), {})
        by_trainer.setdefault(_without_seed(trainer), []).append(value)

    def typical(self, run: Run) -> float | None:
        """Return the median of the run's trainer, else that of all trainers, else None."""
        by_trainer = self.values.get(_data_of(run), {})
        of_trainer = by_trainer.get(_without_seed(run.trainer))
        if of_trainer is not None:
            return median(of_trainer)
        every = [value for values in by_trainer.values() for value in values]
        return median(every) if every else None


@dataclass(frozen=True)
class TimeLeft:
    """Training time left of a study; validation is not included.

    Attributes:
        seconds: estimate for the runs that have one.
        unknown: number of unfinished runs without an estimate.
    """

    seconds: float = 0.0
    unknown: int = 0

    def __str__(self) -> str:
        about = f"about {timedelta(seconds=round(self.seconds))} of training left"
        if not self.unknown:
            return about if self.seconds else ""
        without = f"{self.unknown} run{'s' if self.unknown > 1 else ''} without an estimate"
        return f"{about}, {without}" if self.seconds else without


def iteration_seconds(study: Study, results: Path) -> Measured:
    """Return the seconds of an iteration, from all logs of the study's data sets and plans."""
    measured = Measured()
    for run in {_data_of(run): run for run in study.runs()}.values():
        for trainer, fold in _trained_folds(run, results):
            add_epoch(measured, run, trainer, progress(fold).seconds or 0.0)
    return measured


def add_epoch(measured: Measured, run: Run, trainer: str, seconds: float) -> None:
    """Add the seconds of an epoch to the seconds of an iteration."""
    if _is_plausible(seconds):
        measured.add(run, trainer, seconds / _iterations(trainer))


def steps_left(found: Mapping[Run, State]) -> tuple[int, int]:
    """Return the number of training steps left, and the number of unfinished runs without a plan.

    Args:
        found: the states of all runs.
    """
    unfinished = [(run, state) for run, state in found.items() if state.stage is not Stage.DONE]
    planned = [
        max(0, state.epochs - state.epoch) * _iterations(run.trainer)
        for run, state in unfinished
        if state.epochs is not None
    ]
    return sum(planned), len(unfinished) - len(planned)


def time_left(found: Mapping[Run, State], jobs: int, earlier: Measured) -> TimeLeft:
    """Estimate the time until all runs are trained.

    Args:
        found: the states of all runs.
        jobs: number of runs that are trained at the same time.
        earlier: seconds of an iteration of other trainings.
    """
    own = Measured()
    for run, state in found.items():
        add_epoch(own, run, run.trainer, state.epoch_seconds or 0.0)
    epochs = {run.trainer: state.epoch for run, state in found.items() if state.stage is Stage.DONE}
    unfinished = [(run, state) for run, state in found.items() if state.stage is not Stage.DONE]
    slots = [0.0] * max(1, jobs)
    unknown = 0
    for run, state in sorted(unfinished, key=lambda each: each[1].stage is not Stage.RUNNING):
        planned = state.epochs if state.epochs is not None else epochs.get(run.trainer)
        seconds = state.epoch_seconds
        if not _is_plausible(seconds):
            per_iteration = own.typical(run) or earlier.typical(run) or 0.0
            seconds = per_iteration * _iterations(run.trainer)
        if planned is None or not _is_plausible(seconds):
            unknown += 1
            continue
        left = min(seconds * max(0, planned - state.epoch), LONGEST_SECONDS)
        heapq.heapreplace(slots, slots[0] + left)  # the run starts in the slot that is free first
    return TimeLeft(min(max(slots), LONGEST_SECONDS), unknown)


def _trained_folds(run: Run, results: Path) -> Iterator[tuple[str, Path]]:
    """Yield the trainer and folder of all folds with the data set, configuration and plans of a run."""
    ending = f"__{run.plans}__{run.configuration}"
    folder = results / run.dataset
    for fold in sorted(folder.glob("*/fold_*")):
        if fold.parent.name.endswith(ending):
            yield fold.parent.name.removesuffix(ending), fold


def _data_of(run: Run) -> tuple[str, str, str]:
    return run.dataset, run.configuration, run.plans


def _without_seed(trainer: str) -> str:
    return re.sub(r"_seed[0-9]+", "", trainer)


def _is_plausible(seconds: float | None) -> TypeGuard[float]:
    return seconds is not None and 0 < seconds < LONGEST_SECONDS


def _iterations(trainer: str) -> int:
    ours = parse_trainer(trainer)
    return (ours.iterations if ours is not None else None) or _DEFAULT_ITERATIONS
