"""Sweeps as the paper draws them: heat maps with mean and standard deviation in each cell."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nnunet_cpr._files import atomic_write, finite_number
from nnunet_cpr.names.run_name import RunName
from nnunet_cpr.vision.dynamics_figure import CannotDraw
from nnunet_cpr.vision.folder import folder_of, result_of
from nnunet_cpr.vision.sweeps import Panel, Sweep
from nnunet_cpr.vision.task import Task
from nnunet_cpr.vision.tasks import TASKS

COLUMNS = ["panel", "row", "column", "run", "n", "mean", "std", "diverged", "published"]

_NOT_RUN = "0.85"  # grey

# Inches. Everything has its place by these, so that no text can meet another.
_CELL = (0.66, 0.46)
_LEFT, _ABOVE, _BELOW, _BETWEEN = 0.95, 0.32, 0.6, 0.2
_BAR, _BAR_LABELS, _EDGE = 0.16, 0.75, 0.2
_LONGEST_BAR = 4.0
_LINE = 0.2  # of the figure's title and of the remark under it
_CHARACTERS = 13.5  # to the inch, of that title
_LABEL_CHARACTERS = 13.0  # to the inch, of a row's label
_TITLE_CHARACTERS = 13.0  # to the inch, of a panel's title


def table(sweep: Sweep, results: Path) -> pd.DataFrame:
    """The cells of a sweep over the seeds that are done.

    Args:
        sweep: what to look for.
        results: where the runs' folders are.

    Returns:
        One row a cell in the order of the panels: ``panel``, ``row`` and ``column`` are its labels,
        ``run`` its name without a seed, ``n`` the seeds done, ``mean`` and ``std`` of the task's metric
        over them, ``diverged`` how many have, ``published`` the paper's number. ``mean`` is NaN where no
        seed is done, ``std``, of a sample, where only one is, ``published`` where the paper has none.

    Raises:
        CannotDraw: the runs are not all of the same data.
        OSError: a result is damaged.
    """
    task = TASKS[sweep.task]
    rows = []
    data: dict[str | None, str] = {}
    for panel in sweep.panels:
        for row, names in zip(panel.rows.labels, panel.names):
            for column, name in zip(panel.columns.labels, names):
                done = _done(task, name, sweep.seeds, results)
                data |= {result["settings"].get("data"): result["run"] for result in done}
                found = [finite_number(r.get(task.metric)) for r in done if "diverged" not in r]
                values = [value for value in found if value is not None]
                mean = float(np.mean(values)) if values else math.nan
                std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
                diverged = sum("diverged" in result for result in done)
                published = sweep.published.get(str(name), math.nan)
                cell = (panel.title, row, column, str(name))
                rows.append((*cell, len(values), mean, std, diverged, published))
    data.pop(None, None)  # of tasks that have but one data set
    if len(data) > 1:
        first, second = list(data.values())[:2]
        raise CannotDraw(
            f"{first} and {second} are of different data; keep the runs of each in --results of its own"
        )
    return pd.DataFrame(rows, columns=COLUMNS)


def _done(task: Task, name: RunName, seeds: Sequence[int], results: Path) -> list[dict[str, Any]]:
    runs = [dataclasses.replace(name, seed=seed) for seed in seeds]
    found = [result_of(folder_of(results, task, run)) for run in runs]
    return [result for result in found if result is not None]


def draw_sweep(sweep: Sweep, results: Path, path: Path) -> pd.DataFrame:
    """Draw a sweep, and write its :func:`table` beside the figure as CSV.

    All panels have one scale of colours. A frame marks the best mean of a panel and a star the best of
    all, among the cells with the most seeds done. A cell says how many seeds it has where that is not
    all of them, and is grey where it has none. The paper's number is below, small, where it is known.

    Args:
        sweep: what to draw.
        results: where the runs' folders are.
        path: where to write; its suffix gives the format.

    Returns:
        The table.

    Raises:
        CannotDraw: as :func:`table`.
        OSError: as :func:`table`, or the figure cannot be written.
    """
    cells = table(sweep, results)
    with atomic_write(path.with_suffix(".csv")) as temporary:
        cells.to_csv(temporary, index=False, float_format="%.6g")
    with matplotlib.rc_context(matplotlib.rcParamsDefault), atomic_write(path) as temporary:
        _figure(sweep, cells).savefig(temporary, dpi=130)
    return cells


@dataclass(frozen=True)
class _Shades:
    """The one scale of colours of a figure."""

    norm: Normalize
    cmap: Colormap
    extend: str

    @classmethod
    def of(cls, means: np.ndarray) -> _Shades:
        """From the best mean down to the worst, but not so far that a failed run blurs all others."""
        cmap = matplotlib.colormaps["viridis"]
        finite = means[np.isfinite(means)]
        if not finite.size:
            return cls(Normalize(0, 1), cmap, "neither")
        best, median, worst = finite.max(), float(np.median(finite)), finite.min()
        lowest = max(worst, median - 3 * (best - median)) if best > median else worst
        if lowest == best:  # one cell, or equal ones
            lowest = best - 1
        return cls(Normalize(lowest, best), cmap, "min" if lowest > worst else "neither")

    def ink(self, mean: float) -> str:
        """Black or white, whichever can be read on the colour of this mean."""
        red, green, blue, _ = self.cmap(self.norm(mean))
        return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _figure(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    lines = [sweep.panels[i : i + sweep.across] for i in range(0, len(sweep.panels), sweep.across)]
    widths = [max(map(_width, panels)) for panels in _columns(lines)]
    # To the right of the last column is the bar, which no title may meet.
    titles = [_left(panel) + len(panel.title) / _TITLE_CHARACTERS for panel in _columns(lines)[-1]]
    widths[-1] = max(widths[-1], *titles)
    heights = [max(map(_height, panels)) for panels in lines]
    width = sum(widths) + _BETWEEN * len(widths) + _BAR + _BAR_LABELS + _EDGE
    title = textwrap.wrap(_title(sweep, cells), int(_CHARACTERS * (width - 2 * _EDGE)))
    remark = textwrap.wrap(_remark(sweep), int(_CHARACTERS * (width - 2 * _EDGE)))
    top = _EDGE + _LINE * len(title)
    height = top + sum(heights) + _LINE * len(remark) + _EDGE
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    for text, y, style in (
        (title, height - _EDGE, {"fontsize": 10, "va": "top"}),
        (remark, _EDGE, {"fontsize": 8.5, "va": "bottom", "color": "0.3"}),
    ):
        figure.text(_EDGE / width, y / height, "\n".join(text), **style)  # type: ignore[arg-type]

    shades = _Shades.of(cells["mean"].to_numpy(float))
    best = _best(cells)
    first, y = 0, height - top
    for panels, line_height in zip(lines, heights):
        x = 0.0
        for panel, panel_width in zip(panels, widths):
            size = _size(panel)
            box = (x + _left(panel), y - _ABOVE - size[1], *size)
            ax = figure.add_axes(_fractions(box, width, height))
            count = len(panel.rows.labels) * len(panel.columns.labels)
            _draw_panel(ax, panel, cells.iloc[first : first + count], shades, len(sweep.seeds), best)
            first += count
            x += panel_width + _BETWEEN
        y -= line_height
    bar = min(sum(heights) - _ABOVE - _BELOW, _LONGEST_BAR)
    box = (sum(widths) + _BETWEEN * len(widths), height - top - _ABOVE - bar, _BAR, bar)
    _draw_bar(figure, shades, _fractions(box, width, height), _metric(sweep), best is not None)
    return figure


def _draw_panel(
    ax: Axes, panel: Panel, cells: pd.DataFrame, shades: _Shades, seeds: int, best: int | None
) -> None:
    shape = (len(panel.rows.labels), len(panel.columns.labels))
    means = np.ma.masked_invalid(cells["mean"].to_numpy(float).reshape(shape))
    ax.set_facecolor(_NOT_RUN)
    ax.imshow(means, cmap=shades.cmap, norm=shades.norm, aspect="auto", interpolation="nearest")
    ax.set_title(panel.title, fontsize=9.5, loc="left", pad=4)
    ax.set_xticks(range(shape[1]), panel.columns.labels, fontsize=8)
    ax.set_yticks(range(shape[0]), panel.rows.labels, fontsize=8)
    ax.set_xlabel(panel.columns.title, fontsize=8.5, labelpad=2)
    ax.set_ylabel(panel.rows.title, fontsize=8.5)
    # The same place for all, however long the labels are.
    ax.yaxis.set_label_coords(-(_left(panel) - 1.5 * _EDGE) / _size(panel)[0], 0.5)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    # White lines part the cells.
    ax.set_xticks(np.arange(shape[1] + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(shape[0] + 1) - 0.5, minor=True)
    ax.grid(which="minor", color="white", linewidth=1.2)
    ax.tick_params(which="minor", length=0)
    own_best = _best(cells)
    for number, (index, cell) in enumerate(cells.iterrows()):
        row, column = divmod(number, shape[1])
        ink = shades.ink(cell["mean"]) if cell["n"] else "0.3"
        style: dict[str, Any] = {"color": ink, "ha": "center", "va": "center"}
        is_known = math.isfinite(cell["published"])
        text = _text(cell, seeds, is_best=index == best)
        if text:
            weight = "bold" if index == own_best else "normal"
            ax.text(column, row - 0.15 * is_known, text, fontsize=7.5, weight=weight, **style)
        if is_known:
            ax.text(column, row + 0.27, f"{cell['published']:.2f}", fontsize=6, **style)
        if index == own_best:
            _frame(ax, row, column)


def _text(cell: Any, seeds: int, is_best: bool) -> str:
    if not cell["n"]:
        return "diverged" if cell["diverged"] else ""
    lines = [f"{cell['mean']:.2f}" + ("★" if is_best else "")]
    if cell["n"] > 1:
        lines.append(f"±{cell['std']:.2f}")
    if cell["n"] < seeds:
        lines.append(f"n={cell['n']}")
    return "\n".join(lines)


def _frame(ax: Axes, row: int, column: int) -> None:
    corner = (column - 0.48, row - 0.48)
    ax.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, edgecolor="crimson", linewidth=2, zorder=5))


def _draw_bar(
    figure: Figure, shades: _Shades, box: tuple[float, float, float, float], label: str, is_used: bool
) -> None:
    if not is_used:
        return
    bar = figure.colorbar(
        ScalarMappable(shades.norm, shades.cmap), cax=figure.add_axes(box), extend=shades.extend
    )
    bar.ax.tick_params(labelsize=8)
    bar.ax.ticklabel_format(useOffset=False)
    bar.set_label(label, fontsize=8.5)
    bar.outline.set_visible(False)


def _best(cells: pd.DataFrame) -> int | None:
    """The index of the largest mean among the cells with the most seeds, if any is done."""
    done = cells[cells["n"] > 0]
    return None if done.empty else int(done[done["n"] == done["n"].max()]["mean"].idxmax())


def _title(sweep: Sweep, cells: pd.DataFrame) -> str:
    # A run may be in several cells, and counts once.
    runs = cells.drop_duplicates("run")
    diverged = f", {runs['diverged'].sum()} diverged" if runs["diverged"].any() else ""
    return f"{sweep.about}. {runs['n'].sum()} of {len(runs) * len(sweep.seeds)} runs done{diverged}."


def _remark(sweep: Sweep) -> str:
    seeds = ", ".join(map(str, sweep.seeds))
    spread = f"mean ± standard deviation over the seeds {seeds}" if len(sweep.seeds) > 1 else "one run"
    return (
        f"In a cell: {spread}. Framed: best of its panel. ★: best of all. n: seeds done, where not all. "
        "Grey: not run." + (" Small, below: the paper's number." if sweep.published else "")
    )


def _metric(sweep: Sweep) -> str:
    return TASKS[sweep.task].metric.replace("_", " ")


def _columns(lines: Sequence[Sequence[Panel]]) -> list[list[Panel]]:
    return [[line[i] for line in lines if i < len(line)] for i in range(len(lines[0]))]


def _size(panel: Panel) -> tuple[float, float]:
    """Of the cells alone."""
    return len(panel.columns.labels) * _CELL[0], len(panel.rows.labels) * _CELL[1]


def _left(panel: Panel) -> float:
    """Room for the labels of the rows, and for their title."""
    labels = max(map(len, panel.rows.labels)) / _LABEL_CHARACTERS
    return max(_LEFT, _EDGE + labels + (2 * _EDGE if panel.rows.title else 0))


def _width(panel: Panel) -> float:
    return _left(panel) + _size(panel)[0]


def _height(panel: Panel) -> float:
    return _ABOVE + _size(panel)[1] + _BELOW


def _fractions(
    box: tuple[float, float, float, float], width: float, height: float
) -> tuple[float, float, float, float]:
    """Left, bottom, width and height in inches as matplotlib wants them, as parts of the figure."""
    return box[0] / width, box[1] / height, box[2] / width, box[3] / height
