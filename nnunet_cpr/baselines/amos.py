"""AMOS (Tian and Parikh, 2022), an optimizer with a decay of its own, from ``pytorch-optimizer``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnunet_cpr.selection import Params, param_groups, regularized

if TYPE_CHECKING:
    from torch.optim import Optimizer


def amos(params: Params, lr: float = 1e-3, weight_decay: float = 0.0) -> Optimizer:
    """AMOS over ``params``, with an additional L2 decay on the matrices that CPR would regularize.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`; parameters that are not regularized are trained
            without the additional decay.
        lr: the global learning rate.
        weight_decay: AMOS's ``extra_l2``.

    Raises:
        ImportError: ``pytorch-optimizer`` is not installed.
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`.
    """
    try:
        from pytorch_optimizer import Amos
    except ImportError as error:
        raise ImportError(
            "AMOS is in the package pytorch-optimizer; run: pip install 'nnunet-cpr[baselines]'"
        ) from error
    matrices = {id(p) for p in regularized(params).values()}
    everything = {id(p): p for group in param_groups(params) for _, p in group["params"]}
    groups = [
        {"params": [p for p in everything.values() if id(p) in matrices], "extra_l2": weight_decay},
        {"params": [p for p in everything.values() if id(p) not in matrices], "extra_l2": 0.0},
    ]
    return Amos([group for group in groups if group["params"]], lr=lr)
