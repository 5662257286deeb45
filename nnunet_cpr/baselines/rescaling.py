"""Rescaling to a fixed total norm (Liu, Michaud and Tegmark, Omnigrok, ICLR 2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr._validation import positive_number
from nnunet_cpr.baselines._base import Baseline, shrink_, total_norm
from nnunet_cpr.param_groups import Params


class NormRescaling(Baseline):
    """Rescaling of all regularized matrices to a constant total norm.

    After every step all matrices, also those without a gradient, are multiplied by one number, which
    restores ``factor`` times the norm before the first step. If a norm is 0 or not finite, they are not
    changed.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        factor: norm as a multiple of the initial one. CPR's authors compare 0.8 to 16.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or ``factor`` is not
            positive and finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = NormRescaling(model, factor=0.8).attach(optimizer)
    """

    def __init__(self, params: Params, factor: float = 1.0) -> None:
        super().__init__(params)
        self.factor = positive_number("factor", factor)
        self._state["initial_norm"] = torch.zeros(
            (), dtype=torch.float32, device=self._state["step"].device
        )

    def _config(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def _step_hooks(self, optimizer: Optimizer) -> list[Any]:
        after_step = torch.compiler.disable(self._after_step)
        return [*super()._step_hooks(optimizer), optimizer.register_step_post_hook(after_step)]

    @torch.no_grad()
    def _update_and_correct(self, found_inf: Tensor | None) -> None:
        state, taken = self._state, self._taken(found_inf)
        norm = total_norm(self.parameters)
        is_first = (state["step"] == 0) & (taken == 1) & norm.isfinite()
        torch.where(is_first, norm, state["initial_norm"], out=state["initial_norm"])
        state["step"] += taken

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        factor = self.factor * self._state["initial_norm"] / total_norm(self.parameters)
        # The factor is 0 if the present norm is infinite or the initial one is 0.
        is_used = (factor > 0) & factor.isfinite()
        is_used &= self._taken(getattr(optimizer, "found_inf", None)) == 1
        for p in self.parameters:
            scaled = p.clone()
            shrink_(scaled, 1 - factor)
            p.copy_(torch.where(is_used, scaled, p))
