"""The comparison methods: decoupled weight decays, and fixed norms."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnunet_cpr._validation import list_names
from nnunet_cpr.baselines._base import Baseline, total_norm
from nnunet_cpr.baselines._normalized import matrices_before_normalization
from nnunet_cpr.param_groups import Params, unwrap
from nnunet_cpr.regularizers import L2

Sums = Callable[[], Tensor]


@dataclass(eq=False, repr=False)
class DecoupledDecay(Baseline):
    """Weight decay of AdamW for any optimizer: theta <- (1 - lr * weight_decay) theta.

    Described by Loshchilov and Hutter (2019).

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or ``weight_decay`` is
            negative or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = DecoupledDecay(model, weight_decay=1e-2).attach(optimizer)
    """

    weight_decay: float = 1e-2

    has_decay = True

    def _coefficients(self, sums_of_squares: Sums, taken: Tensor) -> float | Tensor:
        """Return the coefficient of this step, one for all matrices or for each.

        Args:
            sums_of_squares: as in :meth:`update_decay`.
            taken: 1 if the step is taken, 0 if it is skipped.
        """
        return self.weight_decay

    def update_decay(self, sums_of_squares: Sums, found_inf: Tensor | None = None) -> Tensor:
        taken = self._taken(found_inf)
        decay = self._rates() * self._coefficients(sums_of_squares, taken) * taken
        self._state["step"] += taken
        return decay

    def _decays(self, found_inf: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Update the state; return each matrix with a gradient, and its decay."""
        decay = self.update_decay(lambda: L2().sums(self.parameters)[0], found_inf)
        return [(p, decay[j]) for j, p in enumerate(self.parameters) if p.grad is not None]

    def _around_step(self, found_inf: Tensor | None) -> Iterator[None]:
        for p, decay in self._decays(found_inf):
            # As a difference, since 1 - decay loses digits of a small decay in half precision.
            p.addcmul_(p, decay.to(p), value=-1)
        yield


@dataclass(eq=False, repr=False)
class CosineDecay(DecoupledDecay):
    """Weight decay with a cosine schedule from ``weight_decay`` to ``final`` times that.

    The paper (appendix on CIFAR-100) compares schedules that decrease to 0.1 and 0.01 times and increase
    to 10 and 100 times the initial value, after Caron et al. (2021).

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: initial coefficient.
        final: final coefficient as a multiple of the initial one.
        steps: optimizer steps of the whole training; later steps keep the final value.

    Raises:
        TypeError, ValueError: as :class:`DecoupledDecay`, or ``final`` or ``steps`` is not positive.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = CosineDecay(model, weight_decay=1e-2, final=0.1, steps=1000).attach(optimizer)
    """

    final: float = 0.1
    steps: int = field(kw_only=True)

    def _coefficients(self, sums_of_squares: Sums, taken: Tensor) -> Tensor:
        done = (self._state["step"].float() / self.steps).clamp(max=1)
        factor = self.final + (1 - self.final) * (1 + torch.cos(math.pi * done)) / 2
        return self.weight_decay * factor


@dataclass(eq=False, repr=False)
class IndependentDecay(DecoupledDecay):
    r"""Weight decay that follows the schedule of the learning rate, but not its size.

    .. math::
        \theta \leftarrow (1 - \mathrm{wd}\, \mathrm{lr} / \mathrm{lr}_{\max})\, \theta

    This is the update of AdamW with the schedule multiplier :math:`\eta_t = \mathrm{lr} /
    \mathrm{lr}_{\max}` apart from the step size (Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2,
    line 12), which optimi implements as ``decouple_lr``. A coefficient of AdamW corresponds to the
    coefficient times the highest learning rate here.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: share of a matrix that a step with the highest learning rate subtracts.
        max_lr: highest learning rate of the training. By default that of each parameter group when this
            method is attached for the first time: its ``max_lr`` or ``initial_lr``, which schedulers of
            torch set, else its ``lr``.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or a setting is negative or
            not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = IndependentDecay(model, weight_decay=1e-5).attach(optimizer)
    """

    weight_decay: float = 1e-5
    max_lr: float | None = None

    _matrix_state = ("max_lr",)

    def attach(self, optimizer: Optimizer) -> Optimizer:
        super().attach(optimizer)
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        groups = [group_of[id(p)] for p in self.parameters]
        highest = [self.max_lr or g.get("max_lr", g.get("initial_lr", g["lr"])) for g in groups]
        known = self._state["max_lr"]  # not 0 if the method was attached before
        self._state["max_lr"] = torch.where(known > 0, known, known.new_tensor(highest))
        if not self._state["max_lr"].all():
            self.detach()
            raise ValueError("max_lr: expected the highest learning rate, got lr=0; give max_lr")
        return optimizer

    def _rates(self) -> Tensor:
        return super()._rates() / self._state["max_lr"]


class CorrectedDecay(IndependentDecay):
    r"""Decoupled weight decay, proportional to the square of the learning rate for normalized matrices.

    A matrix that is followed by a normalization decays by

    .. math::
        \theta \leftarrow (1 - \mathrm{lr}\, \mathrm{wd}\, \mathrm{lr} / \mathrm{lr}_{\max})\, \theta

    and every other one as in :class:`DecoupledDecay` (Defazio, arXiv 2506.02285: AdamC and SGDC). The
    ratio of the norms of gradient and weights then does not depend on the schedule. The formula is
    that of timm's ``corrected_weight_decay``, which applies it to all parameters.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`; a module unless ``normalized`` is given.
        weight_decay: coefficient, multiplied by the learning rate of each step.
        max_lr: as in :class:`IndependentDecay`.
        normalized: names of the matrices that are followed by a normalization. By default they are found
            in the graph of the module, see :func:`matrices_before_normalization`. The paper counts all
            matrices but the output layer's.

    Attributes:
        normalized: names of the matrices that are followed by a normalization.

    Raises:
        TypeError, ValueError: as :class:`IndependentDecay`, or ``normalized`` has a name that is not
            that of a regularized matrix, or is not given without a module.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> decay = CorrectedDecay(model, weight_decay=1e-4)
        >>> optimizer = decay.attach(optimizer)
        >>> decay.normalized
        ['0.weight']
    """

    def __init__(
        self,
        params: Params,
        weight_decay: float = 1e-2,
        max_lr: float | None = None,
        normalized: Iterable[str] | None = None,
    ) -> None:
        super().__init__(params, weight_decay, max_lr)
        if normalized is None:
            if not isinstance(params, nn.Module):
                raise ValueError("normalized: expected names of matrices, got None; or give a module")
            found = matrices_before_normalization(unwrap(params))
            normalized = [name for name, p in zip(self.names, self.parameters) if id(p) in found]
        chosen = set(normalized)
        unknown = sorted(chosen - set(self.names))
        if unknown:
            raise ValueError(f"normalized: expected names of matrices, got {list_names(unknown)}")
        if self.names and not chosen:
            warnings.warn("no normalized matrix: this decays like DecoupledDecay", stacklevel=2)
        self.normalized = [name for name in self.names if name in chosen]
        self._is_normalized = [name in chosen for name in self.names]

    def _config(self) -> dict[str, Any]:
        return {**super()._config(), "normalized": self._is_normalized}

    def _rates(self) -> Tensor:
        lr, share = DecoupledDecay._rates(self), super()._rates()
        is_normalized = self._constant("is_normalized", self._is_normalized, torch.bool)
        return torch.where(is_normalized, lr * share, lr)


class AdaptiveWeightDecay(DecoupledDecay):
    r"""Weight decay in proportion to the norm of the gradient.

    The coefficient follows the ratio of two norms over all regularized matrices (Ghiasi et al., arXiv
    2210.00094):

    .. math::
        \bar\lambda &\leftarrow 0.1\, \bar\lambda + 0.9\, \mathrm{wd}\, \|g\|\, /\, \|\theta\| \\
        \theta &\leftarrow (1 - \mathrm{lr}\, \bar\lambda)\, \theta

    A step in which the ratio is not finite changes neither the coefficient nor the parameters.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: ratio between the norms of the decay and the gradient, the paper's lambda_awd.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or ``weight_decay`` is
            negative or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = AdaptiveWeightDecay(model, weight_decay=1e-2).attach(optimizer)
    """

    _scalar_state = ("coefficient",)

    def _coefficients(self, sums_of_squares: Sums, taken: Tensor) -> Tensor:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        has_grad = self._constant("has_grad", [p.grad is not None for p in self.parameters], torch.bool)
        norm = torch.where(has_grad, sums_of_squares(), 0).sum().sqrt().float()
        ratio = total_norm(gradients) / norm  # NaN without any gradient
        scale = getattr(self._optimizer, "grad_scale", None)  # GradScaler leaves it to fused optimizers
        if scale is not None:
            ratio = ratio / scale.to(ratio)
        present = self._state["coefficient"]
        proposed = 0.1 * present + 0.9 * self.weight_decay * ratio
        is_used = proposed.isfinite() & (taken == 1)
        torch.where(is_used, proposed, present, out=present)
        return torch.where(is_used, proposed, 0)


@dataclass(eq=False, repr=False)
class WeightNormControl(DecoupledDecay):
    r"""Decoupled decay of each matrix towards a norm r instead of towards zero (AdamWN).

    .. math::
        \theta \leftarrow \theta - \mathrm{lr}\, \mathrm{wd}\, (1 - r / \|\theta\|)\, \theta

    With r = 0 this is decoupled weight decay, Eq. (2) of the paper (Loshchilov, arXiv 2311.11446), which
    its section 2 generalizes. A matrix below the norm grows. Each matrix has its own r here, as in CPR
    with Kappa-WS. The paper was read up to Eq. (2); the target r follows its abstract.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.
        factor: r as a multiple of the norm at step ``start``.
        start: number of optimizer steps after which the norm sets r; 0 for the initial norm. Before it,
            and while a norm is 0 or not finite, a matrix is not changed.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or a setting is out of
            range.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = WeightNormControl(model, weight_decay=1e-2, start=100).attach(optimizer)
    """

    factor: float = 1.0
    start: int = 0

    _matrix_state = ("target",)

    def _coefficients(self, sums_of_squares: Sums, taken: Tensor) -> Tensor:
        target = self._state["target"]
        norm = sums_of_squares().sqrt().float()
        has_norm = norm.isfinite() & (norm > 0) & (taken == 1)
        is_set = has_norm & (target == 0) & (self._state["step"] >= self.start)
        torch.where(is_set, self.factor * norm, target, out=target)
        return self.weight_decay * torch.where(has_norm & (target > 0), 1 - target / norm, 0)


@dataclass(eq=False, repr=False)
class AdaDecay(DecoupledDecay):
    r"""Weight decay that is stronger for elements with larger gradients.

    In each matrix the absolute gradients are standardized and passed through a sigmoid (Nakamura and
    Hong, arXiv 1907.08931, section on the adaptive rate); an average element has the rate 1:

    .. math::
        \theta &\leftarrow (1 - \mathrm{lr}\, \mathrm{wd}\, s)\, \theta \\
        s &= 2\, /\, (1 + \exp(-\alpha\, (|g| - \mathrm{mean}\,|g|)\, /\, \mathrm{std}\,|g|))

    A matrix with gradients that are not finite is not changed in that step.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.
        alpha: steepness of the sigmoid; 0 gives decoupled weight decay. CPR's authors compare 1, 2, 4
            and 8.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or a setting is negative
            or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = AdaDecay(model, weight_decay=1e-2, alpha=4.0).attach(optimizer)
    """

    alpha: float = 4.0

    has_decay = False

    def _around_step(self, found_inf: Tensor | None) -> Iterator[None]:
        for p, decay in self._decays(found_inf):
            assert p.grad is not None
            absolute = p.grad.abs().to(torch.promote_types(p.grad.dtype, torch.float32))
            std, mean = torch.std_mean(absolute, correction=0)
            # Equal gradients have the rate 1 and not NaN.
            standard = (absolute - mean) / torch.where(std > 0, std, 1)
            rate = 2 * torch.sigmoid(self.alpha * standard)
            rate = torch.where(std.isfinite(), rate, 0)
            p.addcmul_(p, (decay.to(rate) * rate).to(p), value=-1)
        yield


class CautiousDecay(DecoupledDecay):
    r"""Decoupled weight decay of the elements that the optimizer moves towards zero, or not at all.

    With the optimizer's update u, so that the optimizer alone gives theta - lr u (Chen et al., arXiv
    2510.12402, Algorithm 1):

    .. math::
        \theta \leftarrow \theta - \mathrm{lr}\, (u + \mathrm{wd}\, [u \theta \ge 0]\, \theta)

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or ``weight_decay`` is
            negative or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = CautiousDecay(model, weight_decay=1e-2).attach(optimizer)
    """

    has_decay = False

    def _around_step(self, found_inf: Tensor | None) -> Iterator[None]:
        before = [(p, p.clone(), decay) for p, decay in self._decays(found_inf)]
        yield
        for p, old, decay in before:
            # By comparison, since a difference or a product of small numbers may round to 0.
            agrees = torch.where(old >= 0, p <= old, p >= old)
            p.addcmul_(old, agrees * decay.to(p), value=-1)


@dataclass(eq=False, repr=False)
class NormRescaling(Baseline):
    """Rescaling of all regularized matrices to a constant total norm (Liu et al., Omnigrok, ICLR 2023).

    After every step all matrices, also those without a gradient, are multiplied by one number, which
    restores ``factor`` times the norm before the first step. If a norm is 0 or not finite, they are not
    changed.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        factor: norm as a multiple of the initial one. CPR's authors compare 0.8 to 16.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or ``factor`` is not
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
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        factor: R as a multiple of the initial norm of the matrix.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or ``factor`` is not
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
