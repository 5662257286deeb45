"""Adaptive weight decay, AWD (Ghiasi, Shafahi and Ardekani, arXiv 2210.00094)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._attachment import StepInputs
from nnunet_cpr._validation import positive_number
from nnunet_cpr.baselines._base import DecayBaseline, total_norm
from nnunet_cpr.param_groups import Params

_EMA = 0.1
"""Decay of the moving average over steps (the paper's Algorithm 1)."""


class AdaptiveWeightDecay(DecayBaseline):
    r"""Weight decay in proportion to the norm of the gradient.

    The coefficient follows the ratio of two norms over all regularized matrices:

    .. math::
        \bar\lambda &\leftarrow 0.1\, \bar\lambda + 0.9\, \mathrm{wd}\, \|g\|\, /\, \|\theta\| \\
        \theta &\leftarrow (1 - \mathrm{lr}\, \bar\lambda)\, \theta

    A step in which the ratio is not finite changes neither the coefficient nor the parameters.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: ratio between the norms of the decay and the gradient, the paper's lambda_awd.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or ``weight_decay`` is
            negative or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = AdaptiveWeightDecay(model, weight_decay=1e-2).attach(optimizer)
    """

    def __init__(self, params: Params, weight_decay: float = 1e-2) -> None:
        super().__init__(params)
        self.weight_decay = positive_number("weight_decay", weight_decay, allow_zero=True)
        self._state["coefficient"] = torch.zeros(
            (), dtype=torch.float32, device=self._state["step"].device
        )

    @property
    def coefficient(self) -> Tensor:
        """Present coefficient, a float32 scalar."""
        return self._state["coefficient"].clone()

    def _config(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay}

    def update_decay(self, inputs: StepInputs) -> Tensor:
        taken, sums = self._taken(inputs.found_inf), inputs.sums_of_squares()
        has_grad = None if inputs.all_as_before else self._has_grad()
        if has_grad is not None:
            sums = torch.where(has_grad, sums, 0)
        gradient = total_norm([p.grad for p in self.parameters if p.grad is not None])
        scale = self._gradient_scale()
        if scale is not None:
            gradient = gradient / scale.to(gradient)
        ratio = gradient / sums.sum().sqrt().float()  # NaN without any gradient
        present = self._state["coefficient"]
        proposed = _EMA * present + (1 - _EMA) * self.weight_decay * ratio
        is_used = proposed.isfinite() & (taken == 1)
        torch.where(is_used, proposed, present, out=present)
        self._state["step"] += taken
        return self._rates() * torch.where(is_used, proposed, 0)
