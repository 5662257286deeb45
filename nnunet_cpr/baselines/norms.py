"""Comparison methods that lead matrices to norms, or keep their norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nnunet_cpr.baselines.base import Baseline, total_norm
from nnunet_cpr.baselines.decays import DecoupledDecay
from nnunet_cpr.cpr.regularizers import L2


@dataclass(eq=False, repr=False)
class WeightNormControl(DecoupledDecay):
    r"""Decoupled decay of each matrix towards a norm r instead of towards zero (AdamWN).

    .. math::
        \theta \leftarrow \theta - \mathrm{lr}\, \mathrm{wd}\, (1 - r / \|\theta\|)\, \theta

    With r = 0 this is decoupled weight decay, Eq. (2) of the paper (Loshchilov, arXiv 2311.11446), which
    its section 2 generalizes. A matrix below the norm grows. Each matrix has its own r here, as in CPR
    with Kappa-WS. The paper was read up to Eq. (2); the target r follows its abstract.

    Args:
        params: as in :class:`~nnunet_cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.
        factor: r as a multiple of the norm at step ``start``.
        start: number of optimizer steps after which the norm sets r; 0 for the initial norm. Before it,
            and while a norm is 0 or not finite, a matrix is not changed.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.CPR`, or a setting is out of
            range.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> control = WeightNormControl(model, weight_decay=1e-2, start=100)
        >>> optimizer = control.attach(optimizer)
    """

    factor: float = 1.0
    start: int = 0

    _matrix_state = ("target",)

    def _coefficients(self, taken: Tensor) -> Tensor:
        target = self._state["target"]
        norm = L2().sums(self.parameters)[0].sqrt().float()
        has_norm = norm.isfinite() & (norm > 0) & (taken == 1)
        is_set = has_norm & (target == 0) & (self._state["step"] >= self.start)
        torch.where(is_set, self.factor * norm, target, out=target)
        return self.weight_decay * torch.where(has_norm & (target > 0), 1 - target / norm, 0)


@dataclass(eq=False, repr=False)
class NormRescaling(Baseline):
    """Rescaling of all regularized matrices to a constant total norm (Liu et al., Omnigrok, ICLR 2023).

    After every step all matrices, also those without a gradient, are multiplied by one number, which
    restores ``factor`` times the norm before the first step. If a norm is 0 or not finite, they are not
    changed.

    Args:
        params: as in :class:`~nnunet_cpr.CPR`.
        factor: norm as a multiple of the initial one. CPR's authors compare 0.8 to 16.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.CPR`, or ``factor`` is not
            positive and finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = NormRescaling(model, factor=0.8).attach(optimizer)
    """

    factor: float = 1.0

    _scalar_state = ("initial_norm",)

    def _around_step(self, found_inf: Tensor | None) -> Iterator[None]:
        step, initial = self._state["step"], self._state["initial_norm"]
        taken, norm = self._taken(found_inf), total_norm(self.parameters)
        is_first = (step == 0) & (taken == 1) & norm.isfinite()
        torch.where(is_first, norm, initial, out=initial)
        step += taken
        yield
        factor = self.factor * initial / total_norm(self.parameters)
        # The factor is 0 if the present norm is infinite or the initial one is 0.
        is_used = (factor > 0) & factor.isfinite() & (taken == 1)
        for p in self.parameters:
            p.copy_(torch.where(is_used, p.addcmul(p, (1 - factor).to(p), value=-1), p))


@dataclass(eq=False, repr=False)
class Hyperball(Baseline):
    r"""Fixed norm of each matrix, and of its update relative to the learning rate.

    With the optimizer's update u, N(x) = x / norm(x), and the radius R of a matrix (Wen et al., arXiv
    2606.16899; also in NVIDIA's Emerging Optimizers, ``muon_hyperball``):

    .. math::
        \theta \leftarrow R\, N(\theta - \mathrm{lr}\, R\, N(u))

    The learning rate is thus the length of a step relative to the norm of the matrix. Where a norm is 0
    or not finite, the result of the optimizer is kept; a matrix of zeros gets its radius once it has a
    norm.

    Args:
        params: as in :class:`~nnunet_cpr.CPR`.
        factor: R as a multiple of the initial norm of the matrix.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.CPR`, or ``factor`` is not
            positive and finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        >>> optimizer = Hyperball(model).attach(optimizer)
    """

    factor: float = 1.0

    _matrix_state = ("radius",)

    def _around_step(self, found_inf: Tensor | None) -> Iterator[None]:
        taken, radius = self._taken(found_inf), self._state["radius"]
        norm = L2().sums(self.parameters)[0].sqrt().float()
        is_set = (radius == 0) & norm.isfinite() & (taken == 1)
        torch.where(is_set, self.factor * norm, radius, out=radius)
        self._state["step"] += taken
        # A skipped step has radii of 0, with which the result of the optimizer is kept.
        rates, radii = self._rates(), radius * taken
        before = [(j, p, p.clone()) for j, p in enumerate(self.parameters) if p.grad is not None]
        yield
        for j, p, old in before:
            lr, radius = rates[j].to(p.device), radii[j].to(p.device)
            old = old.to(torch.promote_types(p.dtype, torch.float32))
            update = old - p
            moved = old.addcmul(update, (lr * radius / total_norm([update])).to(update), value=-1)
            scale = radius / total_norm([moved])  # NaN without an update
            is_used = (scale > 0) & scale.isfinite()
            p.copy_(torch.where(is_used, moved.mul_(scale.to(moved)), p))
