"""Figures of a report: differences with intervals, Dice of the runs, learning curves."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nnunet_cpr.figures import styled_figure
from nnunet_cpr.reports.comparison import Comparison, Verdict
from nnunet_cpr.reports.metrics import Metric, value_text
from nnunet_cpr.reports.results import ConditionResults, run_means, unique
from nnunet_cpr.studies.study import Study

FIGURES = ("differences", "over-datasets", "runs", "curves", "case")
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
_COLORS = {
    Verdict.BETTER: "#00775c",
    Verdict.WORSE: "#b34700",
    Verdict.EQUIVALENT: "#00609f",
    Verdict.NON_INFERIOR: "#00609f",
}
_UNDECIDED = "0.35"
"""Color of what shows nothing, whose marker is empty, too."""
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
    metric, margin = first.metric, first.margin
    ends = np.abs([[each.gain, *each.interval] for each in comparisons])
    # An outlier would hide the others.
    reach = 1.1 * max(2 * margin, min(np.nanmax(ends), 4 * np.nanpercentile(ends, 75)))
    with styled_figure((7, 1.3 + 0.3 * len(comparisons)), STYLE) as figure:
        axes = figure.subplots()
        within = f"equivalent: within {metric.amount(margin, 'g')}"
        axes.axvspan(-margin, margin, color="0.9", label=within)
        axes.axvline(0, color="0.4", linewidth=0.8)
        for height, each in enumerate(comparisons):
            difference = each.difference
            color = _COLORS.get(each.verdict, _UNDECIDED)
            interval = each.shown_interval
            axes.plot(interval, [height, height], color=color, linewidth=2)
            fill = color if each.verdict in _COLORS else "white"
            axes.plot(difference, height, "o", color=color, markerfacecolor=fill)
            for end, marker in zip(interval, "<>"):
                if abs(end) > reach:  # an arrow, as it goes on
                    axes.plot(math.copysign(0.98 * reach, end), height, marker, color=color)
            if abs(difference) > reach:
                edge = math.copysign(0.94 * reach, difference)
                side = "right" if difference > 0 else "left"
                axes.text(edge, height, value_text(difference, "+.2f"), ha=side, va="center", size=8)
        names = [short(each.entry.full_title) for each in comparisons]
        axes.set_yticks(range(len(names)), names)
        axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(-reach, reach), title=title)
        axes.set_xlabel(_difference_label(first))
        verdicts = unique([each.verdict for each in comparisons])
        for verdict in verdicts:
            color = _COLORS.get(verdict, _UNDECIDED)
            fill = color if verdict in _COLORS else "white"
            axes.plot([], [], "o", color=color, markerfacecolor=fill, label=verdict.value)
        axes.legend()
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
    names = unique([each.condition.dataset for judged in shown for each in judged.datasets])
    with styled_figure((9, 1.4 + 0.25 * len(names)), STYLE) as figure:
        panels = np.atleast_1d(figure.subplots(1, len(shown), sharey=True))
        for axes, judged in zip(panels, shown):
            axes.axvspan(-first.margin, first.margin, color="0.92")
            axes.axvline(0, color="0.4", linewidth=0.8)
            axes.axhline(len(names) - 0.5, color="0.8", linewidth=0.8)
            for each in judged.datasets:
                height = names.index(each.condition.dataset)
                axes.plot(each.shown_interval, [height, height], color="0.6", linewidth=1.5)
                axes.plot(each.difference, height, "s", color="0.3", markersize=4)
            (low, high), middle = judged.shown_interval, judged.difference
            color = _COLORS.get(judged.verdict, _UNDECIDED)
            axes.fill([low, middle, high, middle], len(names) + np.array([0, 0.3, 0, -0.3]), color=color)
            means = [each.difference for each in judged.datasets]
            reach = 1.2 * max(np.abs([*means, low, high])) or 1
            for each in judged.datasets:
                height = names.index(each.condition.dataset)
                number = f" {value_text(each.difference, '+.2f')} ({each.cases})"
                axes.text(reach, height, number, va="center", size=7, clip_on=False)
                for end, marker in zip(each.shown_interval, "<>"):
                    if abs(end) > reach:
                        axes.plot(math.copysign(0.98 * reach, end), height, marker, color="0.6", ms=4)
            number = f" {value_text(middle, '+.2f')}"
            axes.text(reach, len(names), number, va="center", size=7, clip_on=False)
            axes.set(xlim=(-reach, reach), title=short(judged.entry.full_title))
        is_all = not any(judged.left_out for judged in shown)
        mean = "all data sets" if is_all else "mean, not of all"
        panels[0].set_yticks(range(len(names) + 1), [*map(short, names), mean])
        panels[0].set_ylim(len(names) + 0.5, -0.5)
        within = f"grey: within {metric.amount(first.margin, 'g')}"
        label = f"{_difference_label(first)}; bars: 95 % intervals; {within}; right: difference (cases)"
        figure.supxlabel(label, fontsize=9)
        alt = (
            f"Differences of {metric.title} to {first.reference.full_title} on each data set, and their "
            f"mean, in {metric.difference_unit}, with 95 % intervals; over_datasets.csv has the "
            "numbers."
        )
        return save(figure, f"over-datasets-{metric.name}", alt)


def _difference_label(n: Comparison) -> str:
    side = "right" if n.metric.sign > 0 else "left"
    return (
        f"{n.metric.title} minus that of {short(n.reference.full_title)}\n"
        f"({n.metric.difference_unit}; {side} of 0 is better)"
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
        axes.legend()
        alt = f"{metric.heading} of the runs of each trainer."
        return save(figure, "-".join(["runs", *results.condition, metric.name]), alt)


def draw_curves(results: ConditionResults) -> Picture:
    """Draw losses and pseudo Dice over the epochs: mean and range of each trainer's runs."""
    width = -(-(int(results.epochs["epoch"].max()) + 1) // _MAX_POINTS)
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
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
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
