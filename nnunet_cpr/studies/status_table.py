"""Status of a study as a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from nnunet_cpr.studies.definition import Run, Study
from nnunet_cpr.studies.estimates import LONGEST_SECONDS, TimeLeft, iteration_seconds, time_left
from nnunet_cpr.studies.executors import queued_runs
from nnunet_cpr.studies.run_state import Stage, State, StudyPaths, state_of

_COLOURS = {
    Stage.DONE: "green",
    Stage.RUNNING: "cyan",
    Stage.FAILED: "red",
    Stage.STOPPED: "yellow",
}


def states(study: Study, paths: StudyPaths) -> dict[Run, State]:
    """Return the present states of all runs."""
    queued = queued_runs(paths)
    return {run: state_of(run, paths, queued) for run in study.runs()}


def status_renderer(
    study: Study, paths: StudyPaths, jobs: int | None = None
) -> Callable[[], RenderableType]:
    """Return a function that returns the present table of a study, with the time left.

    Args:
        study: the study.
        paths: the study's folders.
        jobs: number of runs that are trained at the same time; None counts the running ones.
    """
    earlier = iteration_seconds(study, paths.results)

    def table() -> RenderableType:
        found = states(study, paths)
        running = sum(state.stage is Stage.RUNNING for state in found.values())
        return status_table(study, found, time_left(found, jobs or running, earlier))

    return table


def status_table(
    study: Study, found: Mapping[Run, State], left: TimeLeft | None = None
) -> RenderableType:
    """Return a table with one line for each run, and below it the reasons of failures.

    Args:
        study: the study.
        found: the states of its runs.
        left: time left of the study, for the title.
    """
    columns = varying_columns(study)
    title = f"Study {study.name}: {summary(found.values())}"
    lines = Table(title=f"{title}; {left}" if left is not None and str(left) else title)
    for heading in columns:
        lines.add_column(heading, justify="right" if heading in ("fold", "seed") else "left")
    lines.add_column("trainer", overflow="fold")
    for heading in ("", "epoch", "pseudo Dice", "Dice"):
        lines.add_column(heading, justify="left" if heading == "" else "right")
    lines.add_column("")
    for run, state in found.items():
        names = [value_of(run) for value_of in columns.values()]
        colour = _COLOURS.get(state.stage)
        stage = state.stage.value + _time_left(state)
        planned = "?" if state.epochs is None else str(state.epochs)
        lines.add_row(
            *names,
            escape(study.entry(run.entry).full_title),
            ProgressBar(total=state.epochs or 1000, completed=state.epoch, width=10),
            f"{state.epoch}/{planned}",
            _dice(state.pseudo_dice),
            _dice(state.dice),
            f"[{colour}]{stage}[/]" if colour else stage,
        )
    return Group(lines, *_failures(study, found))


def varying_columns(study: Study) -> dict[str, Callable[[Run], str]]:
    """Return the columns that distinguish runs of a trainer: a function of the run by heading."""
    columns: dict[str, tuple[bool, Callable[[Run], str]]] = {
        "data set": (len(study.datasets) > 1, lambda run: run.dataset),
        "configuration": (len(study.configurations) > 1, lambda run: run.configuration),
        "plans": (len(study.plans) > 1, lambda run: run.plans),
        "fold": (True, lambda run: str(run.fold)),
        "seed": (bool(study.seeds), lambda run: str(run.seed)),
    }
    return {heading: value_of for heading, (is_shown, value_of) in columns.items() if is_shown}


def summary(found: Iterable[State]) -> str:
    """Return a line such as "3 of 10 done, 2 running, 1 failed"."""
    stages = [state.stage for state in found]
    parts = [f"{stages.count(Stage.DONE)} of {len(stages)} done"]
    for stage in (Stage.RUNNING, Stage.QUEUED, Stage.STOPPED, Stage.FAILED):
        if stage in stages:
            parts.append(f"{stages.count(stage)} {stage.value}")
    return ", ".join(parts)


def _failures(study: Study, found: Mapping[Run, State]) -> Sequence[RenderableType]:
    shown: list[RenderableType] = []
    for run, state in found.items():
        if state.stage is Stage.FAILED:
            title = escape(f"{run.dataset}, fold {run.fold}, {_title(study, run)}")
            shown.append(f"\n[red]failed[/red] [bold]{title}[/bold]:")
            shown += [escape(f"  {line}") for line in state.reason]
    return shown


def _title(study: Study, run: Run) -> str:
    seed = "" if run.seed is None else f", seed {run.seed}"
    return study.entry(run.entry).full_title + seed


def _dice(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4f}"


def _time_left(state: State) -> str:
    if state.stage is not Stage.RUNNING:
        return ""
    if state.epochs is not None and state.epoch >= state.epochs:
        return ", validating"
    if state.seconds_left is None or state.seconds_left > LONGEST_SECONDS:
        return ""
    return f", {timedelta(seconds=round(state.seconds_left))} left"
