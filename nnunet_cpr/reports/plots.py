"""Figures of the page, as SVG that takes its colours from the page's style sheet.

To add one: write a function here, a field of ``SettingPage`` in ``page.py``, and a block of
``page.html.j2``. Each function returns the SVG element and an alternative text with the
numbers that it shows.
"""

from __future__ import annotations

import hashlib
import html
import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nnunet_cpr._figures import new_figure
from nnunet_cpr.nnunet.progress_figure import around_one, three_decades
from nnunet_cpr.reports.comparisons import Comparison
from nnunet_cpr.reports.results import Results, Setting, full_title, in_order
from nnunet_cpr.studies.definition import Study

# Placeholder colours; in the SVG they are replaced by the variables of the page's style sheet.
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


def paired_scatter(comparison: Comparison, study: Study) -> Picture:
    """Return a scatter plot of the cases: the other trainer's Dice over the reference's."""
    pairs = comparison.pairs
    reference, other = full_title(study.entry(study.reference)), full_title(comparison.entry)
    with _new_svg((3.9, 3.7)) as (figure, svg):
        ax = figure.subplots()
        low = math.floor(min(pairs.min()))
        high = min(100, math.ceil(max(pairs.max())))
        margin = max(0.02 * (high - low), 0.1)
        limits = (low - margin, high + margin)
        ax.plot(limits, limits, color=_INK, linewidth=0.8)
        ax.scatter(pairs["reference"], pairs["other"], s=14, alpha=0.6, color=_LINES[0], linewidth=0)
        ax.set(xlim=limits, ylim=limits, aspect="equal")
        ax.set(xlabel=f"Dice of {_short(reference)} (%)", ylabel=f"Dice of {_short(other)} (%)")
        ax.set_title(f"above the line: {_short(other)} is better", fontsize=9)
    wins, losses = comparison.wins, comparison.losses
    alt = (
        f"Scatter plot of {len(pairs)} cases, Dice of {reference} from "
        f"{pairs['reference'].min():.1f} to {pairs['reference'].max():.1f} percent against {other} "
        f"from {pairs['other'].min():.1f} to {pairs['other'].max():.1f}: {wins} cases "
        f"above the diagonal, {len(pairs) - wins - losses} on it, {losses} below."
    )
    return _picture(svg, f"scatter-{comparison.anchor}", alt)


def difference_histogram(comparison: Comparison, study: Study) -> Picture:
    """Return a histogram of the differences other - reference, with their mean and its interval."""
    found = comparison.difference
    differences = (comparison.pairs["other"] - comparison.pairs["reference"]).to_numpy()
    names = f"{full_title(comparison.entry)} minus {full_title(study.entry(study.reference))}"
    with _new_svg((3.9, 3.7)) as (figure, svg):
        ax = figure.subplots()
        # The range must not be empty if all differences are equal.
        reach = max(float(np.abs(differences).max()), 0.01)
        ax.hist(differences, bins=list(np.linspace(-reach, reach, 32)), color=_LINES[1], alpha=0.75)
        ax.axvline(0, color=_INK, linewidth=0.8)
        ax.axvline(found.mean, color=_LINES[0], linewidth=1.8)
        interval = ""
        if not math.isnan(found.low):
            ax.axvspan(found.low, found.high, color=_LINES[0], alpha=0.35, linewidth=0)
            interval = f" with the 95 percent interval {found.low:+.2f} to {found.high:+.2f}"
        ax.set(xlabel="difference of Dice (points)", ylabel="cases")
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_title("line: mean, band: its 95 % interval", fontsize=9)
    alt = (
        f"Histogram of {len(differences)} differences of Dice, {names}: from "
        f"{differences.min():+.2f} to {differences.max():+.2f} points, median "
        f"{np.median(differences):+.2f}, mean {found.mean:+.2f}{interval}."
    )
    return _picture(svg, f"histogram-{comparison.anchor}", alt)


CURVES = {
    "train_loss": "training loss",
    "val_loss": "validation loss",
    "pseudo_dice": "pseudo Dice",
}
_MAX_POINTS = 250
"""Maximum number of points of a line."""


def curves(results: Results, setting: Setting, measure: str) -> Picture | None:
    """Return one of :data:`CURVES` over the epochs: thin lines are folds, thick lines their mean."""
    epochs = results.of(results.epochs, setting).dropna(subset=[measure])
    if epochs.empty:
        return None
    lines = strokes(results.study)
    means = []
    with _new_svg(_SIZE) as (figure, svg):
        ax = figure.subplots()
        for entry in results.study.trainers:
            mine = epochs[epochs["trainer"] == entry.trainer]
            if mine.empty:
                continue
            stroke = lines[entry.trainer]
            by_fold = mine.pivot(index="epoch", columns=["fold", "seed"], values=measure)
            # A point is the mean of several epochs; all points of many folds would be megabytes.
            width = -(-(int(by_fold.index[-1]) + 1) // _MAX_POINTS)
            thinned = by_fold.groupby((by_fold.index // width + 0.5) * width - 0.5).mean()
            ax.plot(thinned.index, thinned, color=stroke.colour, linewidth=0.5, alpha=0.5)
            # The mean ends with the shortest fold: beyond it would be a mean over other folds.
            mean = by_fold.dropna().mean(axis=1)
            if mean.empty:
                continue
            ax.plot(
                thinned.dropna().mean(axis=1),
                color=stroke.colour,
                linewidth=2,
                linestyle=_matplotlib_dashes(stroke.dashes),
                marker="o" if len(mean) == 1 else None,
            )
            means.append(f"{full_title(entry)} {mean.iloc[0]:.3f} to {mean.iloc[-1]:.3f}")
        ax.set(xlabel="epoch", ylabel=CURVES[measure])
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    alt = (
        f"Line chart of the {CURVES[measure]} over epochs {epochs['epoch'].min()} to "
        f"{epochs['epoch'].max()}. Mean over folds, first to last epoch: "
        f"{'; '.join(means) or 'none'}."
    )
    return _picture(svg, f"curve-{measure}-{'-'.join(setting)}", alt)


@dataclass(frozen=True)
class HeatMaps:
    """Heat maps of CPR in one fold."""

    fold: int
    multiplier: Picture
    ratio: Picture
    names: list[str]


def heat_maps(setting: Setting, trainer: str, fold: int, history: pd.DataFrame) -> HeatMaps:
    """Return heat maps (parameter matrices x epochs) of the multiplier and of measure / bound.

    Args:
        setting, trainer, fold: origin of the history.
        history: content of ``cpr_history.csv``.
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
        fold,
        _heat_map(
            multiplier,
            epochs,
            "viridis",
            three_decades(multiplier),
            f"multiplier-{key}",
            f"Heat map of CPR's multipliers, {what}: {multiplier_text}.",
        ),
        _heat_map(
            ratio,
            epochs,
            "RdBu_r",
            around_one(ratio),
            f"ratio-{key}",
            f"Heat map of measure / bound, {what}: {ratio_text}.",
        ),
        [name.removesuffix(".weight") for name in names],
    )


def _heat_map(
    values: np.ndarray, epochs: np.ndarray, colours: str, norm: Normalize, key: str, alt: str
) -> Picture:
    rows = len(values)
    size = (_SIZE[0] + 0.8, min(max(2.4, 0.07 * rows + 1), 6))
    with _new_svg(size, dpi=200) as (figure, svg):
        ax = figure.subplots()
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
    return _picture(svg, key, alt)


@contextmanager
def _new_svg(size: tuple[float, float], dpi: int = 100) -> Iterator[tuple[Figure, io.BytesIO]]:
    """Yield a figure and the file to which it is written as SVG at the end."""
    svg = io.BytesIO()
    metadata = dict.fromkeys(["Creator", "Date", "Format", "Type"])
    with new_figure(
        svg, size, _STYLE, format="svg", transparent=True, dpi=dpi, metadata=metadata
    ) as figure:
        yield figure, svg


def _picture(svg: io.BytesIO, key: str, alt: str) -> Picture:
    """Return an SVG file as an element of the page; the same figure gives the same bytes."""
    text = svg.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    for colour in [_INK, *_LINES]:
        text = text.replace(colour, _variable(colour))
    # Ids are unique within one figure only, and most of them are not used.
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    prefix = "p" + hashlib.sha256(key.encode()).hexdigest()[:8]
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
    # A hundredth of a point is precise enough for every screen.
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), text)
    # HTML implies the name spaces; without them the page contains no address.
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)
    text = text.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1)
    return Picture(text, alt)


def _variable(colour: str) -> str:
    return "currentColor" if colour == _INK else f"var(--line-{_LINES.index(colour)})"


def _matplotlib_dashes(dashes: str) -> str | tuple[float, tuple[float, ...]]:
    # Matplotlib multiplies dashes by the line's width, 2; SVG has them in pixels.
    return "-" if dashes == "none" else (0, tuple(float(d) / 2 for d in dashes.split()))


def _short(text: str) -> str:
    short = text if len(text) <= 32 else text[:31] + "…"
    return short.replace("$", r"\$")  # otherwise Matplotlib reads it as mathematics
