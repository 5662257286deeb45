"""Figure of CPR's bounds and multipliers over the epochs of a training."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, TwoSlopeNorm
from matplotlib.ticker import MaxNLocator

from nnunet_cpr._figures import new_figure
from nnunet_cpr.nnunet.history import History

FIGURE_NAME = "cpr_progress.png"
_NO_BOUND = "0.88"  # grey
_MAX_LABELS = 60  # more names are illegible


def draw_progress(history: History) -> None:
    """Write ``cpr_progress.png``: heat maps of R / kappa and of the multipliers, and their means.

    Args:
        history: the record of at least one epoch.

    Raises:
        OSError: the file cannot be written; a previous one is unchanged.
    """
    kappa = _finite(history.kappa)
    ratio = _finite(history.measure) / np.where(kappa == 0, np.nan, kappa)
    multiplier = np.where(np.isnan(kappa), np.nan, _finite(history.multiplier))

    height = min(max(2.0, 0.16 * len(history.names)), 14.0)
    size = (12, 2 * height + 4.5)
    with new_figure(history.folder / FIGURE_NAME, size) as figure:
        top, middle, bottom = figure.subplots(3, 1, height_ratios=[height, height, 2.6])
        figure.suptitle("Bound and Lagrange multiplier of each regularized parameter")
        _heat_map(top, ratio, history, around_one(ratio), "RdBu_r")
        top.set_title("measure / bound kappa (red: above its bound; grey: no bound yet)", fontsize=10)
        _heat_map(middle, multiplier, history, three_decades(multiplier), "viridis")
        middle.set_title(
            "Lagrange multiplier lambda (logarithmic; darkest: 0 or less than 1/1000 of the largest)",
            fontsize=10,
        )
        _means(bottom, ratio, multiplier, history)


def _finite(column: list[np.ndarray]) -> np.ndarray:
    """Stack the values of all epochs to ``[J, epochs]``, with NaN for those that are not finite."""
    values = np.stack(column, axis=1, dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def _heat_map(ax: Axes, values: np.ndarray, history: History, norm: Normalize, cmap: str) -> None:
    # Not seaborn.heatmap, which takes 15 s for 300 parameters and 1,000 epochs.
    ax.set_facecolor(_NO_BOUND)  # shows where a value is NaN
    edges = (history.epochs[0] - 0.5, history.epochs[-1] + 0.5, len(history.names) - 0.5, -0.5)
    image = ax.imshow(values, aspect="auto", interpolation="nearest", cmap=cmap, norm=norm, extent=edges)
    ax.figure.colorbar(image, ax=ax, pad=0.01)
    ax.set_xlabel("epoch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    step = -(-len(history.names) // _MAX_LABELS)
    ticks = range(0, len(history.names), step)
    ax.set_yticks(ticks, [history.names[i].removesuffix(".weight") for i in ticks], fontsize=7)


def _means(ax: Axes, ratio: np.ndarray, multiplier: np.ndarray, history: History) -> None:
    ax.set_title("mean over the parameters that have a bound", fontsize=10)
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
    """Return a logarithmic colour scale from a thousandth of the largest multiplier."""
    largest = float(np.nanmax(multiplier, initial=0.0))
    return LogNorm(largest / 1e3, largest, clip=True) if largest > 0 else Normalize(0, 1e-3)


def around_one(ratio: np.ndarray) -> Normalize:
    """Return a colour scale centred on the bound, which outliers do not stretch."""
    finite = ratio[np.isfinite(ratio)]
    reach = float(np.quantile(np.abs(finite - 1), 0.99)) if finite.size else 0.0
    reach = max(reach, 1e-3)
    return TwoSlopeNorm(1.0, vmin=1 - reach, vmax=1 + reach)
