"""SGD whose fused step applies the attached regularization method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnunet_cpr.fused import Rule
from nnunet_cpr.optimizers._base import FusedOptimizer


class FusedSGD(FusedOptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` whose fused step applies the attached regularization method.

    Methods with one decay for each matrix, such as :class:`~nnunet_cpr.baselines.DecoupledDecay` and
    ``l2`` CPR, are applied by the kernel of the step; any other method runs before the step. Groups with
    weight decay, on parameters that the method does not regularize, are not fused.

    Args:
        params: module, named parameters, parameters or parameter groups.
        lr, options: as in ``torch.optim.SGD``.
        fused: None takes fused steps if the parameters allow. True also makes the step unscale the
            gradients of ``GradScaler``, as in torch.

    Raises:
        TypeError, ValueError: as ``torch.optim.SGD`` does.

    Example:
        >>> from nnunet_cpr.baselines import DecoupledDecay
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = FusedSGD(model, lr=0.1, momentum=0.9)
        >>> optimizer = DecoupledDecay(model, weight_decay=1e-4).attach(optimizer)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    _torch_class: type[torch.optim.Optimizer] = torch.optim.SGD
    _takes_sparse = True

    def _supports_fused(self, group: dict[str, Any]) -> bool:
        return group["dampening"] == 0 and not group["differentiable"]

    def _state_tensors(
        self, group: dict[str, Any], stepped: list[Tensor]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        if group["momentum"] == 0:
            return [[]], []
        # torch's fused step creates the momentum of all parameters or of none: it fails for a parameter
        # that gets its first gradient later, or if GradScaler skips the first step. Starting from 0, the
        # first step sets the momentum to the gradient, as in torch.
        states = [self.state[p] for p in stepped]
        momentum: list[Any] = [state.get("momentum_buffer") for state in states]
        for i in [i for i, value in enumerate(momentum) if value is None]:
            momentum[i] = states[i]["momentum_buffer"] = torch.zeros_like(stepped[i])
        return [momentum], []

    def _rule(self, group: dict[str, Any]) -> Rule:
        return Rule(
            adam=False,
            lr=group["lr"],
            beta1=group["momentum"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
