"""Heat maps as lists of runs: which there are, and where each of them is in its figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nnunet_cpr.names.run_name import RunName


@dataclass(frozen=True)
class Axis:
    """What the rows or the columns of a panel stand for.

    Attributes:
        title: the setting.
        labels: its values, from top to bottom or from left to right.
    """

    title: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """One heat map.

    Attributes:
        title: above it.
        rows, columns: its axes.
        names: its cells, row by row; a cell stands for its runs with all seeds and names none.

    Raises:
        ValueError: the cells are not as many as the labels.
    """

    title: str
    rows: Axis
    columns: Axis
    names: tuple[tuple[RunName, ...], ...]

    def __post_init__(self) -> None:
        shape = [len(self.columns.labels)] * len(self.rows.labels)
        if [len(row) for row in self.names] != shape:
            raise ValueError(f"the panel {self.title!r} has not one cell for each row and column")


@dataclass(frozen=True)
class Sweep:
    """A figure of heat maps with one scale of colours.

    Attributes:
        name: in commands and files.
        about: one line for the user.
        task: its name in :data:`nnunet_cpr.vision.tasks.TASKS`.
        panels: from left to right, then from top to bottom.
        seeds: of every cell.
        across: panels beside each other.
        published: what the paper reports, by the names of the runs without their seeds.
        curves: columns of ``history.csv`` to draw over the steps.
    """

    name: str
    about: str
    task: str
    panels: tuple[Panel, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    across: int = 3
    published: Mapping[str, float] = field(default_factory=dict)
    curves: tuple[str, ...] = ()

    def cells(self) -> list[RunName]:
        """All runs, each once; those of the first seed first, so that the figure is soon complete."""
        names = [name for panel in self.panels for row in panel.names for name in row]
        runs = [dataclasses.replace(name, seed=seed) for seed in self.seeds for name in names]
        return list(dict.fromkeys(runs))


Settings = Mapping[str, Mapping[str, Any]]
"""Labels of an axis, and the fields of :class:`~nnunet_cpr.names.run_name.RunName` that each means."""


def grid(
    title: str,
    rows: tuple[str, Settings],
    columns: tuple[str, Settings],
    family: str,
    **fields: Any,
) -> Panel:
    """A panel of all combinations of rows and columns.

    Args:
        title: above the panel.
        rows, columns: an axis' title and its settings.
        family: of all runs.
        fields: what all runs have in common besides.
    """
    return Panel(
        title,
        Axis(rows[0], tuple(rows[1])),
        Axis(columns[0], tuple(columns[1])),
        tuple(
            tuple(RunName(family, **fields, **row, **column) for column in columns[1].values())
            for row in rows[1].values()
        ),
    )


def settings(field: str, values: Sequence[Any]) -> Settings:
    """The settings of an axis along which one field takes some values."""
    return {f"{value:g}": {field: value} for value in values}
