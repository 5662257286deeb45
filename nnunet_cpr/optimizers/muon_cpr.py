"""Muon with CPR in place of weight decay."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import Tensor, nn

from nnunet_cpr.cpr.bounds import Bound, KappaWS
from nnunet_cpr.cpr.parameters import Params, param_groups
from nnunet_cpr.cpr.regularizers import Regularizer
from nnunet_cpr.optimizers._groups import cpr_and_groups
from nnunet_cpr.optimizers.muon import DEFAULT_LR, DEFAULT_MOMENTUM, Muon
from nnunet_cpr.optimizers.muon_rules import ADAMW_KINDS, assign_rules, check_kinds
from nnunet_cpr.optimizers.newton_schulz import Coefficients


class MuonCPR(Muon):
    """:class:`~nnunet_cpr.optimizers.Muon` with :class:`~nnunet_cpr.CPR` in place of weight decay.

    CPR regularizes the matrices of both rules.

    Args:
        params: as in :class:`~nnunet_cpr.optimizers.SGDCPR`. A group may have its own ``use_muon`` and
            ``adamw_for``.
        lr, momentum, nesterov, betas, eps: as in :class:`~nnunet_cpr.optimizers.Muon`.
        adjust_lr, ns_steps, ns_coefficients, ns_dtype, adamw_for, model: as there.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.CPR`.
        weight_decay: as in :class:`~nnunet_cpr.optimizers.SGDCPR`.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.CPR`.

    Raises:
        TypeError: a weight decay, or a parameter group with an unknown key.
        TypeError, ValueError: as :class:`~nnunet_cpr.CPR` and ``Muon`` do.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        >>> MuonCPR(model, lr=3e-3, kappa="ws1000").cpr
        CPR(3 matrices, kappa=KappaWS(steps=1000), regularizer=l2, mu=1.0, adaptive=False)
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = DEFAULT_LR,
        momentum: float = DEFAULT_MOMENTUM,
        nesterov: bool = False,
        *,
        kappa: Bound | str = KappaWS(1000),
        regularizer: str | Regularizer = "l2",
        mu: float = 1.0,
        adaptive: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-7,
        adjust_lr: str = "match_rms_adamw",
        ns_steps: int = 5,
        ns_coefficients: Coefficients = "quintic",
        ns_dtype: str = "float32",
        adamw_for: Sequence[str] = ADAMW_KINDS,
        model: nn.Module | None = None,
        weight_decay: float = 0,
    ) -> None:
        known = set(inspect.signature(Muon).parameters) - {"model"} | {"use_muon"}
        given = {"kappa": kappa, "regularizer": regularizer, "mu": mu, "adaptive": adaptive}
        if isinstance(params, nn.Module):
            model = params
        else:
            params = param_groups(params)
        self.cpr, groups = cpr_and_groups("MuonCPR", params, given, weight_decay, known)
        assign_rules(groups, self.cpr.parameters, model, check_kinds(adamw_for))
        super().__init__(
            groups,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            betas=betas,
            eps=eps,
            adjust_lr=adjust_lr,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            ns_dtype=ns_dtype,
            adamw_for=adamw_for,
        )
        self.cpr.attach(self)
