"""Verdict on the bounds of a training, computed from its history."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from nnunet_cpr.nnunet.history import History
from nnunet_cpr.refusals import counted

HELD = 0.05
"""Relative distance from the bound within which R counts as held."""
ACTIVE = 1e-6
"""Smallest multiplier that counts as active, and that the figure shows."""
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
    HELD = "OK: bounds active and held"


_ADVICE = {
    Kind.DIVERGED: "lower the learning rate",
    Kind.TOO_LOOSE: "the training is not regularized; choose a smaller bound",
    Kind.TOO_TIGHT: "choose a larger bound or, if the multipliers move too slowly or too far, another "
    "_mu<V>",
    Kind.HELD: "",
}


@dataclass(frozen=True)
class BoundsVerdict:
    """Verdict on the bounds of a training.

    Attributes:
        kind: see :class:`Kind`.
        text: one line with the numbers behind it.
        advice: one line on what to do, empty for :attr:`Kind.HELD`.
    """

    kind: Kind
    text: str
    advice: str


def unchanged(history: History) -> np.ndarray:
    """Return which parameters never changed and never had a multiplier, bool ``[J]``.

    These are the parameters without a gradient, such as nnU-Net's lowest deep-supervision head, whose
    loss has weight 0. One epoch alone does not tell, and the result is False.

    Args:
        history: the record of at least one epoch.
    """
    measure, multiplier = history.stack("measure"), history.stack("multiplier")
    if measure.shape[1] < 2:
        return np.zeros(len(measure), dtype=bool)
    return (measure == measure[:, :1]).all(axis=1) & (multiplier == 0).all(axis=1)


def judge_bounds(history: History) -> BoundsVerdict:
    """Return the verdict on a history.

    Parameters of :func:`unchanged` are left out. A matrix is active if its multiplier is at least
    :data:`ACTIVE` at the end of an epoch. Its level is the median of R / kappa over the last quarter of
    its epochs with a bound. Above 1 + :data:`HELD` its multiplier is still growing, since it grows in
    every step in which R is above the bound. An active matrix below :data:`COLLAPSED` was shrunk too
    far: a multiplier that has grown far above the bound decreases slowly and corrects on below it. If
    there are more than :data:`FEW` of both, the bound is too tight; with at most that many active
    matrices, too loose.

    Args:
        history: the record of at least one epoch.
    """
    ignored = unchanged(history)
    if ignored.all():
        ignored[:] = False
    aside = f" ({ignored.sum()} that never changed not counted)" if ignored.any() else ""
    measure, kappa, multiplier = (
        history.stack(name)[~ignored] for name in ("measure", "kappa", "multiplier")
    )
    kind, text = _judge(measure, kappa, multiplier, history.steps[-1])
    advice = advise_on_unset(history.steps[-1]) if kind is Kind.UNSET else _ADVICE[kind]
    return BoundsVerdict(kind, f"{kind.value}{text}{aside}", advice)


def advise_on_unset(steps: int) -> str:
    """Return advice for a training that sets no bound.

    The warm start that it names is set within twice the default learning-rate warm-up, a tenth of a
    short training.

    Args:
        steps: length of the training.

    Example:
        >>> advise_on_unset(120)
        'train longer, or choose a bound that is set in these steps, such as _ws24'
        >>> advise_on_unset(1)
        'train longer'
    """
    warm_start = min(max(1, steps // 5), 1000)
    if warm_start >= steps:
        return "train longer"
    return f"train longer, or choose a bound that is set in these steps, such as _ws{warm_start}"


def _judge(
    measure: np.ndarray, kappa: np.ndarray, multiplier: np.ndarray, steps: int
) -> tuple[Kind, str]:
    """Return the kind and the numbers behind it for arrays ``[J, epochs]``."""
    total = len(measure)
    if total == 0:
        return Kind.UNSET, ": no parameter matrix is regularized"
    lost = ~np.isfinite(measure[:, -1])
    if lost.any():
        return Kind.DIVERGED, f" for {_count(lost, total)}"
    has_bound = np.isfinite(kappa)
    unset = ~has_bound.any(axis=1)
    if (~unset).sum() <= FEW * total:
        return Kind.UNSET, f": {_count(unset, total)} not regularized in {counted(steps, 'step')}"

    level = _levels(measure, kappa, has_bound)
    active = (np.where(has_bound, multiplier, 0) >= ACTIVE).any(axis=1)
    outside = (level > 1 + HELD) | (active & (level < COLLAPSED))
    lowest, highest = np.nanmin(level, initial=np.inf), np.nanmax(level, initial=0.0)
    if outside.sum() > FEW * total:
        kind, found = Kind.TOO_TIGHT, f"{_count(outside, total)} not held"
    elif active.sum() <= FEW * total:
        kind, found = Kind.TOO_LOOSE, f"{_count(active, total)} active"
    else:
        kind, found = Kind.HELD, f"{_count(active, total)} active"
        found += f", {outside.sum()} not held" if outside.any() else ""
    without = f"; {unset.sum()} without a bound" if unset.any() else ""
    return kind, f": {found}, R / bound {lowest:.3f} to {highest:.3f}{without}"


def _levels(measure: np.ndarray, kappa: np.ndarray, has_bound: np.ndarray) -> np.ndarray:
    """Return the median of R / kappa over the last epochs with a bound, NaN without one, ``[J]``."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = [row[known] for row, known in zip(measure / kappa, has_bound)]
    last = [ratio[-math.ceil(_RECENT * len(ratio)) :] for ratio in ratios]
    return np.array([np.median(ratio) if len(ratio) else math.nan for ratio in last])


def _count(matrices: Any, total: int) -> str:
    count = matrices.sum()
    amount = "all" if count == total else "none of" if count == 0 else f"{count} of"
    return f"{amount} {total} matrices"
