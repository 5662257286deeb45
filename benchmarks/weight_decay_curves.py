"""Figure of a metric over the weight decay for several learning rates or lengths of training.

One column of axes for each table and one row for each optimizer; one color for each learning rate or
number of steps. Lines are weight decays, dashed lines CPR with its default.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from nnunet_cpr.figures import new_figure

COLUMNS = ["optimizer", "lr", "steps", "decay", "mean", "std"]
"""Columns of a table: ``optimizer``, a key of :data:`OPTIMIZERS`; learning rate and number of steps;
weight decay, NaN for CPR; mean of the metric, and its standard deviation, which may be NaN."""
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "muon": "Muon"}
FIELDS = {"lr": "learning rate", "steps": "steps"}


def check(table: pd.DataFrame, file: object) -> None:
    """Check that either the learning rate or the number of steps varies.

    Raises:
        ValueError: both of an optimizer vary.
    """
    if (table.groupby("optimizer")[list(FIELDS)].nunique() > 1).all(axis=1).any():
        raise ValueError(f"{file}: expected runs that differ in learning rate or in steps, not in both")


def draw(tables: list[pd.DataFrame], metric: str, path: Path, deepest: float | None = None) -> None:
    """Draw the tables.

    Args:
        tables: one for each column of axes.
        metric: label of the vertical axes.
        path: PNG file.
        deepest: points below the best mean at which the vertical axes end; values below are written at
            the border. None shows everything.
    """
    optimizers = [key for key in OPTIMIZERS if any((t["optimizer"] == key).any() for t in tables)]
    with new_figure(path, (4.8 * len(tables), 2.6 * len(optimizers) + 0.4)) as figure:
        grid = figure.subplots(len(optimizers), len(tables), squeeze=False)
        for row, optimizer in zip(grid, optimizers):
            own = [table[table["optimizer"] == optimizer] for table in tables]
            for axes, table in zip(row, own):
                if table.empty:
                    axes.set_axis_off()
                else:
                    _draw_table(axes, table, deepest)
            row[0].set_ylabel(f"{OPTIMIZERS[optimizer]}\n{metric}")


def _draw_table(axes: Axes, table: pd.DataFrame, deepest: float | None) -> None:
    field = max(FIELDS, key=lambda name: table[name].nunique())
    for number, (value, rows) in enumerate(table.groupby(field)):
        decays = rows.dropna(subset="decay").sort_values("decay")
        color = f"C{number}"
        axes.errorbar(
            decays["decay"],
            decays["mean"],
            decays["std"] if decays["std"].notna().any() else None,
            fmt=".-",
            color=color,
            capsize=2,
            label=f"{value:g}",
        )
        cpr = rows.loc[rows["decay"].isna(), "mean"]
        for mean in cpr:
            axes.axhline(mean, color=color, linestyle="--", linewidth=1.2)
        if deepest is not None:
            means = decays.set_index("decay")["mean"]
            write_below(axes, means, table["mean"].max() - deepest, number, color)
            left = pd.Series(cpr.to_numpy(), index=[table["decay"].min()] * len(cpr))
            write_below(axes, left, table["mean"].max() - deepest, number, color, "CPR ", "left")
    if deepest is not None and table["mean"].min() < table["mean"].max() - deepest:
        axes.set_ylim(table["mean"].max() - deepest, table["mean"].max() + 0.5)
    axes.set_xscale("log")
    axes.set_xlabel("weight decay")
    axes.plot([], [], "--", color="0.4", linewidth=1.2, label="CPR, default")
    axes.legend(
        title=FIELDS[field], fontsize=7, title_fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    axes.grid(axis="y", alpha=0.3)


def write_below(
    axes: Axes,
    means: pd.Series,
    lowest: float,
    line: int = 0,
    color: str = "black",
    title: str = "",
    side: str = "right",
) -> None:
    """Write the means below ``lowest`` at the lower border.

    Args:
        axes: axes that end at ``lowest``.
        means: means by their horizontal position.
        lowest: lower end of the vertical axis.
        line: number of the line of text above the border.
        color: color of the text.
        title: beginning of the text.
        side: side of the text that is at its position.
    """
    for position, mean in means[means < lowest].items():
        axes.annotate(
            f"{title}↓ {mean:.0f}",
            (position, 0),
            (0, 4 + 11 * line),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha=side,
            size=9,
            color=color,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over a curve that falls there
        )
