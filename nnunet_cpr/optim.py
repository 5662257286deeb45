"""SGD and Adam with CPR in place of weight decay."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from nnunet_cpr.bounds import Bound, KappaWS
from nnunet_cpr.cpr import CPR
from nnunet_cpr.selection import Params, param_groups


class _WithCPR(torch.optim.Optimizer):
    """What the two optimizers share: they build their CPR from their own parameters."""

    cpr: CPR

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch does while the optimizer is built; later it is refused.

        Raises:
            RuntimeError: CPR has been set up for the parameters there were.
        """
        if hasattr(self, "cpr"):
            raise RuntimeError(
                f"{type(self).__name__} takes no parameters later, since its bounds and multipliers "
                "belong to those it was built with; build it with all parameters"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        # torch's own __getstate__ drops hooks: a copy would go on silently without CPR.
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled; build a new one and load this "
            "one's state_dict() into it"
        )


def _torch_groups(params: Params, named: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups for torch, with the weight decay that CPR replaces at 0.

    A module makes one group in its own order, as ``torch.optim.SGD(module.parameters())`` does, so
    that either loads the other's state.
    """
    if isinstance(params, torch.nn.Module):
        return [{"params": list(params.parameters()), "weight_decay": 0}]
    return [
        {
            **{key: value for key, value in group.items() if key != "regularize"},
            "params": [p for _, p in group["params"]],
            "weight_decay": 0,
        }
        for group in named
    ]


def _fused_is_possible(params: Params, groups: list[dict[str, Any]]) -> bool:
    if isinstance(params, torch.nn.Module) and any(
        getattr(module, "sparse", False) for module in params.modules()
    ):
        return False  # sparse gradients of embeddings
    tensors = [p for group in groups for p in group["params"]]
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in tensors)


class SGDCPR(_WithCPR, torch.optim.SGD):
    """``torch.optim.SGD`` with :class:`~nnunet_cpr.cpr.CPR` in place of weight decay.

    Args:
        params: a module, named parameters, parameters or parameter groups. CPR takes those that are
            trainable now. A group's
            ``weight_decay`` serves only to select: 0 beside groups with a positive one leaves the
            group out of CPR. So does ``regularize=False``.
        lr, momentum, nesterov, maximize: as in ``torch.optim.SGD``; the defaults are nnU-Net's.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.cpr.CPR`.
        fused: torch's fused step; None takes it where the parameters allow.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.cpr.CPR`.

    Raises:
        TypeError, ValueError: as :class:`~nnunet_cpr.cpr.CPR` and ``torch.optim.SGD`` do.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        momentum: float = 0.99,
        nesterov: bool = True,
        *,
        kappa: Bound = KappaWS(1000),
        regularizer: str = "l2",
        mu: float = 1.0,
        adaptive: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        named = param_groups(params)
        cpr = CPR(named, kappa=kappa, regularizer=regularizer, mu=mu, adaptive=adaptive)
        groups = _torch_groups(params, named)
        super().__init__(
            groups,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            maximize=maximize,
            fused=_fused_is_possible(params, groups) if fused is None else fused,
        )
        self.cpr = cpr
        cpr.attach(self)


class AdamCPR(_WithCPR, torch.optim.Adam):
    """``torch.optim.Adam`` with :class:`~nnunet_cpr.cpr.CPR` in place of weight decay.

    Args:
        params: as in :class:`SGDCPR`.
        lr, betas, eps, amsgrad, maximize, capturable: as in ``torch.optim.Adam``.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.cpr.CPR`.
        fused: torch's fused step; None takes it where the parameters allow.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.cpr.CPR`.

    Raises:
        TypeError, ValueError: as :class:`~nnunet_cpr.cpr.CPR` and ``torch.optim.Adam`` do.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        amsgrad: bool = False,
        *,
        kappa: Bound = KappaWS(1000),
        regularizer: str = "l2",
        mu: float = 1.0,
        adaptive: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        named = param_groups(params)
        cpr = CPR(named, kappa=kappa, regularizer=regularizer, mu=mu, adaptive=adaptive)
        groups = _torch_groups(params, named)
        super().__init__(
            groups,
            lr=lr,
            betas=betas,
            eps=eps,
            amsgrad=amsgrad,
            maximize=maximize,
            capturable=capturable,
            fused=_fused_is_possible(params, groups) if fused is None else fused,
        )
        self.cpr = cpr
        cpr.attach(self)
