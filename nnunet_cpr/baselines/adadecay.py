"""AdaDecay: weight decay of each element by its gradient (Nakamura and Hong, 2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._validation import positive_number
from nnunet_cpr.baselines._base import Baseline, shrink_
from nnunet_cpr.param_groups import Params


class AdaDecay(Baseline):
    r"""Weight decay that is stronger for elements with larger gradients.

    In each matrix the absolute gradients are standardized and passed through a sigmoid (arXiv
    1907.08931, section on the adaptive rate); an average element has the rate 1:

    .. math::
        \theta &\leftarrow (1 - \mathrm{lr}\, \mathrm{wd}\, s)\, \theta \\
        s &= 2\, /\, (1 + \exp(-\alpha\, (|g| - \mathrm{mean}\,|g|)\, /\, \mathrm{std}\,|g|))

    A matrix with gradients that are not finite is not changed in that step.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.
        alpha: steepness of the sigmoid; 0 gives decoupled weight decay. CPR's authors compare 1, 2, 4
            and 8.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or a setting is negative
            or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = AdaDecay(model, weight_decay=1e-2, alpha=4.0).attach(optimizer)
    """

    def __init__(self, params: Params, weight_decay: float = 1e-2, alpha: float = 4.0) -> None:
        super().__init__(params)
        self.weight_decay = positive_number("weight_decay", weight_decay, allow_zero=True)
        self.alpha = positive_number("alpha", alpha, allow_zero=True)

    def _config(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay, "alpha": self.alpha}

    @torch.no_grad()
    def _update_and_correct(self, found_inf: Tensor | None) -> None:
        taken = self._taken(found_inf)
        decay = self.weight_decay * taken.float()
        for _, p, lr in self._with_gradient():
            assert p.grad is not None
            absolute = p.grad.abs().float() if p.grad.dtype.itemsize < 4 else p.grad.abs()
            std, mean = torch.std_mean(absolute, correction=0)
            # Equal gradients have the rate 1 and not NaN.
            standard = (absolute - mean) / torch.where(std > 0, std, 1)
            rate = 2 * torch.sigmoid(self.alpha * standard)
            rate = torch.where(std.isfinite(), rate, 0)
            shrink_(p, lr * decay.to(p.device) * rate)
        self._state["step"] += taken
