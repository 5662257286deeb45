"""Figure of CPR's bounds and multipliers over the epochs of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import BoundaryNorm, Colormap
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from nnunet_cpr.figures import new_figure
from nnunet_cpr.nnunet.bounds_verdict import ACTIVE, HELD, Kind, judge_bounds, unchanged
from nnunet_cpr.nnunet.history import History

FIGURE_NAME = "cpr_progress.png"

_RATIOS = [0, 0.25, 0.5, 0.8, 1 - HELD, 1 + HELD, 1.2, 1.5, 2]
_DECADES = np.arange(round(math.log10(ACTIVE)), 1)  # of the multipliers, in powers of ten
_Scale = tuple[Colormap, BoundaryNorm, Sequence[float] | np.ndarray]  # the last are the ticks
# The same colours for every training.
_RATIO_SCALE = matplotlib.colormaps["RdBu_r"], BoundaryNorm(_RATIOS, 256, extend="max"), _RATIOS
_MULTIPLIER_SCALE = (
    matplotlib.colormaps["YlGnBu"].with_extremes(under="white"),
    BoundaryNorm(np.logspace(_DECADES[0], _DECADES[-1], 3 * len(_DECADES) - 2), 256, extend="both"),
    10.0**_DECADES,
)
_BAND_COLOURS = {Kind.HELD: "#d9f0d3", Kind.DIVERGED: "#fcbba1"}  # of others orange


def draw_progress(history: History) -> None:
    """Write ``cpr_progress.png``: the verdict, and heat maps of R over its bound and the multipliers.

    Before the bound is set, R is shown relative to the later bound, and without a later one relative to
    the first R.

    Args:
        history: the record of at least one epoch.

    Raises:
        OSError: the file cannot be written; a previous one is unchanged.
    """
    height = min(max(2.0, 0.16 * len(history.names)), 14.0)
    style = {"figure.constrained_layout.h_pad": 0.09}
    measure, kappa = _finite(history.stack("measure")), _finite(history.stack("kappa"))
    has_bound, left_out = np.isfinite(kappa), unchanged(history)
    reference = np.where(has_bound, kappa, _first(kappa)[:, None])
    reference = np.where(np.isfinite(reference), reference, _first(measure)[:, None])
    with np.errstate(over="ignore"):
        ratio = _finite(measure / np.where(reference == 0, np.nan, reference))
    multiplier = np.where(has_bound, _finite(history.stack("multiplier")), np.nan)
    with new_figure(history.folder / FIGURE_NAME, (12, 2 * height + 2), style) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True)
        verdict = judge_bounds(history)
        colour = _BAND_COLOURS.get(verdict.kind, "#fee8c8")
        box = {"facecolor": colour, "edgecolor": "0.6", "pad": 5}
        figure.suptitle(verdict.text, fontsize=11, fontweight="bold", bbox=box)

        image, bar = _draw_heat_map(top, history, left_out, ratio, _RATIO_SCALE)
        bar.ax.set_yticklabels([f"{r:g}" for r in _RATIOS])
        title = "R / bound kappa (white: held; blue: below; red: above)"
        if not has_bound.all():
            # After the colour bar, which would be pale too.
            image.set_alpha(np.where(has_bound, 1.0, 0.35))
            title = f"{title[:-1]}; pale: bound not set yet, relative to the later one or the first R)"
        top.set_title(title, fontsize=10)

        _, bar = _draw_heat_map(bottom, history, left_out, multiplier, _MULTIPLIER_SCALE)
        bar.ax.set_yticklabels([f"$10^{{{d}}}$" for d in _DECADES])
        bar.minorticks_off()
        bottom.set_title(
            f"Lagrange multiplier lambda (white: below {ACTIVE:g}; grey: no bound yet)", fontsize=10
        )
        bottom.set_xlabel("epoch")
        set_in = [int(row.argmax()) for row in has_bound[~left_out] if row.any()]
        for position in {min(set_in), max(set_in)} - {0} if set_in else ():
            for ax in (top, bottom):
                place = history.epochs[position] - 0.5
                ax.axvline(place, color="black", linewidth=1.2, linestyle=(0, (4, 2)))


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)


def _first(values: np.ndarray) -> np.ndarray:
    """Return the first value of each row that is not NaN, NaN if there is none."""
    known = ~np.isnan(values)
    return np.where(known.any(axis=1), values[np.arange(len(values)), known.argmax(axis=1)], np.nan)


def _draw_heat_map(
    ax: Axes, history: History, left_out: np.ndarray, values: np.ndarray, scale: _Scale
) -> tuple[AxesImage, Colorbar]:
    """Draw values ``[J, epochs]``, hatched for parameters that never changed, and their colour bar."""
    # A cell at a time, as in seaborn.heatmap, takes 15 s for 300 parameters and 1,000 epochs.
    names, left, right = history.names, history.epochs[0] - 0.5, history.epochs[-1] + 0.5
    ax.set_facecolor("0.85")  # grey, shows where a value is NaN
    visible = np.where(left_out[:, None], np.nan, values)
    extent = (left, right, len(names) - 0.5, -0.5)
    cmap, norm, ticks = scale
    image = ax.imshow(
        visible, aspect="auto", interpolation="nearest", cmap=cmap, norm=norm, extent=extent
    )
    look: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.6", "hatch": "////", "lw": 0}
    for row in np.flatnonzero(left_out):
        ax.add_patch(Rectangle((left, row - 0.5), right - left, 1, **look))
    shown = range(0, len(names), -(-len(names) // 60))  # more names are illegible
    labels = [
        names[i].removesuffix(".weight") + (" (never changes)" if left_out[i] else "") for i in shown
    ]
    ax.set_yticks(shown, labels, fontsize=7)
    ax.tick_params(labelbottom=True)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    extend = "max" if ticks[0] == 0 else "both"
    look = {"extend": extend, "extendfrac": 0.04, "aspect": max(20, len(shown))}
    return image, ax.figure.colorbar(image, ax=ax, pad=0.01, ticks=ticks, **look)
