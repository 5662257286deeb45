"""Verdict on the bounds of a training, computed from its history."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from nnunet_cpr.nnunet.history import History

HELD = 0.05
"""Relative distance from the bound within which R counts as held."""
COLLAPSED = 0.5
"""R / kappa below which a matrix that was active has been shrunk far below its bound."""
FEW = 0.1
"""Fraction of the matrices up to which a finding does not decide the verdict."""

_RECENT = 0.25  # of the epochs with a bound: multipliers and R vary from epoch to epoch


class Kind(Enum):
    """Kind of a verdict; the value is its first words."""

    DIVERGED = "R is not finite"
    UNSET = "bound never set"
    TOO_LOOSE = "never active: the bound is too loose"
    TOO_TIGHT = "bound too tight"
    HELD = "active and held"


@dataclass(frozen=True)
class Verdict:
    """Verdict on the bounds of a training.

    Attributes:
        kind: see :class:`Kind`.
        text: one line with the numbers behind it.
        advice: one line on what to do, empty for :attr:`Kind.HELD`.
    """

    kind: Kind
    text: str
    advice: str = ""


def unchanged(history: History) -> np.ndarray:
    """Return which parameters never changed and never had a multiplier, bool ``[J]``.

    That are those without a gradient, such as nnU-Net's lowest deep-supervision head, whose loss has
    weight 0. One epoch alone does not tell, and the result is False.

    Args:
        history: the record of at least one epoch.
    """
    measure, multiplier = history.stack("measure"), history.stack("multiplier")
    if measure.shape[1] < 2:
        return np.zeros(len(measure), dtype=bool)
    return (measure == measure[:, :1]).all(axis=1) & (multiplier == 0).all(axis=1)


def judge(history: History) -> Verdict:
    """Return the verdict on a history.

    Parameters of :func:`unchanged` are left out. A matrix is active if its multiplier is positive at the
    end of an epoch. Its level is the median of R / kappa over the last quarter of its epochs with a
    bound. Above 1 + :data:`HELD` its multiplier is still growing, since it grows in every step in which
    R is above the bound. An active matrix below :data:`COLLAPSED` was shrunk too far: a multiplier that
    has grown far above the bound decreases slowly and corrects on below the bound. If there are more
    than :data:`FEW` of both, the bound is too tight; with at most that many active matrices, too loose.

    Args:
        history: the record of at least one epoch.
    """
    ignored = unchanged(history)
    if ignored.all():
        ignored[:] = False
    measure, kappa, multiplier = (
        history.stack(name)[~ignored] for name in ("measure", "kappa", "multiplier")
    )
    total = len(measure)
    aside = f" ({ignored.sum()} that never changed not counted)" if ignored.any() else ""
    if total == 0:
        return Verdict(Kind.UNSET, f"{Kind.UNSET.value}: no parameter matrix is regularized")

    lost = ~np.isfinite(measure[:, -1])
    if lost.any():
        return Verdict(
            Kind.DIVERGED,
            f"{Kind.DIVERGED.value} for {_of(lost.sum(), total)}{aside}",
            "lower the learning rate",
        )
    has_bound = np.isfinite(kappa)
    bounded = has_bound.any(axis=1)
    if bounded.sum() <= FEW * total:
        return Verdict(
            Kind.UNSET,
            f"{Kind.UNSET.value}: {_of(total - bounded.sum(), total)} not regularized in "
            f"{history.steps[-1]:,} steps{aside}",
            "train longer, or choose a bound that is set earlier, such as _ws1000",
        )

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(has_bound, measure / kappa, np.nan)
    level = np.array([_median(r[_recent(b)]) for r, b in zip(ratio, has_bound)])
    active = (np.where(has_bound, multiplier, 0) > 0).any(axis=1)
    growing = level > 1 + HELD
    shrunk = active & (level < COLLAPSED)

    highest, lowest = np.nanmax(level, initial=0.0), np.nanmin(level, initial=np.inf)
    unset = f"; {total - bounded.sum()} without a bound" if not bounded.all() else ""
    if (growing | shrunk).sum() > FEW * total:
        parts = []
        if growing.any():
            parts.append(
                f"multipliers still growing for {_of(growing.sum(), total)}, "
                f"R up to {highest:.3g} times its bound"
            )
        if shrunk.any():
            parts.append(
                f"R of {_of(shrunk.sum(), total)} pushed down to {level[shrunk].min():.2g} of its bound"
            )
        return Verdict(
            Kind.TOO_TIGHT,
            f"{Kind.TOO_TIGHT.value}: {', '.join(parts)}{unset}{aside}",
            "choose a larger bound or, if the multipliers move too slowly or too far, another _mu<V>",
        )
    if active.sum() <= FEW * total:
        first = "" if not active.any() else f" for {_of(total - active.sum(), total)}"
        return Verdict(
            Kind.TOO_LOOSE,
            f"{Kind.TOO_LOOSE.value}{first}, R at most {highest:.2g} of it{unset}{aside}",
            "the training is not regularized; choose a smaller bound",
        )
    inactive = bounded.sum() - active.sum()
    never = f"; {inactive} never active" if inactive else ""
    outside = (growing | shrunk).sum()
    exceptions = f"; {outside} not held" if outside else ""
    return Verdict(
        Kind.HELD,
        f"{Kind.HELD.value}: {_of(active.sum(), total)} active, "
        f"R / bound {lowest:.3f} to {highest:.3f}{never}{exceptions}{unset}{aside}",
    )


def _recent(has_bound: np.ndarray) -> np.ndarray:
    """Return the indices of the last epochs with a bound."""
    epochs = np.flatnonzero(has_bound)
    return epochs[-max(1, math.ceil(_RECENT * len(epochs))) :]


def _median(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(np.median(values)) if len(values) else math.nan


def _of(count: int, total: int) -> str:
    return f"{'all' if count == total else f'{count} of'} {total} matrices"
