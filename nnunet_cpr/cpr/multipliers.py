"""Update of Lagrange multipliers by the paper's Algorithm 1: its formula, and its use in kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST = np.finfo(np.float32).max.item()
"""Largest finite multiplier; a greater one, or NaN, is not stored."""


def moved_multiplier(multiplier: Any, mu: Any, r: Any, kappa: Any) -> Any:
    """Return lambda + mu (r - kappa), before Algorithm 1's maximum with 0.

    Tensors and numbers in float32 give the same result; Numba compiles this function for the kernels.

    Example:
        >>> moved_multiplier(0.25, 1.0, r=3.0, kappa=2.5)
        0.75
    """
    return multiplier + mu * (r - kappa)


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
