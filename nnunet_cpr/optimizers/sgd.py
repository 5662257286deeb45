"""SGD with CPR in place of weight decay.

The update is torch's function, or the kernel of ``kernels.py``. ``FusedSGD`` says which of its settings
the kernel has, and creates the momentum that torch's fused step would lack; ``SGDCPR`` attaches CPR.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from nnunet_cpr.cpr.bounds import Bound, KappaWS
from nnunet_cpr.cpr.regularized_parameters import Params
from nnunet_cpr.cpr.regularizers import Regularizer
from nnunet_cpr.optimizers.fused_step import FusedStep
from nnunet_cpr.optimizers.groups import cpr_and_groups

_OPTIONS = inspect.signature(sgd).parameters.keys() - {"params", "fused"}
"""Entries of parameter groups that torch's function takes."""


class FusedSGD(FusedStep, torch.optim.SGD):
    """``torch.optim.SGD`` whose fused step applies the attached regularization method.

    Methods with one decay for each matrix, such as :class:`~nnunet_cpr.baselines.DecoupledDecay` and
    ``l2`` CPR, are applied by the kernel of the step. Unfused, with the method before torch's step, are
    other methods, momentum 0, dampening, ``maximize``, and weight decay of other parameters.

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

    def _rule_and_state(
        self, group: dict[str, Any], params: list[Tensor]
    ) -> tuple[str, tuple[float, float, float, float], list[list[Tensor]], list[Tensor]] | None:
        if group["dampening"] or group["maximize"] or group["differentiable"] or group["weight_decay"]:
            return None
        if group["momentum"] == 0 or (isinstance(group["lr"], Tensor) and group["lr"].is_cuda):
            return None
        # torch's fused step creates the momentum of all parameters or of none: it fails for a parameter
        # that gets its first gradient later. Starting from 0, the first step sets the momentum to the
        # gradient, as in torch.
        states = [self.state[p] for p in params]
        for p, state in zip(params, states):
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(p)
        rule = "nesterov" if group["nesterov"] else "momentum"
        settings = float(group["lr"]), float(group["momentum"]), 0.0, 0.0
        return rule, settings, [[state["momentum_buffer"] for state in states]], []

    def _create_state(self, group: dict[str, Any]) -> None:
        if group["momentum"] == 0 or group["dampening"]:  # by which torch's first step does not multiply
            return
        for p in group["params"]:
            if p.grad is not None and self.state[p].get("momentum_buffer") is None:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    def _step_group(self, group: dict[str, Any], **options: Any) -> None:
        params, grads, buffers = list[Tensor](), list[Tensor](), list[Tensor | None]()
        has_sparse_grad = self._init_group(group, params, grads, buffers)
        options |= {key: group[key] for key in group.keys() & _OPTIONS}
        sgd(params, grads, buffers, has_sparse_grad=has_sparse_grad, **options)
        if group["momentum"] != 0:
            for p, buffer in zip(params, buffers):
                self.state[p]["momentum_buffer"] = buffer


class SGDCPR(FusedSGD):
    """``torch.optim.SGD`` with :class:`~nnunet_cpr.CPR` in place of weight decay.

    Args:
        params: module, named parameters, parameters or parameter groups. CPR regularizes those that are
            trainable at construction. A group may have its own ``kappa``, ``regularizer``, ``mu`` and
            ``adaptive``. Its ``weight_decay`` decays nothing. It marks groups: if one is positive, CPR
            does not regularize groups with 0. Nor does it regularize groups with ``regularize=False``.
        lr, momentum, nesterov, maximize: as in ``torch.optim.SGD``; the defaults of ``momentum`` and
            ``nesterov`` are those of nnU-Net.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.CPR`.
        fused: None takes fused steps if the parameters allow. True also makes the step unscale the
            gradients of ``GradScaler``, as in torch.
        weight_decay: argument of other optimizers; must be 0, since CPR replaces it.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.CPR`.

    Raises:
        TypeError: a weight decay, or a parameter group with an unknown key.
        TypeError, ValueError: as :class:`~nnunet_cpr.CPR` and ``torch.optim.SGD`` do.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = SGDCPR(model, lr=0.1, kappa="ws2")
        >>> for _ in range(3):
        ...     model(torch.ones(1, 4)).sum().backward()
        ...     optimizer.step()
        >>> optimizer.cpr.metrics()["bounded"]
        1.0
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.99,
        nesterov: bool = True,
        *,
        kappa: Bound | str = KappaWS(1000),
        regularizer: str | Regularizer = "l2",
        mu: float = 1.0,
        adaptive: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
        weight_decay: float = 0,
    ) -> None:
        given = {"kappa": kappa, "regularizer": regularizer, "mu": mu, "adaptive": adaptive}
        known = set(inspect.signature(torch.optim.SGD).parameters)
        self.cpr, groups = cpr_and_groups("SGDCPR", params, given, weight_decay, known)
        super().__init__(
            groups, lr=lr, momentum=momentum, nesterov=nesterov, maximize=maximize, fused=fused
        )
        self.cpr.attach(self)
