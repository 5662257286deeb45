"""The live table of a study."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from nnunet_cpr.studies.definition import Cell, Study
from nnunet_cpr.studies.running import queued_cells
from nnunet_cpr.studies.state import Places, Stage, State, state_of

_A_LIFETIME = 3e9  # seconds
_COLOURS = {
    Stage.DONE: "green",
    Stage.RUNNING: "cyan",
    Stage.FAILED: "red",
    Stage.STOPPED: "yellow",
}


def states(study: Study, places: Places) -> dict[Cell, State]:
    """Of all cells, as they are now."""
    queued = queued_cells(places)
    return {cell: state_of(cell, places, queued) for cell in study.cells()}


def table(study: Study, found: Mapping[Cell, State]) -> RenderableType:
    """One line a cell, and below it why those that failed did."""
    varying = {"data set": study.datasets, "configuration": study.configurations, "plans": study.plans}
    several = {heading: len(values) > 1 for heading, values in varying.items()}
    lines = Table(title=f"Study {study.name}: {summary(found.values())}")
    for heading in several:
        if several[heading]:
            lines.add_column(heading)
    lines.add_column("fold", justify="right")
    lines.add_column("trainer", overflow="fold")
    for heading in ("", "epoch", "pseudo Dice", "Dice"):
        lines.add_column(heading, justify="left" if heading == "" else "right")
    lines.add_column("")
    for cell, state in found.items():
        names = (cell.dataset, cell.configuration, cell.plans)
        what = [name for name, shown in zip(names, several.values()) if shown]
        colour = _COLOURS.get(state.stage)
        stage = state.stage.value + _left(state)
        of = "?" if state.epochs is None else str(state.epochs)
        lines.add_row(
            *what,
            str(cell.fold),
            escape(study.row(cell.trainer).title),
            ProgressBar(total=state.epochs or 1000, completed=state.epoch, width=10),
            f"{state.epoch}/{of}",
            _number(state.pseudo_dice),
            _number(state.dice),
            f"[{colour}]{stage}[/]" if colour else stage,
        )
    return Group(lines, *_failures(study, found))


def summary(found: Iterable[State]) -> str:
    """Such as "3 of 10 done, 2 running, 1 failed"."""
    stages = [state.stage for state in found]
    parts = [f"{stages.count(Stage.DONE)} of {len(stages)} done"]
    for stage in (Stage.RUNNING, Stage.QUEUED, Stage.STOPPED, Stage.FAILED):
        if stage in stages:
            parts.append(f"{stages.count(stage)} {stage.value}")
    return ", ".join(parts)


def _failures(study: Study, found: Mapping[Cell, State]) -> Sequence[RenderableType]:
    shown: list[RenderableType] = []
    for cell, state in found.items():
        if state.stage is Stage.FAILED:
            title = escape(f"{cell.dataset}, fold {cell.fold}, {study.row(cell.trainer).title}")
            shown.append(f"\n[red]failed[/red] [bold]{title}[/bold]:")
            shown += [escape(f"  {line}") for line in state.why]
    return shown


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4f}"


def _left(state: State) -> str:
    if state.stage is not Stage.RUNNING:
        return ""
    if state.epochs is not None and state.epoch >= state.epochs:
        return ", validates"
    if state.seconds_left is None or state.seconds_left > _A_LIFETIME:
        return ""
    return f", {timedelta(seconds=round(state.seconds_left))} left"
