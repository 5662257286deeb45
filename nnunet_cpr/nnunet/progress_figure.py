"""Figure of CPR's bounds and multipliers over the epochs of a training."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from nnunet_cpr._figures import new_figure
from nnunet_cpr.nnunet.history import History
from nnunet_cpr.nnunet.verdict import HELD, Kind, judge, unchanged

FIGURE_NAME = "cpr_progress.png"

_NO_BOUND = "0.85"  # grey
_PALE = 0.35  # opacity where there is no bound yet
_MAX_LABELS = 60  # more names are illegible
_RATIOS = [0, 0.25, 0.5, 0.8, 1 - HELD, 1 + HELD, 1.2, 1.5, 2]
_RATIO_COLOURS = [
    "#2166ac", "#5a9bc9", "#9dcae1", "#d5e7f1", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#a50f15",
]  # fmt: skip
_DECADES = np.arange(-6, 1)  # of the multipliers, in powers of ten
_BAND_COLOURS = {Kind.HELD: "#d9f0d3", Kind.DIVERGED: "#fcbba1"}
_OTHER_BAND_COLOUR = "#fee8c8"


def ratio_scale() -> tuple[Colormap, BoundaryNorm]:
    """Return the colours of R / kappa, the same for every training.

    They are neutral within 5 % of the bound, blue below, and the darkest red from twice the bound on.
    """
    lowest, *_, highest = _RATIO_COLOURS
    within = ListedColormap(_RATIO_COLOURS[:-1]).with_extremes(under=lowest, over=highest)
    return within, BoundaryNorm(_RATIOS, within.N)


def multiplier_scale() -> tuple[Colormap, BoundaryNorm]:
    """Return the colours of Lagrange multipliers, the same for every training.

    They are logarithmic from 1e-6 to 1 with three colours a decade; smaller multipliers are white.
    """
    count = 3 * (len(_DECADES) - 1)
    samples = matplotlib.colormaps["YlGnBu"](np.linspace(0.12, 1, count + 1))
    colours = ListedColormap(samples[:-1]).with_extremes(under="white", over=samples[-1])
    return colours, BoundaryNorm(np.logspace(_DECADES[0], _DECADES[-1], count + 1), count)


def draw_progress(history: History) -> None:
    """Write ``cpr_progress.png``: the verdict, heat maps of R and the multipliers, and their course.

    Args:
        history: the record of at least one epoch.

    Raises:
        OSError: the file cannot be written; a previous one is unchanged.
    """
    height = min(max(2.0, 0.16 * len(history.names)), 14.0)
    style = {"figure.constrained_layout.h_pad": 0.09}
    with new_figure(history.folder / FIGURE_NAME, (12, 2 * height + 5), style) as figure:
        axes = figure.subplots(3, 1, sharex=True, height_ratios=[height, height, 2.6])
        verdict = judge(history)
        colour = _BAND_COLOURS.get(verdict.kind, _OTHER_BAND_COLOUR)
        box = {"facecolor": colour, "edgecolor": "0.6", "pad": 5}
        figure.suptitle(verdict.text, fontsize=11, fontweight="bold", bbox=box)
        shown = _Shown(history)
        _draw_ratio(axes[0], shown)
        _draw_multiplier(axes[1], shown)
        _draw_course(axes[2], shown)
        for ax in axes:
            for epoch in shown.bounds_set:
                ax.axvline(epoch - 0.5, color="black", linewidth=1.2, linestyle=(0, (4, 2)))


class _Shown:
    """Values of a history as they are shown.

    Attributes:
        history: the record.
        left_out: parameters that never changed, bool ``[J]``.
        has_bound: bool ``[J, epochs]``.
        ratio: R relative to the bound, ``[J, epochs]``; before the bound is set relative to the later
            bound, and without a later one relative to the first R. NaN if not finite.
        multiplier: multipliers, NaN without a bound.
        bounds_set: epochs in which the first and the last bound are set, without the first epoch.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.left_out = unchanged(history)
        measure, kappa = _finite(history.stack("measure")), _finite(history.stack("kappa"))
        self.has_bound = np.isfinite(kappa)
        reference = np.where(self.has_bound, kappa, _first(kappa)[:, None])
        reference = np.where(np.isfinite(reference), reference, _first(measure)[:, None])
        with np.errstate(over="ignore"):
            self.ratio = _finite(measure / np.where(reference == 0, np.nan, reference))
        self.multiplier = np.where(self.has_bound, _finite(history.stack("multiplier")), np.nan)
        set_in = [int(row.argmax()) for row in self.has_bound[~self.left_out] if row.any()]
        ends = {min(set_in), max(set_in)} - {0} if set_in else ()
        self.bounds_set = sorted(history.epochs[k] for k in ends)


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)


def _first(values: np.ndarray) -> np.ndarray:
    """Return the first value of each row that is not NaN, NaN if there is none."""
    known = ~np.isnan(values)
    return np.where(known.any(axis=1), values[np.arange(len(values)), known.argmax(axis=1)], np.nan)


def _draw_ratio(ax: Axes, shown: _Shown) -> None:
    image = _draw_heat_map(ax, shown, shown.ratio, *ratio_scale())
    bar = _add_colour_bar(image, ax, extend="max", ticks=_RATIOS)
    bar.ax.set_yticklabels([f"{r:g}" for r in _RATIOS])
    title = "R / bound kappa (white: held; blue: below; red: above)"
    if not shown.has_bound.all():
        # After the colour bar, which would be pale too.
        image.set_alpha(np.where(shown.has_bound, 1.0, _PALE))
        pale = "pale: bound not set yet, relative to the later one or the first R"
        title = f"{title[:-1]}; {pale})"
    ax.set_title(title, fontsize=10)


def _draw_multiplier(ax: Axes, shown: _Shown) -> None:
    image = _draw_heat_map(ax, shown, shown.multiplier, *multiplier_scale())
    bar = _add_colour_bar(image, ax, extend="both", ticks=10.0**_DECADES)
    bar.ax.set_yticklabels([f"$10^{{{d}}}$" for d in _DECADES])
    bar.minorticks_off()
    ax.set_title("Lagrange multiplier lambda (white: 0; grey: no bound yet)", fontsize=10)


def _add_colour_bar(image: AxesImage, ax: Axes, **settings: Any) -> Colorbar:
    aspect = max(20, len(ax.get_yticks()))
    return ax.figure.colorbar(image, ax=ax, pad=0.01, extendfrac=0.04, aspect=aspect, **settings)


def _draw_heat_map(
    ax: Axes, shown: _Shown, values: np.ndarray, colours: Colormap, norm: BoundaryNorm
) -> AxesImage:
    # Not seaborn.heatmap, which takes 15 s for 300 parameters and 1,000 epochs.
    names, epochs = shown.history.names, shown.history.epochs
    left, right = epochs[0] - 0.5, epochs[-1] + 0.5
    ax.set_facecolor(_NO_BOUND)  # shows where a value is NaN
    visible = np.where(shown.left_out[:, None], np.nan, values)
    extent = (left, right, len(names) - 0.5, -0.5)
    image = ax.imshow(
        visible, aspect="auto", interpolation="nearest", cmap=colours, norm=norm, extent=extent
    )
    look: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.6", "hatch": "////", "lw": 0}
    for row in np.flatnonzero(shown.left_out):
        ax.add_patch(Rectangle((left, row - 0.5), right - left, 1, **look))
    ticks = range(0, len(names), -(-len(names) // _MAX_LABELS))
    labels = [
        names[i].removesuffix(".weight") + (" (never changes)" if shown.left_out[i] else "")
        for i in ticks
    ]
    ax.set_yticks(ticks, labels, fontsize=7)
    ax.tick_params(labelbottom=True)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return image


def _draw_course(ax: Axes, shown: _Shown) -> None:
    epochs = np.array(shown.history.epochs)
    ratio = np.minimum(shown.ratio[~shown.left_out], 1e3)
    multiplier = shown.multiplier[~shown.left_out]
    marker = "." if len(epochs) < 100 else ""
    known = ~np.isnan(ratio).all(axis=0)
    ax.axhline(1, color="0.4", linewidth=0.8)
    if known.any():
        low, median, high = np.nanquantile(ratio[:, known], [0, 0.5, 1], axis=0)
        ax.fill_between(epochs[known], low, high, color="tab:red", alpha=0.18, linewidth=0)
        ax.plot(epochs[known], median, color="tab:red", marker=marker)
        ax.set_ylim(0, max(2.0, 1.05 * float(high.max())))
    quantity = "R / bound" if shown.has_bound.any() else "R / first R"
    epochs_set = " to ".join(map(str, shown.bounds_set))
    dashed = f"; dashed: bounds set in epoch {epochs_set}" if epochs_set else ""
    ax.set_ylabel(quantity, color="tab:red")
    ax.tick_params(axis="y", labelcolor="tab:red")
    ax.set_title(
        f"{quantity}: median and range (red); multiplier: mean over the matrices with a bound (blue)"
        f"{dashed}",
        fontsize=10,
    )
    ax.set_xlabel("epoch")

    right = ax.twinx()
    counts = np.isfinite(multiplier).sum(axis=0)
    means = np.nansum(multiplier, axis=0) / np.where(counts, counts, np.nan)
    limits = 10.0 ** _DECADES[0], 10.0 ** _DECADES[-1]
    right.set(yscale="log", ylim=limits)
    right.plot(epochs, np.clip(means, *limits), color="tab:blue", linestyle="--", marker=marker)
    right.set_ylabel("multiplier", color="tab:blue")
    right.tick_params(axis="y", labelcolor="tab:blue")
