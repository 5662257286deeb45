"""Figures of a report: differences with intervals, Dice of the runs, learning curves."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nnunet_cpr._figures import styled_figure
from nnunet_cpr.reports.metrics import Metric, difference_text
from nnunet_cpr.reports.numbers import Numbers
from nnunet_cpr.reports.over_datasets import OverDatasets
from nnunet_cpr.reports.results import Results, run_means, unique
from nnunet_cpr.reports.verdicts import Judged, Verdict
from nnunet_cpr.studies.definition import Study, TrainerEntry

MAX_DRAWN = 8
"""Maximum number of trainers beside the reference in figures."""
MAX_PANELS = 3
"""Maximum number of trainers in the figure over data sets."""
_CURVES = {"train_loss": "training loss", "val_loss": "validation loss", "pseudo_dice": "pseudo Dice"}
_MAX_POINTS = 250
"""Maximum number of points of a line."""
_STYLE: dict[Any, Any] = {"svg.hashsalt": "nnunet-cpr", "pdf.fonttype": 42, "font.size": 9}
_COLORS = {Verdict.BETTER: "#00775c", Verdict.WORSE: "#b34700"}
_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}


@dataclass
class Picture:
    """A figure, complete after the ``with`` block of :func:`draw`.

    Attributes:
        name: name of the files without suffix.
        alt: alternative text with the numbers that it shows.
        files: content by suffix; the first is shown on the page. Equal figures have equal bytes.
    """

    name: str
    alt: str = ""
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The figure as a data URI."""
        suffix, content = next(iter(self.files.items()))
        kind = {"svg": "svg+xml"}.get(suffix, suffix)
        return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


@contextmanager
def draw(
    name: str, size: tuple[float, float], suffixes: Sequence[str] = ("svg", "pdf")
) -> Iterator[tuple[Figure, Picture]]:
    """Yield a figure and its picture; the figure is saved in each format at the end.

    Args:
        name: name of the files without suffix.
        size: width and height in inches.
        suffixes: formats; the page shows the first.
    """
    picture = Picture(name)
    with styled_figure(size, _STYLE) as figure:
        yield figure, picture
        for suffix in suffixes:
            content = io.BytesIO()
            figure.savefig(content, format=suffix, dpi=150, metadata=_UNDATED[suffix])
            picture.files[suffix] = content.getvalue()


def drawn_trainers(study: Study) -> list[TrainerEntry]:
    """Return the trainers in figures: the reference and the first :data:`MAX_DRAWN` of the others."""
    others = [entry for entry in study.trainers if entry.trainer != study.reference]
    return [study.entry(study.reference), *others[:MAX_DRAWN]]


def draw_differences(comparisons: Sequence[Judged[Numbers]], title: str) -> Picture:
    """Draw the differences of one setting and metric to the reference, with their 95 % intervals."""
    first = comparisons[0].numbers
    metric, margin = first.metric, first.margin
    name = "-".join(["differences", *first.setting, metric.name])
    ends = np.abs([[each.numbers.gain, *each.numbers.interval] for each in comparisons])
    # An outlier would hide the others.
    reach = 1.1 * max(2 * margin, min(np.nanmax(ends), 4 * np.nanpercentile(ends, 75)))
    with draw(name, (7, 1.3 + 0.3 * len(comparisons))) as (figure, picture):
        axes = figure.subplots()
        axes.axvspan(
            -margin, margin, color="0.9", label=f"equivalent: within {metric.amount(margin, 'g')}"
        )
        axes.axvline(0, color="0.4", linewidth=0.8)
        for height, each in enumerate(comparisons):
            difference = each.numbers.difference
            interval = [metric.sign * end for end in each.numbers.interval]
            color = _COLORS.get(each.verdict, "#00609f")
            axes.plot(interval, [height, height], color=color, linewidth=2)
            axes.plot(difference, height, "o", color=color)
            if abs(difference) > reach:
                edge = math.copysign(0.97 * reach, difference)
                side = "right" if difference > 0 else "left"
                axes.text(edge, height, difference_text(difference), ha=side, va="center", size=8)
        axes.set_yticks(
            range(len(comparisons)), [_short(each.numbers.entry.full_title) for each in comparisons]
        )
        axes.set_ylim(len(comparisons) - 0.5, -0.5)
        axes.set_xlim(-reach, reach)
        axes.set_xlabel(
            f"{metric.title} minus that of {_short(first.reference.full_title)}\n"
            f"({metric.difference_unit}; {'right' if metric.sign > 0 else 'left'} of 0 is better)"
        )
        axes.set_title(title, fontsize=9)
        axes.legend(loc="best", fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    picture.alt = (
        f"Differences of {metric.title} to {first.reference.full_title} in {metric.difference_unit}, "
        "with 95 % intervals; the numbers are in the table."
    )
    return picture


def draw_over_datasets(comparisons: Sequence[Judged[OverDatasets]]) -> Picture:
    """Draw the differences of each data set and the one over data sets below them: a forest plot.

    Args:
        comparisons: comparisons by one metric; the first :data:`MAX_PANELS` have a panel each.
    """
    shown = comparisons[:MAX_PANELS]
    first = shown[0].numbers
    metric = first.metric
    names = unique([each.setting.dataset for judged in shown for each in judged.numbers.datasets])
    with draw(f"over-datasets-{metric.name}", (9, 1.4 + 0.25 * len(names))) as (figure, picture):
        panels = np.atleast_1d(figure.subplots(1, len(shown), sharey=True))
        for axes, judged in zip(panels, shown):
            axes.axvline(0, color="0.4", linewidth=0.8)
            rows = {each.setting.dataset: each for each in judged.numbers.datasets}
            for height, name in enumerate(names):
                if name in rows:
                    low, high = sorted(metric.sign * end for end in rows[name].interval)
                    axes.plot([low, high], [height, height], color="0.6", linewidth=1.5)
                    axes.plot(rows[name].difference, height, "s", color="0.3", markersize=4)
            low, high = sorted(metric.sign * end for end in judged.numbers.interval)
            middle, height = judged.numbers.difference, len(names)
            color = _COLORS.get(judged.verdict, "#00609f")
            axes.fill([low, middle, high, middle], height + np.array([0, 0.3, 0, -0.3]), color=color)
            axes.axhline(len(names) - 0.5, color="0.8", linewidth=0.8)
            means = [each.difference for each in rows.values()]
            reach = 1.2 * max(np.abs([*means, low, high])) or 1
            axes.set_xlim(-reach, reach)
            axes.set_title(_short(judged.numbers.entry.full_title), fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_yticks(range(len(names) + 1), [*map(_short, names), "all data sets"])
        panels[0].set_ylim(len(names) + 0.5, -0.5)
        figure.supxlabel(
            f"{metric.title} minus that of {_short(first.reference.full_title)} "
            f"({metric.difference_unit}; {'right' if metric.sign > 0 else 'left'} of 0 is better); "
            "bars: 95 % intervals",
            fontsize=9,
        )
    picture.alt = (
        f"Differences of {metric.title} to {first.reference.full_title} on each data set and over all "
        f"of them, in {metric.difference_unit}, with 95 % intervals; over_datasets.csv has the numbers."
    )
    return picture


def draw_runs(part: Results, metric: Metric) -> Picture:
    """Draw the foreground mean of every run: a line joins the trainers of one fold and seed."""
    means = run_means(part.cases, metric.name)
    table = metric.scale * means.pivot(index="trainer", columns=["fold", "seed"], values=metric.name)
    entries = [entry for entry in drawn_trainers(part.study) if entry.trainer in table.index]
    table = table.reindex([entry.trainer for entry in entries])
    with draw("-".join(["runs", *part.setting, metric.name]), (7, 3.6)) as (figure, picture):
        axes = figure.subplots()
        for position, fold in enumerate(part.study.folds):
            color = matplotlib.colormaps["tab10"](position % 10)
            if fold in table:
                lines = axes.plot(table[fold].to_numpy(), "o-", color=color, linewidth=0.6, markersize=4)
                lines[0].set_label(f"fold {fold}")
        axes.set_xticks(
            range(len(entries)), [_short(e.full_title) for e in entries], rotation=20, ha="right"
        )
        axes.margins(x=0.15)
        axes.set_ylabel(metric.heading)
        axes.legend(fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    picture.alt = f"{metric.heading} of the runs of each trainer."
    return picture


def draw_curves(part: Results) -> Picture:
    """Draw losses and pseudo Dice over the epochs: mean and range of each trainer's runs."""
    width = -(-(int(part.epochs["epoch"].max()) + 1) // _MAX_POINTS)
    binned = part.epochs.assign(epoch=part.epochs["epoch"] // width * width)
    table = binned.groupby(["trainer", "epoch"])[list(_CURVES)].agg(["mean", "min", "max"])
    entries = [entry for entry in drawn_trainers(part.study) if entry.trainer in table.index]
    with draw("-".join(["curves", *part.setting]), (9, 3.2)) as (figure, picture):
        panels = figure.subplots(1, len(_CURVES))
        for entry in entries:
            for axes, (column, label) in zip(panels, _CURVES.items()):
                values = table.loc[entry.trainer][column]
                (line,) = axes.plot(values.index, values["mean"], label=_short(entry.full_title))
                axes.fill_between(
                    values.index, values["min"], values["max"], color=line.get_color(), alpha=0.15
                )
                axes.set(xlabel="epoch", ylabel=label)
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7
        )
    picture.alt = "Losses and pseudo Dice over the epochs."
    return picture


def _short(text: str, length: int = 40) -> str:
    short = text if len(text) <= length else text[: length - 1] + "…"
    return short.replace("$", r"\$")  # otherwise Matplotlib reads it as mathematics
