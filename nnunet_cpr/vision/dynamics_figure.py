"""The dynamics of runs as a figure: what the paper shows of GPT-2, for any run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nnunet_cpr._files import atomic_write
from nnunet_cpr.vision.folder import DYNAMICS, HISTORY, read_table

_COLUMNS = 3
_NUMBERS = ("step", "measure", "kappa", "multiplier")


class CannotDraw(ValueError):
    """Something that cannot be drawn; the message, one line, says why."""


def draw_dynamics(runs: Mapping[str, Path], path: Path, parameters: Sequence[str] = ()) -> None:
    """Measure with its bound, change of the measure, lambda and loss over the steps.

    Args:
        runs: folders of runs of one task, by the labels they get.
        path: where to write; its suffix gives the format.
        parameters: the matrices to show, one column each; by default the first, the middle and the last.

    Raises:
        OSError: a run has nothing to show, or the figure cannot be written.
        CannotDraw: there is no such matrix.
    """
    matrices = {label: read_table(folder / DYNAMICS, _NUMBERS) for label, folder in runs.items()}
    losses = {label: read_table(folder / HISTORY, ("step", "loss")) for label, folder in runs.items()}
    names = list(dict.fromkeys(next(iter(matrices.values()))["parameter"]))
    unknown = [name for name in parameters if name not in names]
    if unknown:
        raise CannotDraw(f"no matrix is named {unknown[0]!r}; there are {', '.join(names)}")
    shown = list(parameters) or _spread(names)
    with matplotlib.rc_context(matplotlib.rcParamsDefault), atomic_write(path) as temporary:
        figure = Figure(figsize=(4.2 * len(shown) + 0.6, 8.6), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(4, len(shown), sharex=True, squeeze=False)
        for column, name in enumerate(shown):
            axes = [grid[row][column] for row in range(4)]
            axes[0].set_title(name, fontsize=10)
            for number, (label, table) in enumerate(matrices.items()):
                _draw_matrix(axes, table[table["parameter"] == name], label, f"C{number}")
            for number, (label, history) in enumerate(losses.items()):
                axes[3].plot(history["step"], history["loss"], color=f"C{number}", label=label)
            axes[3].set_yscale("log")
            axes[3].set_xlabel("step")
        for row, label in enumerate(
            ("measure R\n(dashed: its bound kappa)", "change of R a step", "lambda", "validation loss")
        ):
            grid[row][0].set_ylabel(label)
        figure.legend(*grid[3][0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
        figure.savefig(temporary, dpi=110)


def _draw_matrix(axes: Sequence[Axes], table: pd.DataFrame, label: str, colour: str) -> None:
    steps, measure = table["step"].to_numpy(), table["measure"].to_numpy()
    kappa, multiplier = table["kappa"].to_numpy(), table["multiplier"].to_numpy()
    axes[0].plot(steps, measure, color=colour, label=label)
    # A bound that is not set is NaN, and a run without CPR has none at all.
    if np.isfinite(kappa).any():
        axes[0].plot(steps, kappa, color="black", linestyle="--", linewidth=0.8, zorder=3)
    change = np.diff(measure) / np.maximum(np.diff(steps), 1)
    axes[1].plot(steps[1:], change, color=colour)
    axes[1].axhline(0, color="0.7", linewidth=0.8)
    axes[2].plot(steps, multiplier, color=colour)


def _spread(names: Sequence[str]) -> list[str]:
    places = np.linspace(0, len(names) - 1, min(_COLUMNS, len(names))).round().astype(int)
    return [names[i] for i in places]
