"""Decoupled weight decay, constant (Loshchilov and Hutter, 2019) or with a cosine schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._attachment import StepInputs
from nnunet_cpr._validation import positive_integer, positive_number
from nnunet_cpr.baselines._base import DecayBaseline
from nnunet_cpr.param_groups import Params


class DecoupledDecay(DecayBaseline):
    """Weight decay of AdamW for any optimizer: theta <- (1 - lr * weight_decay) theta.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or ``weight_decay`` is
            negative or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = DecoupledDecay(model, weight_decay=1e-2).attach(optimizer)
    """

    def __init__(self, params: Params, weight_decay: float = 1e-2) -> None:
        super().__init__(params)
        self.weight_decay = positive_number("weight_decay", weight_decay, allow_zero=True)

    def _config(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay}

    def weight_decay_at(self, step: Tensor) -> float | Tensor:
        """Return the coefficient at a step, an int64 scalar tensor that is 0 at the first step."""
        return self.weight_decay

    def update_decay(self, inputs: StepInputs) -> Tensor:
        taken = self._taken(inputs.found_inf)
        decay = self._rates() * self.weight_decay_at(self._state["step"]) * taken
        self._state["step"] += taken
        return decay


class CosineDecay(DecoupledDecay):
    """Weight decay with a cosine schedule from ``weight_decay`` to ``final`` times that.

    The paper (appendix on CIFAR-100) compares schedules that decrease to 0.1 and 0.01 times and increase
    to 10 and 100 times the initial value, after Caron et al. (2021).

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: initial coefficient.
        final: final coefficient as a multiple of the initial one.
        steps: optimizer steps of the whole training; later steps keep the final value.

    Raises:
        TypeError, ValueError: as :class:`DecoupledDecay`, or ``final`` or ``steps`` is not positive.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = CosineDecay(model, weight_decay=1e-2, final=0.1, steps=1000).attach(optimizer)
    """

    def __init__(
        self, params: Params, weight_decay: float = 1e-2, final: float = 0.1, *, steps: int
    ) -> None:
        super().__init__(params, weight_decay)
        self.final = positive_number("final", final)
        self.steps = positive_integer("steps", steps)

    def _config(self) -> dict[str, Any]:
        return {**super()._config(), "final": self.final, "steps": self.steps}

    def weight_decay_at(self, step: Tensor) -> Tensor:
        done = (step.float() / self.steps).clamp(max=1)
        factor = self.final + (1 - self.final) * (1 + torch.cos(math.pi * done)) / 2
        return self.weight_decay * factor
