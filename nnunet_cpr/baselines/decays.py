"""Comparison methods that are weight decays.

The first decay each matrix as a whole, on a schedule of their own; the next depend on gradients or on
the optimizer's update; AMOS is an optimizer with a decay of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnunet_cpr.baselines.base import Baseline, total_norm
from nnunet_cpr.baselines.normalized import matrices_before_normalization
from nnunet_cpr.cpr.multipliers import Decays
from nnunet_cpr.cpr.regularized_parameters import Params, param_groups, unwrap
from nnunet_cpr.cpr.regularizers import L2, clamp_to_finite, subtract_share_
from nnunet_cpr.cpr.saved_state import order_by_names
from nnunet_cpr.refusals import list_names


@dataclass(eq=False, repr=False)
class DecoupledDecay(Baseline):
    """Weight decay of AdamW for any optimizer: theta <- (1 - lr * weight_decay) theta.

    Described by Loshchilov and Hutter (2019).

    Args:
        params: as in :class:`~nnunet_cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.CPR`, or ``weight_decay`` is
            negative or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = DecoupledDecay(model, weight_decay=1e-2).attach(optimizer)
    """

    weight_decay: float = 1e-2

    has_decay = True

    def _coefficients(self, taken: Tensor) -> float | Tensor:
        """Return the coefficient of this step, one for all matrices or for each.

        Args:
            taken: 1 if the step is taken, 0 if it is skipped.
        """
        return self.weight_decay

    def _shares(self, found_inf: Tensor | None) -> Tensor:
        """Update the state; return the share of each matrix to subtract, float32 ``[J]``."""
        taken = self._taken(found_inf)
        shares = self._rates() * self._coefficients(taken) * taken
        self._state["step"] += taken
        return shares

    def decays(self) -> Decays:
        return Decays.given(self._shares(None).numpy())

    def _decaying(self, found_inf: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Update the state; return each matrix with a gradient, and its share."""
        shares = self._shares(found_inf)
        return [(p, shares[j]) for j, p in enumerate(self.parameters) if p.grad is not None]

    def _around_step(self, found_inf: Tensor | None) -> Iterator[None]:
        if decaying := self._decaying(found_inf):
            matrices, shares = zip(*decaying)
            subtract_share_(matrices, torch.stack(shares))
        yield


@dataclass(eq=False, repr=False)
class CosineDecay(DecoupledDecay):
    """Weight decay with a cosine schedule from ``weight_decay`` to ``final`` times that.

    The paper (appendix on CIFAR-100) compares schedules that decrease to 0.1 and 0.01 times and increase
    to 10 and 100 times the initial value, after Caron et al. (2021).

    Args:
        params: as in :class:`~nnunet_cpr.CPR`.
        weight_decay: initial coefficient.
        final: final coefficient as a multiple of the initial one.
        steps: optimizer steps of the whole training; later steps keep the final value.

    Raises:
        TypeError, ValueError: as :class:`DecoupledDecay`, or ``final`` or ``steps`` is not positive.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> decay = CosineDecay(model, weight_decay=1e-2, final=0.1, steps=1000)
        >>> optimizer = decay.attach(optimizer)
    """

    final: float = 0.1
    steps: int = field(kw_only=True)

    def _coefficients(self, taken: Tensor) -> Tensor:
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
        params: as in :class:`~nnunet_cpr.CPR`.
        weight_decay: share of a matrix that a step with the highest learning rate subtracts.
        max_lr: highest learning rate of the training. By default that of each parameter group when this
            method is attached for the first time: its ``max_lr`` or ``initial_lr``, which schedulers of
            torch set, else its ``lr``.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.CPR`, or a setting is negative or
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
        params: as in :class:`~nnunet_cpr.CPR`; a module unless ``normalized`` is given.
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
        >>> first, last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)
        >>> model = nn.Sequential(first, nn.BatchNorm2d(8), last)
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
        params: as in :class:`~nnunet_cpr.CPR`.
        weight_decay: ratio between the norms of the decay and the gradient, the paper's lambda_awd.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.CPR`, or ``weight_decay`` is
            negative or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = AdaptiveWeightDecay(model, weight_decay=1e-2).attach(optimizer)
    """

    _scalar_state = ("coefficient",)

    def _coefficients(self, taken: Tensor) -> Tensor:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        has_grad = self._constant("has_grad", [p.grad is not None for p in self.parameters], torch.bool)
        norm = torch.where(has_grad, L2().sums(self.parameters)[0], 0).sum().sqrt().float()
        ratio = total_norm(gradients) / norm  # NaN without any gradient
        scale = getattr(self.optimizer, "grad_scale", None)  # GradScaler leaves it to fused optimizers
        if scale is not None:
            ratio = ratio / scale.to(ratio)
        present = self._state["coefficient"]
        proposed = 0.1 * present + 0.9 * self.weight_decay * ratio
        is_used = proposed.isfinite() & (taken == 1)
        torch.where(is_used, proposed, present, out=present)
        return torch.where(is_used, proposed, 0)


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
        params: as in :class:`~nnunet_cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.
        alpha: steepness of the sigmoid; 0 gives decoupled weight decay. CPR's authors compare 1, 2, 4
            and 8.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.CPR`, or a setting is negative
            or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = AdaDecay(model, weight_decay=1e-2, alpha=4.0).attach(optimizer)
    """

    alpha: float = 4.0

    has_decay = False

    def _around_step(self, found_inf: Tensor | None) -> Iterator[None]:
        for p, decay in self._decaying(found_inf):
            assert p.grad is not None
            absolute = p.grad.abs().to(torch.promote_types(p.grad.dtype, torch.float32))
            std, mean = torch.std_mean(absolute, correction=0)
            # Equal gradients have the rate 1 and not NaN.
            standard = (absolute - mean) / torch.where(std > 0, std, 1)
            rate = 2 * torch.sigmoid(self.alpha * standard)
            rate = torch.where(std.isfinite(), rate, 0)
            p.addcmul_(clamp_to_finite(p), (decay.to(rate) * rate).to(p), value=-1)
        yield


class CautiousDecay(DecoupledDecay):
    r"""Decoupled weight decay of the elements that the optimizer moves towards zero, or not at all.

    With the optimizer's update u, so that the optimizer alone gives theta - lr u (Chen et al., arXiv
    2510.12402, Algorithm 1):

    .. math::
        \theta \leftarrow \theta - \mathrm{lr}\, (u + \mathrm{wd}\, [u \theta \ge 0]\, \theta)

    Args:
        params: as in :class:`~nnunet_cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.CPR`, or ``weight_decay`` is
            negative or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = CautiousDecay(model, weight_decay=1e-2).attach(optimizer)
    """

    has_decay = False

    def _around_step(self, found_inf: Tensor | None) -> Iterator[None]:
        before = [(p, p.clone(), decay) for p, decay in self._decaying(found_inf)]
        yield
        for p, old, decay in before:
            # By comparison, since a difference or a product of small numbers may round to 0.
            agrees = torch.where(old >= 0, p <= old, p >= old)
            p.addcmul_(clamp_to_finite(old), agrees * decay.to(p), value=-1)


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
