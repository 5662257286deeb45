"""What the matrices did in a run: ``dynamics.csv``, for runs with CPR and for those without."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import Optimizer

from nnunet_cpr.cpr import CPR
from nnunet_cpr.param_groups import regularized
from nnunet_cpr.regularizers import L2

COLUMNS = ["step", "parameter", "measure", "kappa", "multiplier"]


class Dynamics:
    """Reads measure, kappa and lambda of every regularized matrix.

    Args:
        model: what is trained.
        optimizer: if it has CPR, its bounds and multipliers are read; without, the measure ``l2``.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        cpr = getattr(optimizer, "cpr", None)
        self._cpr = cpr if isinstance(cpr, CPR) else None
        self._matrices = regularized(model)

    def rows(self, step: int) -> list[tuple[int, str, float, float, float]]:
        """One row a matrix, in the order of :data:`COLUMNS`; NaN where there is no CPR."""
        if self._cpr is not None:
            columns = (self._cpr.measure, self._cpr.kappa, self._cpr.lagrange_multiplier)
            values = [column.tolist() for column in columns]
            return [(step, *row) for row in zip(self._cpr.names, *values)]
        measures = self._measure()
        return [(step, n, r, math.nan, math.nan) for n, r in zip(self._matrices, measures)]

    @torch.no_grad()
    def _measure(self) -> list[float]:
        params = list(self._matrices.values())
        l2 = L2()
        sums = l2.sums(params)
        numel = torch.tensor([p.numel() for p in params], device=sums.device)
        return l2.measure(sums, numel).tolist()
