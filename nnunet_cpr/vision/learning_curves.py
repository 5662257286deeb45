"""Learning curves of a sweep's cells: the mean over seeds, and their range."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nnunet_cpr._files import atomic_write
from nnunet_cpr.vision.folder import HISTORY, folder_of, read_table
from nnunet_cpr.vision.sweeps import Sweep
from nnunet_cpr.vision.tasks import TASKS


def curves(sweep: Sweep, results: Path) -> pd.DataFrame:
    """All evaluations of all cells: the columns of ``history.csv``, ``panel``, ``cell`` and ``seed``."""
    tables = []
    for panel in sweep.panels:
        for row, names in zip(panel.rows.labels, panel.names):
            for column, name in zip(panel.columns.labels, names):
                for seed in sweep.seeds:
                    path = (
                        folder_of(results, TASKS[sweep.task], dataclasses.replace(name, seed=seed))
                        / HISTORY
                    )
                    if path.exists():
                        cell = f"{row}, {column}" if len(names) > 1 else row
                        history = read_table(path, ("step", *sweep.curves))
                        tables.append(history.assign(panel=panel.title, cell=cell, seed=seed))
    columns = ["panel", "cell", "seed", "step"]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def draw_curves(sweep: Sweep, results: Path, path: Path) -> None:
    """One row of axes for each of the sweep's curves, one column for each panel.

    Args:
        sweep: what to draw; its ``curves`` say which columns of ``history.csv``.
        results: where the runs' folders are.
        path: where to write; its suffix gives the format.
    """
    table = curves(sweep, results)
    rows, columns = len(sweep.curves), len(sweep.panels)
    with matplotlib.rc_context(matplotlib.rcParamsDefault), atomic_write(path) as temporary:
        figure = Figure(figsize=(4.6 * columns, 3.4 * rows + 1.4), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, sharex=True, sharey="row", squeeze=False)
        for column, panel in enumerate(sweep.panels):
            cells = table[table["panel"] == panel.title]
            for number, (cell, of_cell) in enumerate(cells.groupby("cell", sort=False)):
                for row, value in enumerate(sweep.curves):
                    by_seed = of_cell.pivot(index="step", columns="seed", values=value).dropna()
                    steps, values = by_seed.index.to_numpy(), by_seed.to_numpy()
                    axes = grid[row][column]
                    axes.plot(steps, np.mean(values, axis=1), color=f"C{number}", label=cell)
                    low, high = np.min(values, axis=1), np.max(values, axis=1)
                    axes.fill_between(steps, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
            grid[0][column].set_title(panel.title, fontsize=10)
            grid[-1][column].set_xlabel("step")
            if len(cells):
                grid[-1][column].legend(fontsize=8, loc="best")
        for row, value in enumerate(sweep.curves):
            grid[row][0].set_ylabel(value.replace("_", " "))
            if value == "loss":
                grid[row][0].set_yscale("log")
        figure.savefig(temporary, dpi=110)
