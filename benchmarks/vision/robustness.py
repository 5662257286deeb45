"""Draw the metric over the weight decay for several learning rates or lengths of training.

    python -m benchmarks.vision.robustness cifar10.csv cifar10-steps.csv --task cifar10

The files are the tables that ``nnunet-cpr vision draw`` writes. One column of axes for each file and
one row for each optimizer; one color for each learning rate (first file) or number of steps. Lines are
weight decays, with the standard deviation over the seeds; dashed lines are CPR with its default.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from nnunet_cpr._figures import new_figure
from nnunet_cpr.names.run_name import parse_run_name
from nnunet_cpr.vision.tasks import TASKS

OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "muon": "Muon"}
FIELDS = {"lr": "learning rate", "steps": "steps"}


def read(file: Path, task: str) -> pd.DataFrame:
    """Return the finished runs of a sweep with weight decay or CPR's default.

    Returns:
        ``optimizer``; ``lr`` and ``steps``; ``decay``, NaN for CPR; and ``mean`` and ``std``.

    Raises:
        ValueError: both the learning rate and the number of steps of an optimizer vary.
    """
    rows = []
    for _, row in pd.read_csv(file).iterrows():
        name = parse_run_name(row["run"])
        others = (name.baseline, name.kappa, name.regularizer, name.mu)
        if any(value is not None for value in others) or name.adaptive or math.isnan(row["mean"]):
            continue
        whole = TASKS[task].complete(name)
        decay = None if name.defaults.cpr else whole.weight_decay
        rows.append((name.defaults.optimizer, whole.lr, whole.steps, decay, row["mean"], row["std"]))
    table = pd.DataFrame(rows, columns=["optimizer", "lr", "steps", "decay", "mean", "std"])
    if (table.groupby("optimizer")[list(FIELDS)].nunique() > 1).all(axis=1).any():
        raise ValueError(f"{file}: expected runs that differ in learning rate or in steps, not in both")
    return table


def draw(tables: list[pd.DataFrame], metric: str, path: Path) -> None:
    """Draw a row of axes for each optimizer and a column for each table."""
    optimizers = [key for key in OPTIMIZERS if any((t["optimizer"] == key).any() for t in tables)]
    with new_figure(path, (4.8 * len(tables), 2.6 * len(optimizers) + 0.4)) as figure:
        grid = figure.subplots(len(optimizers), len(tables), squeeze=False)
        for row, optimizer in zip(grid, optimizers):
            own = [table[table["optimizer"] == optimizer] for table in tables]
            for axes, table in zip(row, own):
                if table.empty:
                    axes.set_axis_off()
                else:
                    _draw_table(axes, table)
            row[0].set_ylabel(f"{OPTIMIZERS[optimizer]}\n{metric}")


def _draw_table(axes: Axes, table: pd.DataFrame) -> None:
    field = max(FIELDS, key=lambda name: table[name].nunique())
    for number, (value, rows) in enumerate(table.groupby(field)):
        decays = rows.dropna(subset="decay").sort_values("decay")
        color = f"C{number}"
        axes.errorbar(
            decays["decay"],
            decays["mean"],
            decays["std"],
            fmt=".-",
            color=color,
            capsize=2,
            label=f"{value:g}",
        )
        for mean in rows.loc[rows["decay"].isna(), "mean"]:
            axes.axhline(mean, color=color, linestyle="--", linewidth=1.2)
    axes.set_xscale("log")
    axes.set_xlabel("weight decay")
    axes.plot([], [], "--", color="0.4", linewidth=1.2, label="CPR, default")
    axes.legend(
        title=FIELDS[field], fontsize=7, title_fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    axes.grid(axis="y", alpha=0.3)


def main() -> None:
    """Read the tables and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="+", type=Path, help="tables of sweeps, CSV")
    parser.add_argument("--task", required=True, choices=sorted(TASKS), help="task of the sweeps")
    parser.add_argument("--figure", type=Path, default=Path("robustness.png"))
    arguments = parser.parse_args()
    tables = [read(file, arguments.task) for file in arguments.tables]
    draw(tables, f"{TASKS[arguments.task].metric} in percent", arguments.figure)


if __name__ == "__main__":
    main()
