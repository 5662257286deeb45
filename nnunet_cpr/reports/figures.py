"""Figures of a report: differences with intervals, Dice of the runs, learning curves."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter, MaxNLocator

from nnunet_cpr.figures import styled_figure
from nnunet_cpr.refusals import counted
from nnunet_cpr.reports.comparison import Comparison, Verdict
from nnunet_cpr.reports.metrics import Metric, value_text
from nnunet_cpr.reports.results import ConditionResults, run_means, unique
from nnunet_cpr.studies.study import Study

FIGURES = ("differences", "over-datasets", "runs", "curves", "sizes", "case")
"""First words of the names of all figures."""
MAX_DRAWN = 8
"""Maximum number of trainers beside the reference in figures."""
MAX_PANELS = 3
"""Maximum number of trainers in the figure over data sets."""
_CURVES = {"train_loss": "training loss", "val_loss": "validation loss", "pseudo_dice": "pseudo Dice"}
_MAX_POINTS = 250
"""Maximum number of points of a line."""
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "nnunet-cpr",
    "pdf.fonttype": 42,
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_LOOKS: dict[Verdict, dict[str, Any]] = {
    Verdict.BETTER: {"color": "#00775c", "marker": "o"},
    Verdict.WORSE: {"color": "#b34700", "marker": "o"},
    Verdict.EQUIVALENT: {"color": "#00609f", "marker": "D"},
    Verdict.NON_INFERIOR: {"color": "#00609f", "marker": ">"},
    Verdict.UNDECIDED: {"color": "0.35", "marker": "o", "markerfacecolor": "white"},
    Verdict.NONE: {"color": "0.35", "marker": "x"},
}
"""Look of each verdict, also without its color."""
_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}


class Picture(NamedTuple):
    """A figure in one or more formats.

    Attributes:
        name: name of the files without suffix.
        alt: alternative text with the numbers that it shows.
        files: content by suffix; the first is shown on the page. Equal figures have equal bytes.
    """

    name: str
    alt: str
    files: dict[str, bytes]

    @property
    def source(self) -> str:
        """The figure as a data URI."""
        suffix, content = next(iter(self.files.items()))
        kind = {"svg": "svg+xml"}.get(suffix, suffix)
        return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def save(figure: Figure, name: str, alt: str, suffixes: Sequence[str] = ("svg", "pdf")) -> Picture:
    """Return a figure as a picture, saved within its context."""
    files = {}
    for suffix in suffixes:
        content = io.BytesIO()
        figure.savefig(content, format=suffix, dpi=150, metadata=_UNDATED[suffix])
        files[suffix] = content.getvalue()
    return Picture(name, alt, files)


def draw_differences(
    comparisons: Sequence[Comparison], title: str, suffixes: Sequence[str] = ("svg", "pdf")
) -> Picture:
    """Draw the differences of one condition and metric to the reference, with their 95 % intervals."""
    first = comparisons[0]
    metric = first.metric
    with styled_figure((7, 1.6 + 0.3 * len(comparisons)), STYLE) as figure:
        axes = figure.subplots()
        _draw_rows(axes, comparisons)
        axes.set_yticks(range(len(comparisons)), [short(each.entry.full_title) for each in comparisons])
        axes.set(ylim=(len(comparisons) - 0.5, -0.5), title=title)
        axes.set_xlabel(f"{_difference_label(first)}\nright: difference (cases)")
        _draw_legend(figure, comparisons)
        alt = (
            f"Differences of {metric.title} to {first.reference.full_title} in "
            f"{metric.difference_unit}, with 95 % intervals; the numbers are in the table."
        )
        return save(figure, "-".join(["differences", *first.condition, metric.name]), alt, suffixes)


def draw_over_datasets(comparisons: Sequence[Comparison]) -> Picture:
    """Draw the differences of each data set and the one over data sets below them: a forest plot.

    Args:
        comparisons: comparisons by one metric; the first :data:`MAX_PANELS` have a panel each.
    """
    shown = comparisons[:MAX_PANELS]
    first = shown[0]
    metric = first.metric
    names = unique([each.condition.dataset for over in shown for each in over.datasets])
    with styled_figure((9, 1.6 + 0.25 * len(names)), STYLE) as figure:
        panels = np.atleast_1d(figure.subplots(1, len(shown), sharey=True))
        for axes, over in zip(panels, shown):
            heights = [names.index(each.condition.dataset) for each in over.datasets]
            _draw_rows(axes, [*over.datasets, over], [*heights, len(names)])
            axes.axhline(len(names) - 0.5, color="0.8", linewidth=0.8)
            axes.set_title(short(over.entry.full_title))
        mean = "mean, not of all" if any(over.left_out for over in shown) else "all data sets"
        panels[0].set_yticks(range(len(names) + 1), [*map(short, names), mean])
        panels[0].set_ylim(len(names) + 0.5, -0.5)
        label = f"{_difference_label(first)}; squares: one data set; right: difference (cases)"
        figure.supxlabel(label, fontsize=9)
        _draw_legend(figure, shown)
        alt = (
            f"Differences of {metric.title} to {first.reference.full_title} on each data set, and their "
            f"mean, in {metric.difference_unit}, with 95 % intervals; over_datasets.csv has the "
            "numbers."
        )
        return save(figure, f"over-datasets-{metric.name}", alt)


def _draw_rows(axes: Axes, rows: Sequence[Comparison], heights: Sequence[int] | None = None) -> None:
    """Draw the region of equivalence, and each comparison: interval, difference, and its number."""
    margin = rows[0].margin
    ends = np.abs([[each.gain, *each.interval] for each in rows])
    # An outlier would hide the others.
    reach = 1.1 * max(2 * margin, min(np.nanmax(ends), 4 * np.nanpercentile(ends, 75)))
    axes.axvspan(-margin, margin, color="0.9")
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.set_xlim(-reach, reach)
    for height, each in zip(heights or range(len(rows)), rows):
        is_part = heights is not None and not each.datasets  # its verdict is not drawn here
        look = {"color": "0.55", "marker": "s"} if is_part else _LOOKS[each.verdict]
        axes.plot(each.shown_interval, [height, height], color=look["color"], linewidth=2)
        axes.plot(each.difference, height, linestyle="", **look)
        for end, marker in zip(each.shown_interval, "<>"):
            if abs(end) > reach:  # an arrow, as it goes on
                axes.plot(math.copysign(0.98 * reach, end), height, marker, color=look["color"])
        number = f" {value_text(each.difference, '+.2f')} ({each.cases})"
        axes.text(reach, height, number, va="center", size=7, clip_on=False)


def _draw_legend(figure: Figure, comparisons: Sequence[Comparison]) -> None:
    """Draw what the region and the markers mean, above the axes."""
    first = comparisons[0]
    within = f"within {first.metric.amount(first.margin, 'g')}: equivalent"
    handles: list[Artist] = [Patch(color="0.9", label=within)]
    for verdict in unique([each.verdict for each in comparisons]):
        handles.append(Line2D([], [], linestyle="", label=verdict.value, **_LOOKS[verdict]))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)


def draw_sizes(comparison: Comparison, sizes: pd.Series, unit: str) -> Picture:
    """Draw the gain of each case against the size of its structures.

    Args:
        comparison: comparison in a condition.
        sizes: size of all structures in the ground truth of each case, by (fold, case); cases of size 0
            are not drawn.
        unit: unit of the sizes.
    """
    gains = comparison.gains_of_cases
    known = sizes.reindex(gains.index)
    drawn, metric = known > 0, comparison.metric
    with styled_figure((7, 3.6), STYLE) as figure:
        axes = figure.subplots()
        axes.axhline(0, color="0.4", linewidth=0.8)
        of_folds = known[drawn].groupby(level=0, sort=False)
        for position, (fold, of_fold) in enumerate(of_folds):
            (line,) = axes.plot(of_fold, gains[of_fold.index], "o", markersize=4, alpha=0.7)
            line.set(color=f"C{position % 10}", label=f"fold {fold}")
        axes.set_xscale("log")
        for axis_labels in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            axis_labels(LogFormatter(minor_thresholds=(2, 0.5)))
        figure.legend(loc="outside right upper", frameon=False)
        left_out = int((~drawn).sum())
        note = f"; {counted(left_out, 'case')} without a structure left out" if left_out else ""
        axes.set_xlabel(f"size of the structures of a case ({unit}){note}")
        axes.set_ylabel(f"gain of {metric.title} ({metric.difference_unit})")
        names = f"{comparison.entry.full_title} instead of {comparison.reference.full_title}"
        axes.set_title(short(names, 90))
        alt = f"Gain of each case by {names} against the size of its structures."
        return save(figure, "-".join(["sizes", *comparison.condition]), alt)


def _difference_label(n: Comparison) -> str:
    side = "right" if n.metric.sign > 0 else "left"
    return (
        f"{n.metric.title} minus that of {short(n.reference.full_title)}\n"
        f"({n.metric.difference_unit}; {side} of 0 is better; bars: 95 % intervals)"
    )


def draw_runs(results: ConditionResults, metric: Metric) -> Picture:
    """Draw the foreground mean of every run, a point for each fold and seed."""
    means = run_means(results.cases, metric.name)
    table = metric.scale * means.pivot(index="trainer", columns=["fold", "seed"], values=metric.name)
    titles = _titles_of_drawn(results.study, table)
    with styled_figure((7, 3.6), STYLE) as figure:
        axes = figure.subplots()
        for position, fold in enumerate(results.study.folds):
            if fold in table:
                values, color = table[fold].loc[list(titles)], f"C{position % 10}"
                lines = axes.plot(values.to_numpy(), "o", color=color, markersize=4, alpha=0.7)
                lines[0].set_label(f"fold {fold}")
        axes.set_xticks(range(len(titles)), [*titles.values()], rotation=20, ha="right")
        axes.margins(x=0.15)
        axes.set_ylabel(metric.heading)
        figure.legend(loc="outside right upper", frameon=False)
        alt = f"{metric.heading} of the runs of each trainer."
        return save(figure, "-".join(["runs", *results.condition, metric.name]), alt)


def draw_curves(results: ConditionResults) -> Picture:
    """Draw losses and pseudo Dice over the epochs: mean and range of each trainer's runs.

    The axes show the range of the second half of the epochs, which the fall of the first would hide.
    """
    last = int(results.epochs["epoch"].max())
    width = -(-(last + 1) // _MAX_POINTS)
    binned = results.epochs.assign(epoch=results.epochs["epoch"] // width * width)
    table = binned.groupby(["trainer", "epoch"])[list(_CURVES)].agg(["mean", "min", "max"])
    with styled_figure((9, 3.2), STYLE) as figure:
        panels = figure.subplots(1, len(_CURVES))
        for trainer, title in _titles_of_drawn(results.study, table).items():
            for axes, (column, label) in zip(panels, _CURVES.items()):
                values = table.loc[trainer][column]
                (line,) = axes.plot(values.index, values["mean"], label=title)
                color = line.get_color()
                axes.fill_between(values.index, values["min"], values["max"], color=color, alpha=0.15)
                axes.set(xlabel="epoch", ylabel=label)
                axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for axes, column in zip(panels, _CURVES):
            later = table[column][table.index.get_level_values("epoch") >= last / 2]
            low, high = later["min"].min(), later["max"].max()
            if low < high:
                axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        handles_and_titles = panels[0].get_legend_handles_labels()
        figure.legend(*handles_and_titles, loc="outside lower center", ncols=2)
        alt = "Losses and pseudo Dice over the epochs."
        return save(figure, "-".join(["curves", *results.condition]), alt)


def _titles_of_drawn(study: Study, table: pd.DataFrame) -> dict[str, str]:
    """Return the titles of the reference and the first others that are in the index of a table."""
    others = [entry for entry in study.trainers if entry.key != study.reference]
    drawn = [study.entry(study.reference), *others[:MAX_DRAWN]]
    return {e.key: short(e.full_title) for e in drawn if e.key in table.index}


def short(text: str, length: int = 40) -> str:
    """Return a text for a figure; names of trainers differ at their ends."""
    end = length // 2
    short = text if len(text) <= length else f"{text[: length - end - 1]}…{text[-end:]}"
    return short.replace("$", r"\$")  # otherwise Matplotlib reads it as mathematics
