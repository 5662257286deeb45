"""Pictures for the page, as SVG that takes its colours from the page's style sheet.

Every function gives the SVG element and a text that says in numbers what it shows.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nnunet_cpr.nnunet.progress_figure import around_one, three_decades
from nnunet_cpr.reports.comparisons import Comparison
from nnunet_cpr.reports.results import Results, Setting, full_title, in_order
from nnunet_cpr.studies.definition import Study

# Colours that no data have; the SVG's text is searched for them and the page's variables put in place.
_INK = "#010203"
_LINES = [f"#0a0b{n:02x}" for n in range(6)]
_DASHES = ["none", "7 2", "2 2", "7 2 2 2", "12 3"]
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nnunet-cpr",
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_SIZE = (4.2, 3.2)  # inches: readable on a phone, where the page gives it about 330 pixels


@dataclass(frozen=True)
class Picture:
    """An inline SVG element and its alternative text."""

    svg: str
    alt: str


@dataclass(frozen=True)
class Stroke:
    """How a trainer's line looks, as SVG has it."""

    colour: str
    dashes: str

    @property
    def variable(self) -> str:
        """The colour as the page's style sheet knows it."""
        return _variable(self.colour)


def strokes(study: Study) -> dict[str, Stroke]:
    """A line for each trainer; the reference's is solid and has the text's colour."""
    others = [row.trainer for row in study.rows if row.trainer != study.reference]
    given = {
        trainer: Stroke(_LINES[i % len(_LINES)], _DASHES[(i + i // len(_LINES)) % len(_DASHES)])
        for i, trainer in enumerate(others)
    }
    return {study.reference: Stroke(_INK, "none"), **given}


def paired_scatter(comparison: Comparison, study: Study) -> Picture:
    """Each dot a case: the reference's Dice against the other's."""
    pairs = comparison.pairs
    reference, other = full_title(study.row(study.reference)), full_title(comparison.row)
    with matplotlib.rc_context(_STYLE):
        figure, ax = _figure((3.9, 3.7))
        low = math.floor(min(pairs.min()))
        high = min(100, math.ceil(max(pairs.max())))
        margin = max(0.02 * (high - low), 0.1)
        limits = (low - margin, high + margin)
        ax.plot(limits, limits, color=_INK, linewidth=0.8)
        ax.scatter(pairs["reference"], pairs["other"], s=14, alpha=0.6, color=_LINES[0], linewidth=0)
        ax.set(xlim=limits, ylim=limits, aspect="equal")
        ax.set(xlabel=f"Dice of {_short(reference)} (%)", ylabel=f"Dice of {_short(other)} (%)")
        ax.set_title(f"above the line: {_short(other)} is better", fontsize=9)
        paired = comparison.paired
        alt = (
            f"Scatter plot of {paired.cases} cases, Dice of {reference} from "
            f"{pairs['reference'].min():.1f} to {pairs['reference'].max():.1f} percent against {other} "
            f"from {pairs['other'].min():.1f} to {pairs['other'].max():.1f}: {paired.wins} cases "
            f"above the diagonal, {paired.ties} on it, {paired.losses} below."
        )
        return Picture(_svg(figure, f"scatter-{comparison.anchor}", alt), alt)


def difference_histogram(comparison: Comparison, study: Study) -> Picture:
    """The differences other - reference, their mean and its interval."""
    paired = comparison.paired
    differences = (comparison.pairs["other"] - comparison.pairs["reference"]).to_numpy()
    names = f"{full_title(comparison.row)} minus {full_title(study.row(study.reference))}"
    with matplotlib.rc_context(_STYLE):
        figure, ax = _figure((3.9, 3.7))
        # Equal differences, up to rounding, have no width that could be divided into bins.
        reach = max(float(np.abs(differences).max()), 0.01)
        ax.hist(differences, bins=list(np.linspace(-reach, reach, 32)), color=_LINES[1], alpha=0.75)
        ax.axvline(0, color=_INK, linewidth=0.8)
        ax.axvline(paired.difference, color=_LINES[0], linewidth=1.8)
        interval = ""
        if paired.enough:
            ax.axvspan(paired.low, paired.high, color=_LINES[0], alpha=0.35, linewidth=0)
            interval = f" with the 95 percent interval {paired.low:+.2f} to {paired.high:+.2f}"
        ax.set(xlabel="difference of Dice (points)", ylabel="cases")
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_title("line: mean, band: its 95 % interval", fontsize=9)
        alt = (
            f"Histogram of {paired.cases} differences of Dice, {names}: from "
            f"{differences.min():+.2f} to {differences.max():+.2f} points, median "
            f"{np.median(differences):+.2f}, mean {paired.difference:+.2f}{interval}."
        )
        return Picture(_svg(figure, f"histogram-{comparison.anchor}", alt), alt)


CURVES = {
    "train_loss": "training loss",
    "val_loss": "validation loss",
    "pseudo_dice": "pseudo Dice",
}
_POINTS = 250  # of a line, at the most


def curves(results: Results, setting: Setting, measure: str) -> Picture | None:
    """One of :data:`CURVES` over the epochs: thin lines are folds, thick lines their mean."""
    epochs = results.of(results.epochs, setting).dropna(subset=[measure])
    if epochs.empty:
        return None
    lines = strokes(results.study)
    says = []
    with matplotlib.rc_context(_STYLE):
        figure, ax = _figure(_SIZE)
        for row in results.study.rows:
            mine = epochs[epochs["trainer"] == row.trainer]
            if mine.empty:
                continue
            look = lines[row.trainer]
            by_fold = mine.pivot(index="epoch", columns="fold", values=measure)
            # Many folds of a thousand epochs would be megabytes: a point is the mean of some epochs.
            width = -(-(int(by_fold.index[-1]) + 1) // _POINTS)
            thinned = by_fold.groupby((by_fold.index // width + 0.5) * width - 0.5).mean()
            ax.plot(thinned.index, thinned, color=look.colour, linewidth=0.5, alpha=0.5)
            # The mean ends where the first fold ends: beyond, it would be one of other folds.
            mean = by_fold.dropna().mean(axis=1)
            if mean.empty:
                continue
            ax.plot(
                thinned.dropna().mean(axis=1),
                color=look.colour,
                linewidth=2,
                linestyle=_matplotlib_dashes(look.dashes),
                marker="o" if len(mean) == 1 else None,
            )
            says.append(f"{full_title(row)} {mean.iloc[0]:.3f} to {mean.iloc[-1]:.3f}")
        ax.set(xlabel="epoch", ylabel=CURVES[measure])
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        alt = (
            f"Line chart of the {CURVES[measure]} over epochs {epochs['epoch'].min()} to "
            f"{epochs['epoch'].max()}. Mean over folds, first to last epoch: "
            f"{'; '.join(says) or 'none'}."
        )
        return Picture(_svg(figure, f"curve-{measure}-{'-'.join(setting)}", alt), alt)


@dataclass(frozen=True)
class HeatMaps:
    """What CPR did in one fold."""

    fold: int
    multiplier: Picture
    ratio: Picture
    names: list[str]


def heat_maps(setting: Setting, trainer: str, fold: int, history: pd.DataFrame) -> HeatMaps:
    """Matrices by epochs: the multiplier, and the measure in relation to its bound.

    Args:
        setting, trainer, fold: where the history is from.
        history: ``cpr_history.csv``.
    """
    names = in_order(history["parameter"])
    table = history.drop_duplicates(["epoch", "parameter"], keep="last")

    def matrix(column: str) -> pd.DataFrame:
        return table.pivot(index="parameter", columns="epoch", values=column).reindex(names)

    kappa = matrix("kappa").to_numpy(float)
    bounded = np.isfinite(kappa)
    epochs = matrix("kappa").columns.to_numpy()
    ratio = np.where(bounded, matrix("measure").to_numpy(float), np.nan) / np.where(bounded, kappa, 1)
    multiplier = np.where(bounded, matrix("multiplier").to_numpy(float), np.nan)
    what = f"{len(names)} matrices over epochs {epochs[0]} to {epochs[-1]}, fold {fold} of {trainer}"
    key = f"{'-'.join(setting)}-{trainer}"
    if bounded.any():
        multiplier_says = (
            f"the largest is {np.nanmax(multiplier):.3g}, "
            f"{np.mean(multiplier[bounded] > 0):.0%} of them are above 0"
        )
        finite = ratio[np.isfinite(ratio)]
        ratio_says = (
            f"median {np.median(finite):.4f}, from {finite.min():.4f} to {finite.max():.4f}, "
            f"{np.mean(finite > 1):.0%} above their bound"
            if finite.size
            else "no finite value"
        )
    else:
        multiplier_says = ratio_says = "no matrix has a bound yet"
    with matplotlib.rc_context(_STYLE):
        return HeatMaps(
            fold,
            _heat_map(
                multiplier,
                epochs,
                "viridis",
                three_decades(multiplier),
                f"multiplier-{key}",
                f"Heat map of CPR's multipliers, {what}: {multiplier_says}.",
            ),
            _heat_map(
                ratio,
                epochs,
                "RdBu_r",
                around_one(ratio),
                f"ratio-{key}",
                f"Heat map of measure / bound, {what}: {ratio_says}.",
            ),
            [name.removesuffix(".weight") for name in names],
        )


def _heat_map(
    values: np.ndarray, epochs: np.ndarray, colours: str, norm: Normalize, key: str, alt: str
) -> Picture:
    rows = len(values)
    figure, ax = _figure((_SIZE[0] + 0.8, min(max(2.4, 0.07 * rows + 1), 6)))
    image = ax.imshow(
        np.ma.masked_invalid(values),
        aspect="auto",
        interpolation="nearest",
        cmap=matplotlib.colormaps[colours].with_extremes(bad="0.6"),
        norm=norm,
        extent=(epochs[0] - 0.5, epochs[-1] + 0.5, rows + 0.5, 0.5),
    )
    figure.colorbar(image, ax=ax, pad=0.02)
    ax.set(xlabel="epoch", ylabel="matrix")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return Picture(_svg(figure, key, alt, rasterize_dpi=200), alt)


def _figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.subplots()


def _svg(figure: Figure, key: str, alt: str, rasterize_dpi: int = 100) -> str:
    """The figure as an element to put into a page, the same bytes every time."""
    buffer = io.StringIO()
    metadata = dict.fromkeys(["Creator", "Date", "Format", "Type"])
    figure.savefig(buffer, format="svg", transparent=True, dpi=rasterize_dpi, metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    for colour in [_INK, *_LINES]:
        text = text.replace(colour, _variable(colour))
    # Names are unique within a figure only, and a page has several; most are not used at all.
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    prefix = "p" + hashlib.sha256(key.encode()).hexdigest()[:8]
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
    # A hundredth of a point is finer than any screen.
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), text)
    # In HTML these are implied; the page shall not name any address.
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)
    return re.sub(r"<svg\b", f'<svg role="img" aria-label="{_attribute(alt)}"', text, count=1)


def _variable(colour: str) -> str:
    return "currentColor" if colour == _INK else f"var(--line-{_LINES.index(colour)})"


def _matplotlib_dashes(dashes: str) -> str | tuple[float, tuple[float, ...]]:
    # Matplotlib multiplies dashes by the line's width, 2; SVG has them in pixels.
    return "-" if dashes == "none" else (0, tuple(float(d) / 2 for d in dashes.split()))


def _short(text: str) -> str:
    short = text if len(text) <= 32 else text[:31] + "…"
    return short.replace("$", r"\$")  # else Matplotlib would take it for mathematics


def _attribute(text: str) -> str:
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), ('"', "&quot;")):
        text = text.replace(character, entity)
    return text
