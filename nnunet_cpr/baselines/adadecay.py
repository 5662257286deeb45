"""AdaDecay: weight decay that every weight has by its gradient (Nakamura and Hong, 2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnunet_cpr.baselines._base import Baseline, checked_number, shrink_
from nnunet_cpr.param_groups import Params


class AdaDecay(Baseline):
    r"""Decays weights with large gradients more, and those with small ones less.

    In each matrix the sizes of its elements' gradients are standardised and sent through a sigmoid
    (arXiv 1907.08931, its section on the adaptive rate); an average element has the rate 1:

    .. math::
        \theta &\leftarrow (1 - \mathrm{lr}\, \mathrm{wd}\, s)\, \theta \\
        s &= 2\, /\, (1 + \exp(-\alpha\, (|g| - \mathrm{mean}\,|g|)\, /\, \mathrm{std}\,|g|))

    A matrix whose gradients are not all finite is left alone in that step.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: the coefficient, multiplied by the learning rate of each step.
        alpha: how steep the sigmoid is; with 0 this is decoupled weight decay. CPR's authors compare
            1, 2, 4 and 8.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or a setting is negative
            or not finite.
    """

    def __init__(self, params: Params, weight_decay: float = 1e-2, alpha: float = 4.0) -> None:
        super().__init__(params)
        self.weight_decay = checked_number("weight_decay", weight_decay, zero=True)
        self.alpha = checked_number("alpha", alpha, zero=True)

    def _config(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay, "alpha": self.alpha}

    @torch.no_grad()
    def _update_and_correct(self, found_inf: Tensor | None) -> None:
        taken = self._taken(found_inf)
        decay = self.weight_decay * taken.float()
        for p, lr in self._with_gradient():
            assert p.grad is not None
            size = p.grad.abs().float() if p.grad.dtype.itemsize < 4 else p.grad.abs()
            std, mean = torch.std_mean(size, correction=0)
            # Equal gradients are all average ones; 0 / 0 would not be.
            standard = (size - mean) / torch.where(std > 0, std, 1)
            rate = 2 * torch.sigmoid(self.alpha * standard)
            rate = torch.where(std.isfinite(), rate, 0)
            shrink_(p, lr * decay.to(p.device) * rate)
        self._state["step"] += taken
