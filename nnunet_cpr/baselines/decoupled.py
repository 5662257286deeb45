"""Decoupled weight decay, fixed (Loshchilov and Hutter, 2019) or on a cosine schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nnunet_cpr.baselines._base import Baseline, checked_number, shrink_
from nnunet_cpr.param_groups import Params


class DecoupledDecay(Baseline):
    """The decay of AdamW, for any optimizer: theta <- (1 - lr * weight_decay) theta.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: the coefficient, multiplied by the learning rate of each step.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or ``weight_decay`` is
            negative or not finite.
    """

    def __init__(self, params: Params, weight_decay: float = 1e-2) -> None:
        super().__init__(params)
        self.weight_decay = checked_number("weight_decay", weight_decay, zero=True)

    def _config(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay}

    def weight_decay_at(self, step: Tensor) -> float | Tensor:
        """The coefficient at a step, an int64 scalar tensor that is 0 for the first one."""
        return self.weight_decay

    @torch.no_grad()
    def _update_and_correct(self, found_inf: Tensor | None) -> None:
        taken = self._taken(found_inf)
        decay = self.weight_decay_at(self._state["step"]) * taken.float()
        for p, lr in self._with_gradient():
            shrink_(p, lr * decay)
        self._state["step"] += taken


class CosineDecay(DecoupledDecay):
    """Weight decay that goes from ``weight_decay`` to ``final`` times that, along half a cosine.

    The paper's comparison (its appendix on CIFAR-100) has schedules that fall to 0.1 and 0.01 times
    and ones that rise to 10 and 100 times the first value, after Caron et al. (2021).

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: the first step's coefficient.
        final: what the coefficient comes to at the end, as a multiple of it.
        steps: optimizer steps of the whole training; later ones keep the final value.

    Raises:
        TypeError, ValueError: as :class:`DecoupledDecay`, or ``final`` is not positive, or ``steps`` no
            positive whole number.
    """

    def __init__(
        self, params: Params, weight_decay: float = 1e-2, final: float = 0.1, *, steps: int
    ) -> None:
        super().__init__(params, weight_decay)
        self.final = checked_number("final", final)
        if checked_number("steps", steps) % 1:
            raise ValueError(f"steps must be a whole number, got {steps!r}")
        self.steps = int(steps)

    def _config(self) -> dict[str, Any]:
        return {**super()._config(), "final": self.final, "steps": self.steps}

    def weight_decay_at(self, step: Tensor) -> Tensor:
        done = (step.float() / self.steps).clamp(max=1)
        factor = self.final + (1 - self.final) * (1 + torch.cos(math.pi * done)) / 2
        return self.weight_decay * factor
