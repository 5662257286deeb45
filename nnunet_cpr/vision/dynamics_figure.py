"""Figure of the dynamics of runs, like the paper's figure of GPT-2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from nnunet_cpr._figures import new_figure
from nnunet_cpr.vision.folder import DYNAMICS, HISTORY, read_table
from nnunet_cpr.vision.task import CannotDraw

_COLUMNS = 3
_NUMBERS = ("step", "measure", "kappa", "multiplier")


def draw_dynamics(runs: Mapping[str, Path], path: Path, parameters: Sequence[str] = ()) -> None:
    """Draw regularization value and bound, change of the value, lambda and loss over the steps.

    Args:
        runs: folders of runs of one task, by their labels.
        path: figure to write; its suffix gives the format.
        parameters: parameter matrices to show, one per column; by default the first, the middle and the
            last.

    Raises:
        OSError: the tables of a run cannot be read, or the figure cannot be written.
        CannotDraw: the runs have no such parameter matrix.
    """
    dynamics = {label: read_table(folder / DYNAMICS, _NUMBERS) for label, folder in runs.items()}
    histories = {label: read_table(folder / HISTORY, ("step", "loss")) for label, folder in runs.items()}
    names = list(dict.fromkeys(next(iter(dynamics.values()))["parameter"]))
    unknown = [name for name in parameters if name not in names]
    if unknown:
        raise CannotDraw(f"unknown parameter {unknown[0]!r}; choose from {', '.join(names)}")
    shown = list(parameters) or _select_evenly(names)
    with new_figure(path, (4.2 * len(shown) + 0.6, 8.6)) as figure:
        grid = figure.subplots(4, len(shown), sharex=True, squeeze=False)
        for column, name in enumerate(shown):
            axes = [grid[row][column] for row in range(4)]
            axes[0].set_title(name, fontsize=10)
            for number, (label, table) in enumerate(dynamics.items()):
                _draw_parameter(axes, table[table["parameter"] == name], label, f"C{number}")
            for number, (label, history) in enumerate(histories.items()):
                axes[3].plot(history["step"], history["loss"], color=f"C{number}", label=label)
            axes[3].set_yscale("log")
            axes[3].set_xlabel("step")
        for row, label in enumerate(
            ("value of R\n(dashed: bound kappa)", "change of R per step", "lambda", "validation loss")
        ):
            grid[row][0].set_ylabel(label)
        figure.legend(*grid[3][0].get_legend_handles_labels(), loc="outside upper center", ncols=4)


def _draw_parameter(axes: Sequence[Axes], table: pd.DataFrame, label: str, color: str) -> None:
    steps, measure = table["step"].to_numpy(), table["measure"].to_numpy()
    kappa, multiplier = table["kappa"].to_numpy(), table["multiplier"].to_numpy()
    axes[0].plot(steps, measure, color=color, label=label)
    # NaN stands for a bound that is not set yet and for a run without CPR.
    if np.isfinite(kappa).any():
        axes[0].plot(steps, kappa, color="black", linestyle="--", linewidth=0.8, zorder=3)
    change = np.diff(measure) / np.maximum(np.diff(steps), 1)
    axes[1].plot(steps[1:], change, color=color)
    axes[1].axhline(0, color="0.7", linewidth=0.8)
    axes[2].plot(steps, multiplier, color=color)


def _select_evenly(names: Sequence[str]) -> list[str]:
    indices = np.linspace(0, len(names) - 1, min(_COLUMNS, len(names))).round().astype(int)
    return [names[i] for i in indices]
