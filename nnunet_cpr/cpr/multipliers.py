"""Update of Lagrange multipliers by the paper's Algorithm 1, and what a kernel needs to repeat it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LARGEST = np.finfo(np.float32).max.item()
"""Largest finite multiplier; a greater one, or NaN, is not stored."""


def next_multipliers(
    multiplier: Tensor, mu: float, r: Tensor, kappa: Tensor, limit: float, has_step: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return max(0, lambda + mu (r - kappa)) of J matrices, the paper's Algorithm 1 with its limits.

    Kernels repeat it (:mod:`nnunet_cpr.optimizers.kernels`), to the bit.

    Args:
        multiplier: Lagrange multipliers lambda, float32 ``[J]``.
        mu: their update rate.
        r: R of the matrices, float32 ``[J]``.
        kappa: their bounds, float32 ``[J]``; +inf where not set yet.
        limit: largest multiplier in a correction.
        has_step: False for matrices that are left out of this step, ``[J]``.

    Returns:
        The next multipliers; those of the correction, at most ``limit``, and 0 where nothing is updated;
        and which are updated: those with a step whose next multiplier is a finite number.

    Example:
        >>> next_multipliers(*map(torch.tensor, ([0.25], 1.0, [3.0], [2.5], 0.5, [True])))
        (tensor([0.7500]), tensor([0.5000]), tensor([True]))
    """
    moved = (multiplier + mu * (r - kappa)).clamp_(min=0)
    is_updated = has_step & (moved <= LARGEST)  # False for NaN
    applied = torch.where(is_updated, moved, 0.0).clamp_(max=limit)
    return torch.where(is_updated, moved, multiplier), applied, is_updated


@dataclass(frozen=True)
class Decays:
    """Shares of J matrices to subtract in a step: given, or of a kernel that updates the multipliers.

    The kernel computes the share of a matrix with a bound from its R and multiplier.

    Attributes:
        value: the given shares, float32 ``[J]``; a kernel writes its own over them.
        kappa: bounds, float32 ``[J]``; +inf for the shares that are given, which need no R.
        mu: update rates of the multipliers, float32 ``[J]``.
        limit: largest multiplier in a correction, float32.
        multiplier: Lagrange multipliers, float32 ``[J]``, updated in place.
        skipped: number of updates that were left out as they were not finite, int64 ``[1]``, updated.
        limited: number of multipliers that were limited in the correction, int64 ``[1]``, updated.
    """

    value: np.ndarray
    kappa: np.ndarray
    mu: np.ndarray
    limit: np.float32
    multiplier: np.ndarray
    skipped: np.ndarray
    limited: np.ndarray

    @classmethod
    def given(cls, value: np.ndarray) -> Decays:
        """Return given shares, float32 ``[J]``."""
        unused, count = np.zeros_like(value), np.zeros(1, np.int64)
        no_bound = np.full_like(value, np.inf)
        return cls(value, no_bound, unused, np.float32(0), unused, count, count)
