"""Regularization values, bounds and multipliers of a run: the rows of ``dynamics.csv``."""

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
    """Regularization value, bound and Lagrange multiplier of every parameter matrix.

    Args:
        model: the model in training.
        optimizer: its optimizer. Without CPR, the value of ``l2`` is recorded and no bounds.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> [(step, name, value, kappa, multiplier)] = Dynamics(
        ...     model, torch.optim.SGD(model.parameters())
        ... ).rows(step=0)
        >>> (step, name, round(value, 3), kappa, multiplier)
        (0, 'weight', 1.0, nan, nan)
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        cpr = getattr(optimizer, "cpr", None)
        self._cpr = cpr if isinstance(cpr, CPR) else None
        self._matrices = regularized(model)

    def rows(self, step: int) -> list[tuple[int, str, float, float, float]]:
        """Return a row for each parameter matrix with :data:`COLUMNS`; NaN stands for no CPR."""
        if self._cpr is not None:
            columns = (self._cpr.measure, self._cpr.kappa, self._cpr.lagrange_multiplier)
            values = [column.tolist() for column in columns]
            return [(step, *row) for row in zip(self._cpr.names, *values)]
        l2_values = self._l2_values()
        return [(step, n, r, math.nan, math.nan) for n, r in zip(self._matrices, l2_values)]

    @torch.no_grad()
    def _l2_values(self) -> list[float]:
        params = list(self._matrices.values())
        l2 = L2()
        sums = l2.sums(params)
        numel = torch.tensor([p.numel() for p in params], device=sums.device)
        return l2.measure(sums, numel).tolist()
