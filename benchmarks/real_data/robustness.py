"""Dice over the weight decay and over the warm start, from finished studies of both.

    python -m benchmarks.real_data.robustness studies/tuned_*.yaml --figure docs/figures/robustness.png

Draws one row for each optimizer: its weight decays at the left, the warm starts of CPR with it at the
right, with the Dice of each fold and the mean of each setting. Settings that nobody has to choose
are marked: nnU-Net's weight decay, and the warm start that a name without one has. Settings far below
the best are written at the lower border. Writes the Dice of each training beside the figure as CSV.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from benchmarks.real_data.trainings import read_trainings
from benchmarks.weight_decay_curves import write_below
from nnunet_cpr.cpr.bounds import KappaWS
from nnunet_cpr.figures import new_figure
from nnunet_cpr.names.trainer_name import TrainerName

DEFAULT_WEIGHT_DECAY = 3e-5
DEEPEST = 5.0
"""Points below the best mean at which the vertical axes end."""
KINDS = {"weight decay": "weight decay", "warm start": "warm start of CPR (steps)"}
"""Columns of the figure, with the labels of their horizontal axes."""


def describe(name: TrainerName, label: str) -> dict[str, Any]:
    """Return ``optimizer``; ``kind``, a key of :data:`KINDS`, and its ``setting``; and ``default``.

    ``default`` is True if the name does not give the setting.
    """
    optimizer = name.family.removeprefix(name.prefix).removesuffix("CPR").removesuffix("W") or "SGD"
    if not name.defaults.cpr:
        decay = DEFAULT_WEIGHT_DECAY if name.weight_decay is None else name.weight_decay
        values = ("weight decay", decay, name.weight_decay is None)
    else:
        assert isinstance(name.training.kappa, KappaWS)
        values = ("warm start", float(name.training.kappa.steps), name.kappa is None)
    return dict(zip(("optimizer", "kind", "setting", "default"), (optimizer, *values)))


def draw(trainings: pd.DataFrame, path: Path) -> None:
    """Draw the Dice of each fold over the settings, one row of axes for each optimizer."""
    optimizers = list(dict.fromkeys(trainings["optimizer"]))
    with new_figure(path, (8, 2.4 * len(optimizers) + 0.4)) as figure:
        grid = figure.subplots(len(optimizers), len(KINDS), sharex="col", sharey="row", squeeze=False)
        for row, optimizer in zip(grid, optimizers):
            own = trainings[trainings["optimizer"] == optimizer]
            lowest = own.groupby(["kind", "setting"])["dice"].mean().max() - DEEPEST
            for axes, kind in zip(row, KINDS):
                _draw_settings(axes, own[own["kind"] == kind], lowest)
            row[0].set_ylabel(f"{optimizer}\nforeground Dice in percent")
        for axes, label in zip(grid[-1], KINDS.values()):
            axes.set_xlabel(label)
            axes.set_xscale("log")
        ticks = sorted(trainings.query("kind == 'warm start'")["setting"].unique())
        grid[-1][1].set_xticks(ticks, [f"{steps:g}" for steps in ticks])
        grid[-1][1].minorticks_off()
        seeds, folds = trainings["seed"].nunique(), trainings["fold"].nunique()
        figure.suptitle(f"{seeds} seed{'s' * (seeds > 1)}, {folds} folds", size=10)
        entries = dict(zip(*grid[0][0].get_legend_handles_labels()[::-1]))
        grid[0][0].legend(entries.values(), entries.keys())


def _draw_settings(axes: Axes, rows: pd.DataFrame, lowest: float) -> None:
    means = rows.groupby("setting")["dice"].mean()
    axes.plot(means.index, means, "-", color="C0", label="mean")
    for _, fold in rows.sort_values("setting").groupby(["fold", "seed"]):
        axes.plot(fold["setting"], fold["dice"], ".-", color="0.7", linewidth=1, zorder=1, label="fold")
    default = rows.loc[rows["default"], "setting"].unique()
    axes.plot(default, means[default], "D", color="C1", markersize=8, label="default")
    axes.grid(axis="y", alpha=0.3)
    if rows["dice"].min() < lowest:
        axes.set_ylim(lowest, rows["dice"].max() + 0.5)
    write_below(axes, means, lowest)


def tabulate(trainings: pd.DataFrame) -> pd.DataFrame:
    """Return for each optimizer and kind the mean Dice of the default, the best, and the worst."""
    rows = []
    for (optimizer, kind), own in trainings.groupby(["optimizer", "kind"], sort=False):
        means = own.groupby("setting")["dice"].mean()
        default = means[own.loc[own["default"], "setting"].unique()]
        rows.append(
            (optimizer, kind, default.iloc[0] if len(default) else np.nan, means.max(), means.idxmax(),
             means.min(), means.idxmin())
        )  # fmt: skip
    columns = ["optimizer", "kind", "default", "best", "best setting", "worst", "worst setting"]
    return pd.DataFrame(rows, columns=columns)


def main() -> None:
    """Read the studies, draw the figure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("studies", nargs="+", help="study files")
    parser.add_argument("--figure", type=Path, default=Path("robustness.png"))
    arguments = parser.parse_args()
    results = Path(os.environ["nnUNet_results"])
    trainings = pd.concat([read_trainings(study, results, describe) for study in arguments.studies])
    trainings.to_csv(arguments.figure.with_suffix(".csv"), index=False, float_format="%.6g")
    draw(trainings, arguments.figure)
    print(tabulate(trainings).to_string(index=False, float_format="%.4g"))


if __name__ == "__main__":
    main()
