"""Cautious weight decay (Chen et al., arXiv 2510.12402)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._validation import positive_number
from nnunet_cpr.baselines._base import UpdateBaseline
from nnunet_cpr.param_groups import Params


class CautiousDecay(UpdateBaseline):
    r"""Decoupled weight decay of the elements that the optimizer moves towards zero, or not at all.

    With the optimizer's update u, so that the optimizer alone gives theta - lr u (the paper's Algorithm
    1):

    .. math::
        \theta \leftarrow \theta - \mathrm{lr}\, (u + \mathrm{wd}\, [u \theta \ge 0]\, \theta)

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or ``weight_decay`` is
            negative or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = CautiousDecay(model, weight_decay=1e-2).attach(optimizer)
    """

    def __init__(self, params: Params, weight_decay: float = 1e-2) -> None:
        super().__init__(params)
        self.weight_decay = positive_number("weight_decay", weight_decay, allow_zero=True)

    def _config(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay}

    def _correct_update(self, index: int, before: Tensor, lr: float | Tensor, taken: Tensor) -> None:
        p = self.parameters[index]
        # By comparison, since a difference or a product of small numbers may round to 0.
        agrees = torch.where(before >= 0, p <= before, p >= before)
        amount = lr * self.weight_decay * taken.float()
        p.addcmul_(before, agrees * amount.to(p), value=-1)
