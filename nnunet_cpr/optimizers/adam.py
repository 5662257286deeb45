"""Adam with CPR in place of weight decay, as ``sgd.py`` has SGD."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from nnunet_cpr.cpr.bounds import Bound, KappaWS
from nnunet_cpr.cpr.regularized_parameters import Params
from nnunet_cpr.cpr.regularizers import Regularizer
from nnunet_cpr.optimizers.fused_step import FusedStep
from nnunet_cpr.optimizers.groups import cpr_and_groups

_OPTIONS = inspect.signature(adam).parameters.keys() - {"params", "fused"}
"""Entries of parameter groups that torch's function takes; in 2.6 without ``decoupled_weight_decay``."""


class FusedAdam(FusedStep, torch.optim.Adam):
    """``torch.optim.Adam`` whose fused step applies the attached regularization method.

    With :class:`~nnunet_cpr.baselines.DecoupledDecay` it is AdamW. The method runs before the step with
    ``amsgrad`` and ``maximize``.

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

    def _rule_and_state(
        self, group: dict[str, Any], params: list[Tensor]
    ) -> tuple[str, tuple[float, float, float, float], list[list[Tensor]], list[Tensor]] | None:
        if group["amsgrad"] or group["maximize"] or group["differentiable"] or group["weight_decay"]:
            return None
        if any(isinstance(value, Tensor) and value.is_cuda for value in (group["lr"], *group["betas"])):
            return None
        states = [self.state[p] for p in params]
        if not all(states):
            self._init_group(group, [], [], [], [], [], [])
        first, second, steps = (
            [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        beta1, beta2 = map(float, group["betas"])
        settings = float(group["lr"]), beta1, beta2, float(group["eps"])
        return "adam", settings, [first, second], steps

    def _create_state(self, group: dict[str, Any]) -> None:
        self._init_group(group, [], [], [], [], [], [])

    def _step_group(self, group: dict[str, Any], **options: Any) -> None:
        lists: Any = [[] for _ in range(6)]
        has_complex = self._init_group(group, *lists)
        beta1, beta2 = group["betas"]
        options |= {key: group[key] for key in group.keys() & _OPTIONS}
        options |= {"has_complex": has_complex, "beta1": beta1, "beta2": beta2}
        adam(*lists, **options)


class AdamCPR(FusedAdam):
    """``torch.optim.Adam`` with :class:`~nnunet_cpr.CPR` in place of weight decay.

    Args:
        params: as in :class:`~nnunet_cpr.optimizers.SGDCPR`.
        lr, betas, eps, amsgrad, maximize, capturable: as in ``torch.optim.Adam``.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.CPR`.
        fused, weight_decay: as in :class:`~nnunet_cpr.optimizers.SGDCPR`.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.CPR`.

    Raises:
        TypeError: a weight decay, or a parameter group with an unknown key.
        TypeError, ValueError: as :class:`~nnunet_cpr.CPR` and ``torch.optim.Adam`` do.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> weights = {"params": [model.weight], "kappa": "k0p1", "mu": 5.0}
        >>> AdamCPR([weights, {"params": [model.bias]}], lr=1e-3).cpr
        CPR(1 matrix, kappa=KappaK(value=0.1), regularizer=l2, mu=5.0, adaptive=False)
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        amsgrad: bool = False,
        *,
        kappa: Bound | str = KappaWS(1000),
        regularizer: str | Regularizer = "l2",
        mu: float = 1.0,
        adaptive: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
        weight_decay: float = 0,
    ) -> None:
        given = {"kappa": kappa, "regularizer": regularizer, "mu": mu, "adaptive": adaptive}
        known = set(inspect.signature(torch.optim.Adam).parameters)
        self.cpr, groups = cpr_and_groups("AdamCPR", params, given, weight_decay, known)
        flags = {"amsgrad": amsgrad, "maximize": maximize, "capturable": capturable}
        super().__init__(groups, lr, fused=fused, betas=betas, eps=eps, **flags)
        self.cpr.attach(self)
