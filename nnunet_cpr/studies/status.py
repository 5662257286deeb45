"""Status of a study: states of its runs, a table for the terminal, training steps and time left."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from statistics import median

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from nnunet_cpr.studies.definition import Run, Study
from nnunet_cpr.studies.executors import queued_runs
from nnunet_cpr.studies.run_state import Stage, State, StudyPaths, parse_trainer, state_of

_COLOURS = {Stage.DONE: "green", Stage.RUNNING: "cyan", Stage.FAILED: "red", Stage.STOPPED: "yellow"}
_COLUMNS = ("dataset", "configuration", "plans", "fold", "seed")
"""Attributes of a run that are shown if they differ between runs."""
_ITERATIONS = 250
"""Training steps of nnU-Net's epoch."""


def states(study: Study, paths: StudyPaths) -> dict[Run, State]:
    """Return the present states of all runs."""
    queued = queued_runs(paths)
    return {run: state_of(run, paths, queued) for run in study.runs()}


def summary(found: Iterable[State]) -> str:
    """Return a line such as "3 of 10 done, 2 running, 1 failed"."""
    counts = Counter(state.stage for state in found)
    others = (Stage.RUNNING, Stage.QUEUED, Stage.STOPPED, Stage.FAILED)
    parts = [f"{counts[stage]} {stage.value}" for stage in others if counts[stage]]
    return ", ".join([f"{counts[Stage.DONE]} of {sum(counts.values())} done", *parts])


def status_table(study: Study, found: Mapping[Run, State], jobs: int | None = None) -> RenderableType:
    """Return a table with one line for each run, and below it the reasons of failures.

    Args:
        study: the study.
        found: the states of its runs.
        jobs: number of runs that are trained at the same time; None counts the running ones.
    """
    running = sum(state.stage is Stage.RUNNING for state in found.values())
    parts = [f"Study {study.name}: {summary(found.values())}", time_left(found, jobs or running)]
    table = Table(title="; ".join(filter(None, parts)))
    columns = [name for name in _COLUMNS if len({getattr(run, name) for run in found}) > 1]
    for heading in (*columns, "trainer", "epoch", "pseudo Dice", "Dice", ""):
        table.add_column(heading, overflow="fold")
    failures: list[str] = []
    for run, state in found.items():
        title = escape(study.entry(run.entry).full_title)
        colour = _COLOURS.get(state.stage, "default")
        table.add_row(
            *(str(getattr(run, name)) for name in columns),
            title,
            f"{state.epoch}/{state.epochs or '?'}",
            _dice(state.pseudo_dice),
            _dice(state.dice),
            f"[{colour}]{state.stage.value}[/]",
        )
        if state.stage is Stage.FAILED:
            reason = escape(state.reason.replace(" | ", "\n  "))  # the lines of the log
            failures.append(f"\n[red]failed[/]: {run.dataset}, {run.fold_and_seed}, {title}: {reason}")
    return Group(table, *failures)


def time_left(found: Mapping[Run, State], jobs: int) -> str:
    """Return the training time left in words, or "" before there is a finished run of each data set.

    The median time of a step of the finished runs with the same data, configuration and plans counts;
    the validation is not included.

    Args:
        found: the states of all runs.
        jobs: number of runs that are trained at the same time.
    """
    measured: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for run, state in found.items():
        if state.stage is Stage.DONE and state.epoch_seconds:
            seconds = state.epoch_seconds / _iterations(run.trainer)
            measured[run.dataset, run.configuration, run.plans].append(seconds)
    total = 0.0
    for run, state in found.items():
        steps = steps_left(run, state)
        step_seconds = measured.get((run.dataset, run.configuration, run.plans))
        if steps is None or (steps and not step_seconds):
            return ""
        total += steps * median(step_seconds or [0.0])
    return f"about {timedelta(seconds=round(total / max(1, jobs)))} of training left" if total else ""


def steps_left(run: Run, state: State) -> int | None:
    """Return the number of training steps left, None if the number of epochs is unknown."""
    if state.stage is Stage.DONE:
        return 0
    iterations = _iterations(run.trainer)
    return None if state.epochs is None else max(0, state.epochs - state.epoch) * iterations


def dry_run_lines(study: Study, paths: StudyPaths, commands: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the commands that a study would run, and the number of training steps left.

    Args:
        study: a study that :func:`~nnunet_cpr.studies.preparation.check_study_data` accepts.
        paths: the study's folders.
        commands: the commands that prepare the data sets.
    """
    for command in commands:
        yield f"first: {' '.join(command)}"
    found = states(study, paths)
    for run, state in found.items():
        yield (
            f"nnUNetv2_train {run.dataset} {run.configuration} {run.fold} -tr {run.trainer} "
            f"-p {run.plans}: {state.stage.value}, epoch {state.epoch} of {state.epochs or '?'}"
        )
    steps = [steps_left(*each) for each in found.items()]
    unknown = steps.count(None)
    without = f", without {unknown} runs whose number of epochs is unknown" if unknown else ""
    yield f"{summary(found.values())}; {sum(filter(None, steps)):,} training steps left{without}"


def _iterations(trainer: str) -> int:
    return getattr(parse_trainer(trainer), "iterations", None) or _ITERATIONS


def _dice(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4f}"
