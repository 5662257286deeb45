"""SGD with CPR in place of weight decay."""

from __future__ import annotations

from torch import Tensor

from nnunet_cpr.bounds import Bound, KappaWS
from nnunet_cpr.optimizers._cpr import CPROptimizer
from nnunet_cpr.optimizers._groups import build_groups, check_no_weight_decay
from nnunet_cpr.optimizers.sgd import FusedSGD
from nnunet_cpr.param_groups import Params
from nnunet_cpr.regularizers import Regularizer

_GROUP_KEYS = {"momentum", "dampening", "nesterov"}


class SGDCPR(CPROptimizer, FusedSGD):
    """``torch.optim.SGD`` with :class:`~nnunet_cpr.cpr.CPR` in place of weight decay.

    Args:
        params: module, named parameters, parameters or parameter groups. CPR regularizes those that are
            trainable at construction. A group may have its own ``kappa``, ``regularizer``, ``mu`` and
            ``adaptive``. Its ``weight_decay`` decays nothing. It marks groups: if one is positive, CPR
            does not regularize groups with 0. Nor does it regularize groups with ``regularize=False``.
        lr, momentum, nesterov, maximize: as in ``torch.optim.SGD``; the defaults of ``momentum`` and
            ``nesterov`` are those of nnU-Net.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.cpr.CPR`.
        fused: None takes fused steps if the parameters allow. True also makes the step unscale the
            gradients of ``GradScaler``, as in torch.
        weight_decay: argument of other optimizers; must be 0, since CPR replaces it.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.cpr.CPR`.

    Raises:
        TypeError: a weight decay, or a parameter group with an unknown key.
        TypeError, ValueError: as :class:`~nnunet_cpr.cpr.CPR` and ``torch.optim.SGD`` do.

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
        check_no_weight_decay(type(self).__name__, weight_decay)
        given = {"kappa": kappa, "regularizer": regularizer, "mu": mu, "adaptive": adaptive}
        cpr, groups, settings = build_groups(params, given, torch_keys=_GROUP_KEYS)
        super().__init__(
            groups,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            maximize=maximize,
            fused=fused,
        )
        self._attach(cpr, settings)
        self._rebind_parameters()
