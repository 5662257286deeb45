"""Figures of the page, as SVG that takes its colours from the page's style sheet, and as files.

To add one: write a function here, a field of ``SettingPage`` in ``page.py``, and a block of
``page.html.j2``. Each function returns the SVG element, an alternative text with the numbers that it
shows, and the files.
"""

from __future__ import annotations

import hashlib
import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import BoundaryNorm, Colormap
from matplotlib.ticker import MaxNLocator

from nnunet_cpr.nnunet.progress_figure import multiplier_scale, ratio_scale
from nnunet_cpr.reports.comparisons import Comparison
from nnunet_cpr.reports.figures import Drawing, draw
from nnunet_cpr.reports.metrics import METRICS, Metric
from nnunet_cpr.reports.results import Results, Setting, in_order, run_means
from nnunet_cpr.studies.definition import Run, Study, TrainerEntry

# The light colours of the page's style sheet; on the page they are replaced by its variables.
_INK = "#1a1c20"
_LINES = ["#b34700", "#00609f", "#00775c", "#a13a7d", "#846500", "#5a48b8"]
_DASHES = ["none", "7 2", "2 2", "7 2 2 2", "12 3"]
_STYLE: dict[Any, Any] = {
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
MAX_DRAWN = 8
"""Maximum number of trainers beside the reference in figures."""
MAX_THIN_LINES = 60
"""Maximum number of trainings whose curves are drawn one by one."""
_SIZE = (4.2, 3.2)  # inches: readable on a phone, where the page gives it about 330 pixels


@dataclass(frozen=True)
class Picture:
    """An inline SVG element, its alternative text, and the figure's files."""

    svg: str
    alt: str
    drawing: Drawing


@dataclass(frozen=True)
class Stroke:
    """Colour and dashes of a trainer's line in SVG."""

    colour: str
    dashes: str

    @property
    def variable(self) -> str:
        """Colour as a variable of the page's style sheet."""
        return _variable(self.colour)


def strokes(study: Study) -> dict[str, Stroke]:
    """Return the line of each trainer; the reference's is solid and has the colour of the text."""
    others = [entry.trainer for entry in study.trainers if entry.trainer != study.reference]
    given = {
        trainer: Stroke(_LINES[i % len(_LINES)], _DASHES[(i + i // len(_LINES)) % len(_DASHES)])
        for i, trainer in enumerate(others)
    }
    return {study.reference: Stroke(_INK, "none"), **given}


def drawn_trainers(results: Results) -> list[TrainerEntry]:
    """Return the trainers in figures: the reference and up to :data:`MAX_DRAWN` with the best mean."""
    study = results.study
    others = [entry for entry in study.trainers if entry.trainer != study.reference]
    if len(others) > MAX_DRAWN:
        metric = METRICS[study.metrics[0]]
        sign = 1 if metric.higher_is_better else -1
        means = sign * run_means(results.cases, metric.name).groupby("trainer")[metric.name].mean()
        means = means.dropna()
        others.sort(key=lambda entry: -means.get(entry.trainer, -math.inf))
        others = others[:MAX_DRAWN]
    names = {study.reference, *(entry.trainer for entry in others)}
    return [entry for entry in study.trainers if entry.trainer in names]


def paired_scatter(comparison: Comparison) -> Picture:
    """Return a scatter plot of the cases: the other trainer's values over the reference's."""
    pairs, metric = comparison.pairs, comparison.metric
    reference, other = comparison.reference.full_title, comparison.entry.full_title
    with draw(_name("scatter", comparison), (3.9, 3.7), _STYLE) as (figure, drawing):
        ax = figure.subplots()
        low = math.floor(min(pairs.min()))
        high = math.ceil(max(pairs.max()))
        if metric.unit == "%":
            high = min(100, high)
        margin = max(0.02 * (high - low), 0.1)
        limits = (low - margin, high + margin)
        ax.plot(limits, limits, color=_INK, linewidth=0.8)
        ax.scatter(pairs["reference"], pairs["other"], s=14, alpha=0.6, color=_LINES[0], linewidth=0)
        ax.set(xlim=limits, ylim=limits, aspect="equal")
        ax.set_xlabel(f"{metric.title} of {_short(reference)} ({metric.unit})")
        ax.set_ylabel(f"{metric.title} of {_short(other)} ({metric.unit})")
        side = "above" if metric.higher_is_better else "below"
        ax.set_title(f"{side} the line: better with {_short(other)}", fontsize=9)
    better, worse = comparison.wins, comparison.losses
    alt = (
        f"Scatter plot of {len(pairs)} cases, {metric.title} of {reference} from "
        f"{pairs['reference'].min():.1f} to {pairs['reference'].max():.1f} {metric.unit} against "
        f"{other} from {pairs['other'].min():.1f} to {pairs['other'].max():.1f}: {other} is better "
        f"in {better} cases, equal in {len(pairs) - better - worse}, worse in {worse}."
    )
    return _picture(drawing, alt)


def difference_histogram(comparison: Comparison) -> Picture:
    """Return a histogram of the differences other - reference, with their mean and its interval."""
    found, metric = comparison.difference, comparison.metric
    differences = (comparison.pairs["other"] - comparison.pairs["reference"]).to_numpy()
    names = f"{comparison.entry.full_title} minus {comparison.reference.full_title}"
    with draw(_name("histogram", comparison), (3.9, 3.7), _STYLE) as (figure, drawing):
        ax = figure.subplots()
        # The range must not be empty if all differences are equal.
        reach = max(float(np.abs(differences).max()), 0.01)
        ax.hist(differences, bins=list(np.linspace(-reach, reach, 32)), color=_LINES[1], alpha=0.75)
        ax.axvline(0, color=_INK, linewidth=0.8)
        ax.axvline(found.mean, color=_LINES[0], linewidth=1.8)
        interval = ""
        title = "line: mean"
        if not math.isnan(found.low):
            ax.axvspan(found.low, found.high, color=_LINES[0], alpha=0.35, linewidth=0)
            interval = f" with the 95 percent interval {found.low:+.2f} to {found.high:+.2f}"
            title += ", band: its 95 % interval"
        ax.set(xlabel=f"difference of {metric.title} ({metric.difference_unit})", ylabel="cases")
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_title(title, fontsize=9)
    alt = (
        f"Histogram of {len(differences)} differences of {metric.title}, {names}: from "
        f"{differences.min():+.2f} to {differences.max():+.2f} {metric.difference_unit}, median "
        f"{np.median(differences):+.2f}, mean {found.mean:+.2f}{interval}."
    )
    return _picture(drawing, alt)


@dataclass(frozen=True)
class ForestRow:
    """One difference of a forest plot, in the shown unit of the metric.

    Attributes:
        trainer: title of the trainer.
        name: class, or "mean".
        difference: mean difference to the reference.
        low, high: its interval; NaN if it is not known.
    """

    trainer: str
    name: str
    difference: float
    low: float
    high: float


FOREST_TRAINERS = 4
"""Maximum number of trainers in one forest plot."""
_MARKERS = "osD^"


def forest_plots(
    rows: Sequence[ForestRow], metric: Metric, margin: float, reference: str, setting: Setting
) -> list[Picture]:
    """Return forest plots of the differences of each class, :data:`FOREST_TRAINERS` trainers in each.

    All have the same axis, so that they can be compared.

    Args:
        rows: the differences, those of a trainer in the order from top to bottom.
        metric: the metric.
        margin: half the width of the region of equivalence.
        reference: title of the reference.
        setting: origin of the differences.
    """
    trainers = in_order([row.trainer for row in rows])
    values = np.array([[row.difference, row.low, row.high] for row in rows], float)
    finite = np.abs(values[np.isfinite(values)])
    reach = 1.08 * max([1.5 * margin, *finite])
    pictures = []
    for number, start in enumerate(range(0, len(trainers), FOREST_TRAINERS), start=1):
        part = trainers[start : start + FOREST_TRAINERS]
        name = f"forest-{'-'.join(setting)}-{metric.name}" + (f"-{number}" if number > 1 else "")
        shown = [row for row in rows if row.trainer in part]
        pictures.append(_forest_plot(shown, part, metric, margin, reference, reach, name))
    return pictures


def _forest_plot(
    rows: Sequence[ForestRow],
    trainers: Sequence[str],
    metric: Metric,
    margin: float,
    reference: str,
    reach: float,
    name: str,
) -> Picture:
    names = in_order([row.name for row in rows])
    step = 0.8 / max(len(trainers), 2)
    height = 1.2 + 0.2 * len(trainers) + len(names) * (0.16 + 0.1 * len(trainers))
    with draw(name, (_SIZE[0], height), _STYLE) as (figure, drawing):
        ax = figure.subplots()
        ax.axvspan(-margin, margin, color=_INK, alpha=0.12, linewidth=0)
        ax.axvline(0, color=_INK, linewidth=0.8)
        for position, trainer in enumerate(trainers):
            mine = {row.name: row for row in rows if row.trainer == trainer}
            offset = (position - (len(trainers) - 1) / 2) * step
            y = np.array([names.index(key) for key in mine]) + offset
            x = np.array([row.difference for row in mine.values()])
            ends = np.array([[row.low, row.high] for row in mine.values()])
            colour = _LINES[position]
            ax.hlines(y, ends[:, 0], ends[:, 1], color=colour, linewidth=1.4)
            ax.plot(x, y, _MARKERS[position], color=colour, markersize=4.5, label=_short(trainer, 52))
        for line in range(1, len(names)):
            ax.axhline(line - 0.5, color=_INK, linewidth=0.3, alpha=0.4)
        ax.set_yticks(range(len(names)), [_short(key, 22) for key in names])
        ax.set(xlim=(-reach, reach), ylim=(len(names) - 0.5, -0.5))
        ax.tick_params(axis="y", length=0)
        side = "right" if metric.higher_is_better else "left"
        ax.set_xlabel(
            f"difference of {metric.title} ({metric.difference_unit})\n{side} of 0: better than "
            f"{_short(reference)}"
        )
        figure.legend(loc="outside upper left", frameon=False, fontsize=8, handletextpad=0.2)
    texts = []
    for row in rows:
        interval = ""
        if not math.isnan(row.low):
            interval = f" ({metric.difference_text(row.low)} to {metric.difference_text(row.high)})"
        texts.append(f"{row.trainer}, {row.name} {metric.difference_text(row.difference)}{interval}")
    alt = (
        f"Forest plot of the differences of {metric.title} to {reference} with 95 percent intervals, "
        f"in {metric.difference_unit}; region of equivalence -{margin:g} to +{margin:g}: "
        f"{'; '.join(texts)}."
    )
    return _picture(drawing, alt)


CURVES = {
    "train_loss": "training loss",
    "val_loss": "validation loss",
    "pseudo_dice": "pseudo Dice",
}
_MAX_POINTS = 250
"""Maximum number of points of a line."""


def curves(results: Results, setting: Setting, column: str) -> Picture | None:
    """Return one of :data:`CURVES` over the epochs: thin lines are trainings, thick lines their mean."""
    drawn = drawn_trainers(results)
    epochs = results.of(results.epochs, setting).dropna(subset=[column])
    epochs = epochs[epochs["trainer"].isin([entry.trainer for entry in drawn])]
    if epochs.empty:
        return None
    lines = strokes(results.study)
    trainings = len(epochs[["trainer", "fold", "seed"]].drop_duplicates())
    means = []
    with draw(f"curve-{column}-{'-'.join(setting)}", _SIZE, _STYLE) as (figure, drawing):
        ax = figure.subplots()
        for entry in drawn:
            mine = epochs[epochs["trainer"] == entry.trainer]
            if mine.empty:
                continue
            stroke = lines[entry.trainer]
            by_fold = mine.pivot(index="epoch", columns=["fold", "seed"], values=column)
            width = -(-(int(by_fold.index[-1]) + 1) // _MAX_POINTS)
            if trainings <= MAX_THIN_LINES:
                thinned = _thinned(by_fold, width)
                ax.plot(thinned.index, thinned, color=stroke.colour, linewidth=0.5, alpha=0.5)
            # The mean ends with the shortest training: beyond it would be a mean over others.
            common = by_fold.dropna()
            if common.empty:
                continue
            line = _thinned(common, width).mean(axis=1)
            ax.plot(
                line,
                color=stroke.colour,
                linewidth=2,
                linestyle=_matplotlib_dashes(stroke.dashes),
                marker="o" if len(line) == 1 else None,
                label=_short(entry.full_title),
            )
            mean = common.mean(axis=1)
            means.append(f"{entry.full_title} {mean.iloc[0]:.3f} to {mean.iloc[-1]:.3f}")
        ax.set(xlabel="epoch", ylabel=CURVES[column])
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))

        def add_legend() -> None:  # on the page it is HTML
            figure.set_size_inches(_SIZE[0], _SIZE[1] + 0.2 * (len(means) + 1))
            figure.legend(loc="outside lower left", frameon=False, fontsize=8, handlelength=4)

        drawing.finish = add_legend
    alt = (
        f"Line chart of the {CURVES[column]} over epochs {epochs['epoch'].min()} to "
        f"{epochs['epoch'].max()}. Mean over trainings, first to last epoch: "
        f"{'; '.join(means) or 'none'}."
    )
    return _picture(drawing, alt)


def _thinned(by_epoch: pd.DataFrame, width: int) -> pd.DataFrame:
    """Return the means of ``width`` epochs each: all points of many trainings would be megabytes."""
    return by_epoch.groupby((by_epoch.index // width + 0.5) * width - 0.5).mean()


@dataclass(frozen=True)
class HeatMaps:
    """Heat maps of CPR in one run."""

    origin: str
    multiplier: Picture
    ratio: Picture
    names: list[str]


def heat_maps(setting: Setting, run: Run, history: pd.DataFrame) -> HeatMaps:
    """Return heat maps (parameter matrices x epochs) of the multiplier and of measure / bound.

    Args:
        setting, run: origin of the history.
        history: content of ``cpr_history.csv``.
    """
    names = in_order(history["parameter"])
    table = history.drop_duplicates(["epoch", "parameter"], keep="last")

    def matrix(column: str) -> pd.DataFrame:
        return table.pivot(index="parameter", columns="epoch", values=column).reindex(names)

    kappa = matrix("kappa").to_numpy(float)
    bounded = np.isfinite(kappa)
    epochs = matrix("kappa").columns.to_numpy()
    measure = matrix("measure").to_numpy(float)
    ratio = measure / np.where(bounded & (kappa > 0), kappa, np.nan)
    multiplier = np.where(bounded, matrix("multiplier").to_numpy(float), np.nan)
    of_run = f"epochs {epochs[0]} to {epochs[-1]}, {run.fold_and_seed} of {run.entry}"
    what = f"{len(names)} matrices over {of_run}"
    key = f"{'-'.join(setting)}-{run.entry}"
    if bounded.any():
        multiplier_text = (
            f"the largest is {np.nanmax(multiplier):.3g}, "
            f"{np.mean(multiplier[bounded] > 0):.0%} of them are above 0"
        )
        finite = ratio[np.isfinite(ratio)]
        ratio_text = (
            f"median {np.median(finite):.4f}, from {finite.min():.4f} to {finite.max():.4f}, "
            f"{np.mean(finite > 1):.0%} above their bound"
            if finite.size
            else "no finite value"
        )
    else:
        multiplier_text = ratio_text = "no matrix has a bound yet"
    return HeatMaps(
        run.fold_and_seed,
        _heat_map(
            multiplier,
            epochs,
            *multiplier_scale(),
            f"multiplier-{key}",
            f"Heat map of CPR's multipliers, {what}: {multiplier_text}.",
        ),
        _heat_map(
            ratio,
            epochs,
            *ratio_scale(),
            f"ratio-{key}",
            f"Heat map of measure / bound, {what}: {ratio_text}.",
        ),
        [name.removesuffix(".weight") for name in names],
    )


def _heat_map(
    values: np.ndarray, epochs: np.ndarray, colours: Colormap, norm: BoundaryNorm, key: str, alt: str
) -> Picture:
    rows = len(values)
    size = (_SIZE[0] + 0.8, min(max(2.4, 0.07 * rows + 1), 6))
    with draw(key, size, _STYLE, dpi=200) as (figure, drawing):
        ax = figure.subplots()
        image = ax.imshow(
            np.ma.masked_invalid(values),
            aspect="auto",
            interpolation="nearest",
            cmap=colours.with_extremes(bad="0.6"),
            norm=norm,
            extent=(epochs[0] - 0.5, epochs[-1] + 0.5, rows + 0.5, 0.5),
        )
        ticks = norm.boundaries[:: -(-len(norm.boundaries) // 9)]  # of multipliers the decades
        figure.colorbar(image, ax=ax, pad=0.02, extend="both", ticks=ticks, format="%g")
        ax.set(xlabel="epoch", ylabel="matrix")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return _picture(drawing, alt)


def _name(kind: str, comparison: Comparison) -> str:
    return f"{kind}-{comparison.anchor}"


def _picture(drawing: Drawing, alt: str) -> Picture:
    """Return a drawing as an element of the page; the same figure gives the same bytes."""
    text = drawing.inline
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    for colour in [_INK, *_LINES]:
        text = text.replace(colour, _variable(colour))
    # Ids are unique within one figure only, and most of them are not used.
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    prefix = "p" + hashlib.sha256(drawing.name.encode()).hexdigest()[:8]
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
    # A hundredth of a point is precise enough for every screen.
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), text)
    # HTML implies the name spaces; without them the page contains no address.
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)
    text = text.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1)
    return Picture(text, alt, drawing)


def _variable(colour: str) -> str:
    return "currentColor" if colour == _INK else f"var(--line-{_LINES.index(colour)})"


def _matplotlib_dashes(dashes: str) -> str | tuple[float, tuple[float, ...]]:
    # Matplotlib multiplies dashes by the line's width, 2; SVG has them in pixels.
    return "-" if dashes == "none" else (0, tuple(float(d) / 2 for d in dashes.split()))


def _short(text: str, length: int = 32) -> str:
    short = text if len(text) <= length else text[: length - 1] + "…"
    return short.replace("$", r"\$")  # otherwise Matplotlib reads it as mathematics
