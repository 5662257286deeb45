"""Sweeps: the runs of a figure of heat maps, and their cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nnunet_cpr.names.run_name import RunName


@dataclass(frozen=True)
class Axis:
    """Rows or columns of a panel.

    Attributes:
        title: name of the setting.
        labels: its values, from top to bottom or from left to right.
    """

    title: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """One heat map.

    Attributes:
        title: text above the heat map.
        rows, columns: axes of the heat map.
        names: run of each cell, row by row, without a seed: a cell stands for the runs with all seeds.
        methods: which cells are settings of one method, of which one is selected in a comparison of
            methods: those of the ``panel``, of each of its ``columns``, or none (``cells``).
        compared_with: title of the panel with the method to compare with, in the same column if that
            panel's methods are columns. A panel that names itself is not compared. If empty, methods are
            compared with the sweep's first one.

    Raises:
        ValueError: the number of cells does not match the labels.
    """

    title: str
    rows: Axis
    columns: Axis
    names: tuple[tuple[RunName, ...], ...]
    methods: Literal["cells", "columns", "panel"] = "cells"
    compared_with: str = ""

    def __post_init__(self) -> None:
        expected = [len(self.columns.labels)] * len(self.rows.labels)
        widths = [len(row) for row in self.names]
        if widths != expected:
            raise ValueError(f"panel {self.title!r}: expected rows of {expected} cells, got {widths}")

    def method_of(self, row: str, column: str) -> str:
        """Return the name of the method that a cell belongs to."""
        if self.methods == "panel":
            return self.title
        if self.methods == "columns":
            return f"{self.title}, {column} {self.columns.title}"
        return ", ".join(filter(None, (self.title, row, column)))

    def cells(self) -> Iterator[tuple[str, str, RunName]]:
        """Yield the row label, the column label and the run of each cell, row by row."""
        for row, names in zip(self.rows.labels, self.names):
            for column, name in zip(self.columns.labels, names):
                yield row, column, name


@dataclass(frozen=True)
class Sweep:
    """Figure of heat maps with one color scale.

    Attributes:
        name: name in commands and files.
        about: one line for the list of sweeps.
        task: name of the task in :data:`nnunet_cpr.vision.tasks.TASKS`.
        panels: heat maps, from left to right, then from top to bottom.
        seeds: seeds of every cell.
        across: number of panels side by side.
        published: results of the paper, by the names of the runs without a seed.
        curves: columns of ``history.csv`` to draw over the steps.

    Raises:
        ValueError: a panel is compared with a method that the sweep does not have.

    Example:
        >>> weight_decays = ("weight decay", axis_values("weight_decay", (0.1, 1.0)))
        >>> panel = grid("SGD", weight_decays, ("learning rate", axis_values("lr", (0.1,))), "SGD")
        >>> sweep = Sweep("mine", "my sweep", "digits", (panel,), seeds=(1, 2))
        >>> [str(run) for run in sweep.runs()][:2]
        ['SGD_lr0p1_wd0p1_seed1', 'SGD_lr0p1_wd1_seed1']
    """

    name: str
    about: str
    task: str
    panels: tuple[Panel, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    across: int = 3
    published: Mapping[str, float] = field(default_factory=dict)
    curves: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        panels = {panel.title: panel for panel in self.panels}
        methods = {panel.method_of(row, col) for panel in self.panels for row, col, _ in panel.cells()}
        for panel in self.panels:
            compared = panels.get(panel.compared_with)
            found = compared and all(compared.method_of("", c) in methods for c in panel.columns.labels)
            if panel.compared_with and not found:
                raise ValueError(
                    f"panel {panel.title!r}: compared_with {panel.compared_with!r} is no method of "
                    f"{self.name} with the same columns"
                )

    def runs(self) -> list[RunName]:
        """Return every run once, those of the first seed first, so that each cell has a result soon."""
        names = [name for panel in self.panels for _, _, name in panel.cells()]
        runs = [dataclasses.replace(name, seed=seed) for seed in self.seeds for name in names]
        return list(dict.fromkeys(runs))


AxisValues = Mapping[str, Mapping[str, Any]]
"""Fields of :class:`~nnunet_cpr.names.run_name.RunName`, by the labels of an axis."""


def grid(
    title: str,
    rows: tuple[str, AxisValues],
    columns: tuple[str, AxisValues],
    family: str,
    methods: Literal["cells", "columns", "panel"] = "cells",
    compared_with: str = "",
    **fields: Any,
) -> Panel:
    """Return a panel of all combinations of rows and columns.

    Args:
        title: title of the panel.
        rows, columns: title and values of an axis.
        family: family of all runs.
        methods, compared_with: as in :class:`Panel`.
        fields: further fields of all runs.
    """
    return Panel(
        title,
        Axis(rows[0], tuple(rows[1])),
        Axis(columns[0], tuple(columns[1])),
        tuple(
            tuple(RunName(family, **fields, **row, **column) for column in columns[1].values())
            for row in rows[1].values()
        ),
        methods,
        compared_with,
    )


def axis_values(field: str, values: Sequence[Any]) -> AxisValues:
    """Return the values of an axis along which one field varies."""
    return {f"{value:g}": {field: value} for value in values}
