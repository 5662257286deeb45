"""AMOS (Tian and Parikh, 2022), an optimizer with a decay of its own, from ``pytorch-optimizer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nnunet_cpr.baselines._base import checked_number
from nnunet_cpr.baselines.decoupled import DecoupledDecay
from nnunet_cpr.param_groups import Params, param_groups

if TYPE_CHECKING:
    from torch.optim import Optimizer


def amos(params: Params, lr: float = 1e-3, weight_decay: float = 0.0) -> Optimizer:
    """AMOS over ``params``, with an additional decay on the matrices that CPR would regularize.

    The additional decay is an attached :class:`DecoupledDecay`. AMOS's own ``extra_l2`` cannot serve:
    in pytorch-optimizer (seen in 4.1.0) it has the wrong sign, so that weights grow by it.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`; parameters that are not regularized are trained
            without the additional decay.
        lr: the global learning rate, where a parameter group has none of its own.
        weight_decay: of the additional decay, multiplied by the learning rate of each step.

    Raises:
        ImportError: ``pytorch-optimizer`` is not installed.
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or ``weight_decay`` is
            negative or not finite.
    """
    try:
        from pytorch_optimizer import Amos
    except ImportError as error:
        raise ImportError(
            "AMOS is in the package pytorch-optimizer; run: pip install 'nnunet-cpr[baselines]'"
        ) from error
    decay = checked_number("weight_decay", weight_decay, zero=True)
    groups = param_groups(params)
    optimizer = Amos([_for_amos(group) for group in groups], lr=lr)
    return DecoupledDecay(groups, decay).attach(optimizer) if decay else optimizer


def _for_amos(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without names and without what it says to us alone."""
    settings = {key: v for key, v in group.items() if key not in ("regularize", "weight_decay")}
    return {**settings, "params": [p for _, p in group["params"]]}
