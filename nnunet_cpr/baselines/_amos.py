"""AMOS (Tian and Parikh, 2022), an optimizer with built-in decay, from ``pytorch-optimizer``."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from nnunet_cpr.baselines._decays import DecoupledDecay
from nnunet_cpr.cpr.parameters import Params, param_groups
from nnunet_cpr.cpr.saved_state import order_by_names


def amos(params: Params, lr: float = 1e-3, weight_decay: float = 0.0) -> Optimizer:
    """Return AMOS with an additional weight decay on the matrices that CPR would regularize.

    The additional decay is an attached :class:`DecoupledDecay`. AMOS's own ``extra_l2`` is not used: in
    pytorch-optimizer (seen in 4.1.0) it has the wrong sign and increases the weights.

    Args:
        params: as in :class:`~nnunet_cpr.CPR`; parameters that are not regularized have no
            additional decay.
        lr: learning rate of the parameter groups without their own.
        weight_decay: coefficient of the additional decay, multiplied by the learning rate of each step.

    Raises:
        ImportError: ``pytorch-optimizer`` is not installed.
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.CPR`, or ``weight_decay`` is
            negative or not finite.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = amos(model, lr=1e-3, weight_decay=1e-2)  # doctest: +SKIP
    """
    try:
        from pytorch_optimizer import Amos
    except ImportError as error:
        message = "AMOS requires pytorch-optimizer; run: pip install 'nnunet-cpr[baselines]'"
        raise ImportError(message) from error
    groups = param_groups(params)
    optimizer = Amos([_for_amos(group, groups.has_names) for group in groups], lr=lr)
    if weight_decay:
        return DecoupledDecay(groups, weight_decay).attach(optimizer)
    optimizer.register_load_state_dict_pre_hook(_order_by_names)
    return optimizer


def _for_amos(group: dict[str, Any], has_names: bool) -> dict[str, Any]:
    """Return a parameter group without the keys that only this package reads."""
    settings = {key: v for key, v in group.items() if key not in ("regularize", "weight_decay")}
    return {**settings, "params": group["params"] if has_names else [p for _, p in group["params"]]}


def _order_by_names(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"] = order_by_names(optimizer.param_groups, state_dict["param_groups"])
