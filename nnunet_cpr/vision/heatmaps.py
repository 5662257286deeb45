"""Heat maps of a sweep, as in the paper: mean and standard deviation in each cell."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy.stats import ttest_ind_from_stats

from nnunet_cpr._figures import new_figure
from nnunet_cpr._files import atomic_write, finite_number
from nnunet_cpr.vision.folder import read_result, run_folder
from nnunet_cpr.vision.sweeps import Panel, Sweep
from nnunet_cpr.vision.task import CannotDraw
from nnunet_cpr.vision.tasks import TASKS

COLUMNS = ["panel", "row", "column", "run", "n", "mean", "std", "diverged", "published", "p"]
SIGNIFICANCE = 0.05
"""Level of the test behind the star."""

_CMAP = "viridis"
_CELL = (0.66, 0.46)  # inches
_COLOR_BAR = (0.16, 4.0)  # inches; the height is a maximum
_BESIDE_LABELS = 0.45  # inches
_PANEL_TEXTS = 0.95  # inches above and below a panel
_CHARACTERS_PER_INCH = 12.5


def summarize_sweep(sweep: Sweep, results: Path) -> pd.DataFrame:
    """Return mean and standard deviation of each cell over the seeds.

    Args:
        sweep: the sweep.
        results: folder of the runs' folders.

    Returns:
        A row for each cell in the order of the panels: ``panel``, ``row`` and ``column`` are its labels,
        ``run`` is its name without a seed, ``n`` the number of finished runs, ``mean`` and ``std`` those
        of the task's metric, ``diverged`` the number of diverged runs, and ``published`` the result of
        the paper. ``p`` is that of the difference from the best mean (:func:`differences_from_best`).
        Missing numbers are NaN; ``std`` and ``p`` need two runs.

    Raises:
        CannotDraw: the runs are of different data.
        OSError: a result is damaged.
    """
    task = TASKS[sweep.task]
    rows = []
    run_by_data: dict[str | None, str] = {}
    for panel in sweep.panels:
        for row, column, name in panel.cells():
            folders = [
                run_folder(results, task, dataclasses.replace(name, seed=seed)) for seed in sweep.seeds
            ]
            found = [result for folder in folders if (result := read_result(folder)) is not None]
            run_by_data |= {result["settings"].get("data"): result["run"] for result in found}
            metrics = [finite_number(r.get(task.metric)) for r in found if "diverged" not in r]
            values = [value for value in metrics if value is not None]
            mean = float(np.mean(values)) if values else math.nan
            std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
            diverged = sum("diverged" in result for result in found)
            published = sweep.published.get(str(name), math.nan)
            rows.append(
                (panel.title, row, column, str(name), len(values), mean, std, diverged, published)
            )
    run_by_data.pop(None, None)  # tasks with a single data set
    if len(run_by_data) > 1:
        first, second = list(run_by_data.values())[:2]
        raise CannotDraw(
            f"{results}: {first} and {second} are of different data; use a --results folder for each"
        )
    summary = pd.DataFrame(rows, columns=COLUMNS[:-1])
    summary["p"] = differences_from_best(summary)
    return summary


def differences_from_best(cells: pd.DataFrame) -> list[float]:
    """Return the p-value of each cell's difference from the best mean.

    Welch's test, with Bonferroni's correction for all pairs of cells, since the best mean is known only
    from the same runs.

    Args:
        cells: columns ``run``, ``n``, ``mean`` and ``std`` of a summary.

    Returns:
        NaN for the run of the best mean, and where a cell has fewer than two runs or two cells have no
        variance.

    Example:
        >>> columns = {"run": ["a", "b"], "n": [3, 3], "mean": [5.0, 1.0], "std": [0.1, 0.1]}
        >>> [round(p, 5) for p in differences_from_best(pd.DataFrame(columns))]
        [nan, 0.0]
    """
    best = _find_best(cells)
    if best is None or cells["n"][best] < 2:
        return [math.nan] * len(cells)
    columns = cells[["mean", "std", "n"]].where(cells["n"] > 1).to_numpy(float)
    with np.errstate(divide="ignore", invalid="ignore"):  # runs without any variance
        test = ttest_ind_from_stats(*columns[best], *columns.T, equal_var=False)
    runs = cells["run"][cells["n"] > 0].nunique()  # a run may be in several cells
    corrected = np.minimum(test.pvalue * (runs * (runs - 1) / 2), 1)
    return np.where(cells["run"] == cells["run"][best], math.nan, corrected).tolist()


def draw_sweep(sweep: Sweep, results: Path, path: Path) -> pd.DataFrame:
    """Draw the heat maps of a sweep, and write its summary beside the figure as CSV.

    All panels share a color scale. Among the cells with the most finished runs, a frame marks the best
    mean of a panel. A star marks the best of all if it differs significantly from every other cell. A
    cell without a finished run is gray. The paper's result is in parentheses.

    Args:
        sweep: the sweep.
        results: folder of the runs' folders.
        path: figure to write; its suffix gives the format.

    Returns:
        The table of :func:`summarize_sweep`.

    Raises:
        CannotDraw: the runs are of different data.
        OSError: a result is damaged, or a file cannot be written.
    """
    summary = summarize_sweep(sweep, results)
    with atomic_write(path.with_suffix(".csv")) as temporary:
        summary.to_csv(temporary, index=False, float_format="%.6g")
    layout = _Layout(sweep)
    # The texts around the panels are outside of the figure's size; "tight" includes them.
    with new_figure(path, (layout.width, layout.height), dpi=130, bbox_inches="tight") as figure:
        _draw(figure, sweep, summary, layout)
    return summary


class _Layout:
    """Positions in inches: all cells have the same size, whatever texts are around the panels."""

    def __init__(self, sweep: Sweep) -> None:
        across, panels = min(sweep.across, len(sweep.panels)), sweep.panels
        labels = [label for panel in panels for label in panel.rows.labels]
        self._margin = max(map(len, labels)) / _CHARACTERS_PER_INCH + _BESIDE_LABELS
        self._columns = [max(len(p.columns.labels) for p in panels[i::across]) for i in range(across)]
        lines = [panels[i : i + across] for i in range(0, len(panels), across)]
        self._rows = [max(len(p.rows.labels) for p in line) for line in lines]
        self.width = self._left(across) - self._margin + 0.7 + _COLOR_BAR[0]
        self.height = self._top(len(lines)) - _PANEL_TEXTS

    def _left(self, column: int) -> float:
        return self._margin * (column + 1) + _CELL[0] * sum(self._columns[:column])

    def _top(self, row: int) -> float:
        return _PANEL_TEXTS * row + _CELL[1] * sum(self._rows[:row])

    def add_panel(self, figure: Figure, row: int, column: int, panel: Panel) -> Axes:
        size = (len(panel.columns.labels) * _CELL[0], len(panel.rows.labels) * _CELL[1])
        return self._add_axes(figure, self._left(column), self._top(row), *size)

    def add_color_bar(self, figure: Figure) -> Axes:
        width, height = _COLOR_BAR
        return self._add_axes(figure, self.width - width, 0, width, min(height, self.height))

    def _add_axes(self, figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
        x, y = left / self.width, 1 - (top + height) / self.height
        return figure.add_axes((x, y, width / self.width, height / self.height))


def _draw(figure: Figure, sweep: Sweep, summary: pd.DataFrame, layout: _Layout) -> None:
    figure.set_layout_engine("none")
    norm, is_clipped = _color_scale(summary["mean"].to_numpy(float))
    star = _find_significant_best(summary)
    start = 0
    for number, panel in enumerate(sweep.panels):
        axes = layout.add_panel(figure, *divmod(number, sweep.across), panel)
        stop = start + len(panel.rows.labels) * len(panel.columns.labels)
        _draw_panel(axes, panel, summary.iloc[start:stop], norm, len(sweep.seeds), star)
        start = stop
    if summary["n"].any():
        bar = figure.colorbar(
            ScalarMappable(norm, _CMAP),
            cax=layout.add_color_bar(figure),
            extend="min" if is_clipped else "neither",
        )
        bar.ax.tick_params(labelsize=8)
        bar.ax.ticklabel_format(useOffset=False)
        bar.set_label(TASKS[sweep.task].metric.replace("_", " "), fontsize=8.5)
        bar.outline.set_visible(False)
    characters = int(_CHARACTERS_PER_INCH * layout.width)
    above, below = 1 + 0.35 / layout.height, -(_PANEL_TEXTS - 0.3) / layout.height
    title = textwrap.fill(_title(sweep, summary), characters)
    figure.text(0, above, title, fontsize=10, va="bottom")
    legend = textwrap.fill(_legend(sweep), characters)
    figure.text(0, below, legend, fontsize=8.5, color="0.3", va="top")


def _color_scale(means: np.ndarray) -> tuple[Normalize, bool]:
    """Return the color scale of a figure, and True if means are below it.

    It reaches down to the worst mean, but not so far that a failed run hides the differences of others.
    """
    finite = means[np.isfinite(means)]
    if not finite.size:
        return Normalize(0, 1), False
    best, median, worst = finite.max(), float(np.median(finite)), finite.min()
    lowest = max(worst, median - 3 * (best - median)) if best > median else worst
    if lowest == best:
        return Normalize(best - 1, best), False
    return Normalize(lowest, best), bool(lowest > worst)


def _draw_panel(
    axes: Axes, panel: Panel, cells: pd.DataFrame, norm: Normalize, seeds: int, star: str | None
) -> None:
    import seaborn

    shape = (len(panel.rows.labels), len(panel.columns.labels))
    texts = [_cell_text(cell, seeds, cell["run"] == star) for _, cell in cells.iterrows()]
    seaborn.heatmap(
        cells["mean"].to_numpy(float).reshape(shape),
        ax=axes,
        cmap=_CMAP,
        vmin=norm.vmin,  # seaborn warns of missing means without these
        vmax=norm.vmax,
        cbar=False,
        annot=np.array(texts).reshape(shape),
        fmt="",
        annot_kws={"fontsize": 7.5},
        linewidths=1.2,
        xticklabels=panel.columns.labels,
        yticklabels=panel.rows.labels,
    )
    axes.set_facecolor("0.85")  # cells without a finished run
    own_best = _find_best(cells)
    for number, (index, mean) in enumerate(cells["mean"].items()):
        row, column = divmod(number, shape[1])
        if math.isnan(mean):  # seaborn leaves out the texts of these cells
            middle = (column + 0.5, row + 0.5)
            axes.text(*middle, texts[number], fontsize=7.5, color="0.3", ha="center", va="center")
        if index == own_best:
            frame = Rectangle((column + 0.02, row + 0.02), 0.96, 0.96, fill=False, zorder=5)
            frame.set(edgecolor="crimson", linewidth=2)
            axes.add_patch(frame)
    axes.set_title(panel.title, fontsize=9.5, loc="left", pad=4)
    axes.set_xlabel(panel.columns.title, fontsize=8.5)
    axes.set_ylabel(panel.rows.title, fontsize=8.5)
    axes.tick_params(length=0, labelsize=8, labelrotation=0)


def _cell_text(cell: pd.Series, seeds: int, has_star: bool) -> str:
    lines = []
    if cell["n"]:
        lines.append(f"{cell['mean']:.2f}" + ("★" if has_star else ""))
        if cell["n"] > 1:
            lines.append(f"±{cell['std']:.2f}")
        if cell["n"] < seeds:
            lines.append(f"n={cell['n']}")
    elif cell["diverged"]:
        lines.append("diverged")
    if math.isfinite(cell["published"]):
        lines.append(f"({cell['published']:.2f})")
    return "\n".join(lines)


def _find_best(cells: pd.DataFrame) -> int | None:
    """Return the index of the best mean among the cells with the most finished runs."""
    finished = cells[cells["n"] > 0]
    if finished.empty:
        return None
    return int(finished[finished["n"] == finished["n"].max()]["mean"].idxmax())


def _find_significant_best(cells: pd.DataFrame) -> str | None:
    """Return the run of the best mean if it differs significantly from all other finished runs."""
    best = _find_best(cells)
    if best is None:
        return None
    run: str = cells["run"][best]
    others = cells[(cells["n"] > 0) & (cells["run"] != run)]
    return run if (others["p"] < SIGNIFICANCE).all() and len(others) else None


def _title(sweep: Sweep, summary: pd.DataFrame) -> str:
    runs = summary.drop_duplicates("run")  # a run may be in several cells
    diverged = f", {runs['diverged'].sum()} diverged" if runs["diverged"].any() else ""
    total = len(runs) * len(sweep.seeds)
    return f"{sweep.about}. {runs['n'].sum()} of {total} runs finished{diverged}."


def _legend(sweep: Sweep) -> str:
    seeds = ", ".join(map(str, sweep.seeds))
    content = f"one run, with seed {seeds}"
    if len(sweep.seeds) > 1:
        content = f"mean ± standard deviation over {len(sweep.seeds)} runs, with the seeds {seeds}"
    published = " In parentheses: result of the paper." if sweep.published else ""
    return (
        f"Cell: {content}. Frame: best mean of the panel, be it by chance. ★: better than every other "
        f"cell (Welch's test, corrected for all pairs, p < {SIGNIFICANCE:g}). n: number of finished "
        f"runs, if some are missing. Gray: no finished run.{published}"
    )
