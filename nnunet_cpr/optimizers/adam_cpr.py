"""Adam with CPR in place of weight decay."""

from __future__ import annotations

from torch import Tensor

from nnunet_cpr.bounds import Bound, KappaWS
from nnunet_cpr.optimizers._cpr import CPROptimizer
from nnunet_cpr.optimizers._groups import build_groups, check_no_weight_decay
from nnunet_cpr.optimizers.adam import FusedAdam
from nnunet_cpr.param_groups import Params
from nnunet_cpr.regularizers import Regularizer

_GROUP_KEYS = {"betas", "eps", "amsgrad", "capturable", "decoupled_weight_decay"}


class AdamCPR(CPROptimizer, FusedAdam):
    """``torch.optim.Adam`` with :class:`~nnunet_cpr.cpr.CPR` in place of weight decay.

    Args:
        params: as in :class:`~nnunet_cpr.optimizers.SGDCPR`.
        lr, betas, eps, amsgrad, maximize, capturable: as in ``torch.optim.Adam``.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.cpr.CPR`.
        fused, weight_decay: as in :class:`~nnunet_cpr.optimizers.SGDCPR`.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.cpr.CPR`.

    Raises:
        TypeError: a weight decay, or a parameter group with an unknown key.
        TypeError, ValueError: as :class:`~nnunet_cpr.cpr.CPR` and ``torch.optim.Adam`` do.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> groups = [{"params": [model.weight], "kappa": "k0p1", "mu": 5.0}, {"params": [model.bias]}]
        >>> AdamCPR(groups, lr=1e-3).cpr
        CPR(1 matrices, kappa=KappaK(value=0.1), regularizer=l2, mu=5.0, adaptive=False)
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
        check_no_weight_decay(type(self).__name__, weight_decay)
        given = {"kappa": kappa, "regularizer": regularizer, "mu": mu, "adaptive": adaptive}
        cpr, groups, settings = build_groups(params, given, torch_keys=_GROUP_KEYS)
        super().__init__(
            groups,
            lr=lr,
            betas=betas,
            eps=eps,
            amsgrad=amsgrad,
            maximize=maximize,
            capturable=capturable,
            fused=fused,
        )
        self._attach(cpr, settings)
        self._rebind_parameters()
