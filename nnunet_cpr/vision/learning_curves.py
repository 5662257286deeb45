"""Learning curves of a sweep: mean and range over the runs with different seeds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd

from nnunet_cpr._figures import new_figure
from nnunet_cpr.vision.folder import HISTORY, read_result, read_table, run_folder
from nnunet_cpr.vision.sweeps import Sweep
from nnunet_cpr.vision.tasks import TASKS


def read_histories(sweep: Sweep, results: Path) -> pd.DataFrame:
    """Return all evaluations of a sweep's runs that are finished.

    Args:
        sweep: the sweep.
        results: folder of the runs' folders.

    Returns:
        The columns of ``history.csv``, and ``panel``, ``label`` and ``seed`` of the run.
    """
    tables = []
    for panel in sweep.panels:
        for row, column, name in panel.cells():
            for seed in sweep.seeds:
                run = dataclasses.replace(name, seed=seed)
                folder = run_folder(results, TASKS[sweep.task], run)
                result, path = read_result(folder), folder / HISTORY
                if result is not None and "diverged" not in result and path.exists():
                    label = f"{row}, {column}" if len(panel.columns.labels) > 1 else row
                    history = read_table(path, ("step", *sweep.curves))
                    tables.append(history.assign(panel=panel.title, label=label, seed=seed))
    columns = ["panel", "label", "seed", "step"]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def draw_curves(sweep: Sweep, results: Path, path: Path) -> None:
    """Draw a row of axes for each of the sweep's curves and a column for each panel.

    Args:
        sweep: the sweep; its ``curves`` are columns of ``history.csv``.
        results: folder of the runs' folders.
        path: figure to write; its suffix gives the format.
    """
    histories = read_histories(sweep, results)
    rows, columns = len(sweep.curves), len(sweep.panels)
    with new_figure(path, (4.6 * columns, 3.4 * rows + 1.4)) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey="row", squeeze=False)
        for column, panel in enumerate(sweep.panels):
            in_panel = histories[histories["panel"] == panel.title]
            for number, (label, history) in enumerate(in_panel.groupby("label", sort=False)):
                count = history["seed"].nunique()
                if count < len(sweep.seeds):
                    label = f"{label}, {count} of {len(sweep.seeds)} runs"
                for row, curve in enumerate(sweep.curves):
                    by_seed = history.pivot(index="step", columns="seed", values=curve).dropna()
                    steps, values = by_seed.index.to_numpy(), by_seed.to_numpy()
                    axes = grid[row][column]
                    axes.plot(steps, np.mean(values, axis=1), color=f"C{number}", label=label)
                    low, high = np.min(values, axis=1), np.max(values, axis=1)
                    axes.fill_between(steps, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
            grid[0][column].set_title(panel.title, fontsize=10)
            grid[-1][column].set_xlabel("step")
            if len(in_panel):
                grid[-1][column].legend(fontsize=8, loc="best")
        for row, curve in enumerate(sweep.curves):
            grid[row][0].set_ylabel(curve.replace("_", " "))
            if curve == "loss":
                grid[row][0].set_yscale("log")
        figure.suptitle(_legend(sweep), fontsize=9, color="0.3")


def _legend(sweep: Sweep) -> str:
    seeds = ", ".join(map(str, sweep.seeds))
    if len(sweep.seeds) == 1:
        return f"Each line is one run, with seed {seeds}."
    return (
        f"Line: mean over {len(sweep.seeds)} runs, with the seeds {seeds}. Band: lowest to highest run."
    )
