"""Weight norm control (Loshchilov, arXiv 2311.11446)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._attachment import StepInputs
from nnunet_cpr._validation import positive_integer, positive_number
from nnunet_cpr.baselines._base import DecayBaseline
from nnunet_cpr.param_groups import Params


class WeightNormControl(DecayBaseline):
    r"""Decoupled decay of each matrix towards a norm r instead of towards zero (AdamWN).

    .. math::
        \theta \leftarrow \theta - \mathrm{lr}\, \mathrm{wd}\, (1 - r / \|\theta\|)\, \theta

    With r = 0 this is decoupled weight decay, Eq. (2) of the paper, which its section 2 generalizes. A
    matrix below the norm grows. Each matrix has its own r here, as in CPR with Kappa-WS. The paper was
    read up to Eq. (2); the target r follows its abstract.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.
        factor: r as a multiple of the norm at step ``start``.
        start: number of optimizer steps after which the norm sets r; 0 for the initial norm. Before it,
            and while a norm is 0 or not finite, a matrix is not changed.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or a setting is out of
            range.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = WeightNormControl(model, weight_decay=1e-2, start=100).attach(optimizer)
    """

    def __init__(
        self, params: Params, weight_decay: float = 1e-2, factor: float = 1.0, start: int = 0
    ) -> None:
        super().__init__(params)
        self.weight_decay = positive_number("weight_decay", weight_decay, allow_zero=True)
        self.factor = positive_number("factor", factor)
        self.start = positive_integer("start", start, allow_zero=True)
        self._state["target"] = self._zeros_per_matrix()  # 0 until it is set

    def _config(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay, "start": self.start, "factor": self.factor}

    def update_decay(self, inputs: StepInputs) -> Tensor:
        step, target = self._state["step"], self._state["target"]
        taken = self._taken(inputs.found_inf)
        norm = inputs.sums_of_squares().sqrt().float()
        has_norm = norm.isfinite() & (norm > 0) & (taken == 1)
        torch.where(
            has_norm & (target == 0) & (step >= self.start), self.factor * norm, target, out=target
        )
        pull = torch.where(has_norm & (target > 0), 1 - target / norm, 0)
        step += taken
        return self._rates() * self.weight_decay * pull
