"""Adam whose fused step applies the attached regularization method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnunet_cpr.fused import Rule
from nnunet_cpr.optimizers._base import FusedOptimizer


class FusedAdam(FusedOptimizer, torch.optim.Adam):
    """``torch.optim.Adam`` whose fused step applies the attached regularization method.

    With :class:`~nnunet_cpr.baselines.DecoupledDecay` it is AdamW.

    Args:
        params, fused: as in :class:`~nnunet_cpr.optimizers.FusedSGD`.
        lr, options: as in ``torch.optim.Adam``.

    Raises:
        TypeError, ValueError: as ``torch.optim.Adam`` does.

    Example:
        >>> from nnunet_cpr.baselines import DecoupledDecay
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = DecoupledDecay(model, weight_decay=1e-2).attach(FusedAdam(model, lr=1e-3))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    _torch_class: type[torch.optim.Optimizer] = torch.optim.Adam
    _torch_fuses_shards = True

    def _supports_fused(self, group: dict[str, Any]) -> bool:
        return not group["differentiable"] and not any(isinstance(b, Tensor) for b in group["betas"])

    def _state_tensors(
        self, group: dict[str, Any], stepped: list[Tensor]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        states = [self.state[p] for p in stepped]
        if not all(states):
            self._init_group(group, [], [], [], [], [], [])
        first, second = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        largest = [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else []
        return [first, second, largest], [state["step"] for state in states]

    def _rule(self, group: dict[str, Any]) -> Rule:
        beta1, beta2 = group["betas"]
        return Rule(
            adam=True,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            maximize=group["maximize"],
        )
