"""Pictures of what CPR did."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nnunet_cpr._files import atomic_write
from nnunet_cpr.nnunet.history import History

FIGURE_NAME = "cpr_progress.png"
_NO_BOUND = "0.88"  # grey
_LABELLED_ROWS = 60  # more names than that cannot be read


def draw_progress(history: History) -> None:
    """Write ``cpr_progress.png``: heat maps of R / kappa and of the multipliers, and their means.

    Args:
        history: the record of the training so far, one epoch at least.

    Raises:
        OSError: the file cannot be written; the one before stays.
    """
    target = history.folder / FIGURE_NAME
    # nnU-Net sets global styles for its own progress.png; draw with matplotlib's.
    with matplotlib.rc_context(matplotlib.rcParamsDefault), atomic_write(target) as path:
        kappa = _finite(history.kappa)
        ratio = _finite(history.measure) / np.where(kappa == 0, np.nan, kappa)
        multiplier = np.where(np.isnan(kappa), np.nan, _finite(history.multiplier))

        rows = len(history.names)
        height = min(max(2.0, 0.16 * rows), 14.0)
        figure = Figure(figsize=(12, 2 * height + 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        top, middle, bottom = figure.subplots(3, 1, height_ratios=[height, height, 2.6])
        figure.suptitle("What CPR did: bounds and multipliers of every regularized matrix")
        _heat_map(
            top,
            ratio,
            history,
            "measure / bound kappa (red: above its bound; grey: no bound yet)",
            "RdBu_r",
            around_one(ratio),
        )
        _heat_map(
            middle,
            multiplier,
            history,
            "Lagrange multiplier lambda (logarithmic; darkest: 0 or less than 1/1000 of the largest)",
            "viridis",
            three_decades(multiplier),
        )
        _means(bottom, ratio, multiplier, history)
        figure.savefig(path, dpi=110)


def _finite(column: list[np.ndarray]) -> np.ndarray:
    """Of all epochs, ``[J, epochs]``; NaN where a number is not finite or, a bound, not set."""
    values = np.stack(column, axis=1, dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def _heat_map(
    ax: Axes,
    values: np.ndarray,
    history: History,
    title: str,
    colours: str,
    norm: Normalize,
) -> None:
    first, last = history.epochs[0], history.epochs[-1]
    cmap = matplotlib.colormaps[colours].with_extremes(bad=_NO_BOUND)
    image = ax.imshow(
        np.ma.masked_invalid(values),
        aspect="auto",
        interpolation="nearest",
        cmap=cmap,
        norm=norm,
        extent=(first - 0.5, last + 0.5, len(history.names) - 0.5, -0.5),
    )
    ax.figure.colorbar(image, ax=ax, pad=0.01)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("epoch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    every = -(-len(history.names) // _LABELLED_ROWS)
    ticks = range(0, len(history.names), every)
    ax.set_yticks(ticks, [history.names[i].removesuffix(".weight") for i in ticks], fontsize=7)


def _means(ax: Axes, ratio: np.ndarray, multiplier: np.ndarray, history: History) -> None:
    ax.set_title("mean over the matrices that have a bound", fontsize=10)
    ax.set_xlabel("epoch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlim(history.epochs[0] - 0.5, history.epochs[-1] + 0.5)
    for axis, values, label, colour, style in (
        (ax, ratio, "measure / kappa", "tab:red", "-"),
        (ax.twinx(), multiplier, "multiplier", "tab:blue", "--"),
    ):
        counts = np.isfinite(values).sum(axis=0)
        means = np.nansum(values, axis=0) / np.where(counts, counts, np.nan)
        axis.plot(history.epochs, means, color=colour, linestyle=style, marker=".", markersize=4)
        axis.ticklabel_format(axis="y", useOffset=False)
        axis.set_ylabel(label, color=colour)
        axis.tick_params(axis="y", labelcolor=colour)


def three_decades(multiplier: np.ndarray) -> Normalize:
    """Colours by the logarithm, from a thousandth of the largest multiplier."""
    largest = float(np.nanmax(multiplier, initial=0.0))
    return LogNorm(largest / 1e3, largest, clip=True) if largest > 0 else Normalize(0, 1e-3)


def around_one(ratio: np.ndarray) -> Normalize:
    """Colours centred on the bound; a single far outlier does not wash out the rest."""
    finite = ratio[np.isfinite(ratio)]
    reach = float(np.quantile(np.abs(finite - 1), 0.99)) if finite.size else 0.0
    reach = max(reach, 1e-3)
    return TwoSlopeNorm(1.0, vmin=1 - reach, vmax=1 + reach)
