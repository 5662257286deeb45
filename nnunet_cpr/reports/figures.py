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
from nnunet_cpr.reports.comparison import Comparison
from nnunet_cpr.reports.metrics import METRICS, Metric, difference_text
from nnunet_cpr.reports.results import Results, Setting, run_means
from nnunet_cpr.studies.definition import TrainerEntry

MAX_DRAWN = 8
"""Maximum number of trainers beside the reference in figures."""
_CURVES = {"train_loss": "training loss", "val_loss": "validation loss", "pseudo_dice": "pseudo Dice"}
_MAX_POINTS = 250
"""Maximum number of points of a line."""
_STYLE: dict[Any, Any] = {"svg.hashsalt": "nnunet-cpr", "pdf.fonttype": 42, "font.size": 9}
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


def drawn_trainers(results: Results) -> list[TrainerEntry]:
    """Return the trainers in figures: the reference and up to :data:`MAX_DRAWN` with the best mean."""
    study = results.study
    metric = METRICS[study.metrics[0]] if study.metrics[0] in results.cases else METRICS["dice"]
    means = metric.sign * run_means(results.cases, metric.name).groupby("trainer")[metric.name].mean()
    others = [entry for entry in study.trainers if entry.trainer != study.reference]
    others.sort(key=lambda entry: -means.get(entry.trainer, -np.inf))
    names = {study.reference, *(entry.trainer for entry in others[:MAX_DRAWN])}
    return [entry for entry in study.trainers if entry.trainer in names]


def draw_differences(comparisons: Sequence[Comparison], title: str) -> Picture:
    """Draw the differences of one setting and metric to the reference, with their 95 % intervals."""
    first = comparisons[0]
    metric, margin = first.metric, first.margin
    name = "-".join(["differences", *first.setting, metric.name])
    ends = np.abs([[c.difference, c.interval_low, c.interval_high] for c in comparisons])
    # An outlier would hide the others.
    reach = 1.1 * max(2 * margin, min(np.nanmax(ends), 4 * np.nanpercentile(ends, 75)))
    with draw(name, (7, 1.3 + 0.3 * len(comparisons))) as (figure, picture):
        axes = figure.subplots()
        axes.axvspan(
            -margin, margin, color="0.9", label=f"equivalent: within {metric.amount(margin, 'g')}"
        )
        axes.axvline(0, color="0.4", linewidth=0.8)
        for height, c in enumerate(comparisons):
            color = {"better": "#00775c", "worse": "#b34700"}.get(c.verdict, "#00609f")
            axes.plot([c.interval_low, c.interval_high], [height, height], color=color, linewidth=2)
            axes.plot(c.difference, height, "o", color=color)
            if abs(c.difference) > reach:
                edge = math.copysign(0.97 * reach, c.difference)
                side = "right" if c.difference > 0 else "left"
                axes.text(edge, height, difference_text(c.difference), ha=side, va="center", size=8)
        axes.set_yticks(range(len(comparisons)), [_short(c.entry.full_title) for c in comparisons])
        axes.set_ylim(len(comparisons) - 0.5, -0.5)
        axes.set_xlim(-reach, reach)
        axes.set_xlabel(
            f"{metric.title} minus that of {_short(first.reference.full_title)}\n"
            f"({metric.difference_unit}; {'right' if metric.sign > 0 else 'left'} of 0 is better)"
        )
        axes.set_title(title, fontsize=9)
        axes.legend(loc="best", fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    texts = [
        f"{c.entry.full_title} {difference_text(c.difference)} "
        f"({difference_text(c.interval_low)} to {difference_text(c.interval_high)})"
        for c in comparisons
    ]
    picture.alt = (
        f"Differences of {metric.title} to {first.reference.full_title} in {metric.difference_unit}, "
        f"with 95 % intervals: {'; '.join(texts)}."
    )
    return picture


def draw_runs(results: Results, setting: Setting, metric: Metric, shown: list[TrainerEntry]) -> Picture:
    """Draw the foreground mean of every run: a line joins the trainers of one fold and seed."""
    means = results.rows_for(run_means(results.cases, metric.name), setting)
    table = metric.scale * means.pivot(index="trainer", columns=["fold", "seed"], values=metric.name)
    entries = [entry for entry in shown if entry.trainer in table.index]
    table = table.reindex([entry.trainer for entry in entries])
    folds = list(results.study.folds)
    with draw("-".join(["runs", *setting, metric.name]), (7, 3.6)) as (figure, picture):
        axes = figure.subplots()
        for position, fold in enumerate(folds):
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
    texts = [
        f"{entry.full_title} {low:.2f} to {high:.2f}"
        for entry, low, high in zip(entries, table.min(axis=1), table.max(axis=1))
    ]
    picture.alt = f"{metric.heading} of the runs: {'; '.join(texts)}."
    return picture


def draw_curves(results: Results, setting: Setting, shown: list[TrainerEntry]) -> Picture | None:
    """Draw losses and pseudo Dice over the epochs: mean and range of each trainer's runs."""
    epochs = results.rows_for(results.epochs, setting)
    if epochs.empty:
        return None
    width = -(-(int(epochs["epoch"].max()) + 1) // _MAX_POINTS)
    binned = epochs.assign(epoch=epochs["epoch"] // width * width)
    table = binned.groupby(["trainer", "epoch"])[list(_CURVES)].agg(["mean", "min", "max"])
    texts = []
    with draw("-".join(["curves", *setting]), (9, 3.2)) as (figure, picture):
        panels = figure.subplots(1, len(_CURVES))
        for entry in shown:
            if entry.trainer not in table.index:
                continue
            mine = table.loc[entry.trainer]
            for axes, (column, label) in zip(panels, _CURVES.items()):
                values = mine[column]
                (line,) = axes.plot(values.index, values["mean"], label=_short(entry.full_title))
                axes.fill_between(
                    values.index, values["min"], values["max"], color=line.get_color(), alpha=0.15
                )
                axes.set(xlabel="epoch", ylabel=label)
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            dice = mine["pseudo_dice"]["mean"]
            texts.append(f"{entry.full_title} {dice.iloc[0]:.3f} to {dice.iloc[-1]:.3f}")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7
        )
    picture.alt = f"Losses and pseudo Dice over the epochs; pseudo Dice: {'; '.join(texts)}."
    return picture


def _short(text: str, length: int = 40) -> str:
    short = text if len(text) <= length else text[: length - 1] + "…"
    return short.replace("$", r"\$")  # otherwise Matplotlib reads it as mathematics
