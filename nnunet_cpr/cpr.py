"""Constrained Parameter Regularization, attached to any torch optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr.attached import Attached
from nnunet_cpr.bounds import Bound, KappaWS
from nnunet_cpr.kernels import OnePass
from nnunet_cpr.regularizers import accumulator, get_regularizer
from nnunet_cpr.selection import Params
from nnunet_cpr.sharding import Shards, local_parts, only_makes_state
from nnunet_cpr.transfer import to_device


class CPR(Attached):
    r"""Keeps a measure of every parameter matrix under an upper bound (the paper's Algorithm 1).

    Before each optimizer step t, for each of the J regularized matrices:

    .. math::
        r^j &= R(\theta_t^j) \\
        \lambda^j &\leftarrow \max(0,\ \lambda^j + \mu\,(r^j - \kappa^j)) \\
        \theta^j &\leftarrow \theta^j - \lambda^j\, g(\theta_t^j)

    and then the optimizer, whose own weight decay is 0, moves on. While a bound is not set it is
    +inf, and nothing happens to its matrix.

    A matrix whose parameter has no gradient in a step is left alone in that step, its multiplier too.
    So is one whose measure is not finite; that is counted in :meth:`metrics`. Gradients are not
    read: one that is not finite shows in the measure of the step after it. For ``l2`` the factor
    1 - 2 lambda stops at 0, which is counted as well. A step that ``GradScaler`` skips is no step.

    Args:
        params: a module, named parameters, parameters or parameter groups; see
            :mod:`nnunet_cpr.selection` for which of them are regularized.
        kappa: how the bounds are found, see :mod:`nnunet_cpr.bounds`.
        regularizer: the measure R by its name: ``l2``, ``l1``, ``std`` or ``huber``, see
            :mod:`nnunet_cpr.regularizers`.
        mu: update rate of the multipliers.
        adaptive: AdaCPR (the paper's appendix on adaptive bounds): a bound is set to the present
            measure once its multiplier has fallen back to 0.

    Raises:
        TypeError: ``params`` or ``kappa`` is of the wrong kind.
        ValueError: no such measure, ``mu`` not positive and finite, nothing to regularize.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
        >>> optimizer = CPR(model, kappa=KappaWS(1000)).attach(optimizer)
    """

    title = "CPR"
    state_key = "cpr"

    def __init__(
        self,
        params: Params,
        kappa: Bound = KappaWS(1000),
        regularizer: str = "l2",
        mu: float = 1.0,
        adaptive: bool = False,
    ) -> None:
        if not isinstance(kappa, Bound):
            raise TypeError(f"kappa must be a bound such as KappaWS(1000), got {kappa!r}")
        if isinstance(mu, bool) or not isinstance(mu, (int, float)) or not math.isfinite(mu):
            raise ValueError(f"mu must be a finite number, got {mu!r}")
        if mu <= 0:
            raise ValueError(f"mu must be positive, got {mu!r}")
        super().__init__(params)
        self.bound = kappa
        self.regularizer = get_regularizer(regularizer)
        self.mu = float(mu)
        self.adaptive = bool(adaptive)

        self.one_pass: OnePass | None = None  # an optimizer of ours sets it
        self._shards = Shards(self.parameters, self.names)
        self._numel_there: tuple[list[int], Tensor] | None = None

        count = self._state["step"]
        vector = torch.zeros(len(self.parameters), dtype=torch.float32, device=count.device)
        self._state |= {
            "skipped_updates": torch.zeros_like(count),
            "limited_corrections": torch.zeros_like(count),
            "kappa": torch.full_like(vector, math.inf),
            "lagrange_multiplier": vector,
        }
        if adaptive:
            self._state["was_positive"] = torch.zeros_like(vector, dtype=torch.bool)
        memory = kappa.memory(vector)
        assert self._state.keys().isdisjoint(memory), "a bound's memory needs names of its own"
        self._state |= memory

    # What can be read

    @property
    def kappa(self) -> Tensor:
        """The bounds, float32 ``[J]`` in the order of ``names``; +inf where not set yet."""
        return self._state["kappa"].clone()

    @property
    def lagrange_multiplier(self) -> Tensor:
        """The multipliers lambda, float32 ``[J]`` in the order of ``names``."""
        return self._state["lagrange_multiplier"].clone()

    @property
    @torch.no_grad()
    def measure(self) -> Tensor:
        """R of the parameters as they are now, float32 ``[J]`` in the order of ``names``."""
        self._follow_device()
        return self.regularizer.measure(self._sums(), self._numel())

    def metrics(self) -> dict[str, float]:
        """What to log.

        ``measure_to_kappa``: mean of R / kappa over the matrices whose bound is set (NaN if none is);
        ``lagrange_multiplier_mean`` and ``_max``; ``bounded`` and ``active``: the fractions of
        matrices with a bound and with a positive multiplier; ``skipped_updates``: matrix updates left
        out because a number was not finite; ``limited_corrections``: corrections that stopped at the
        measure's largest multiplier, both counted from the start. Waits for a GPU.
        """
        measure, kappa, multiplier = self.measure, self.kappa, self.lagrange_multiplier
        bounded = kappa.isfinite()
        return {
            "measure_to_kappa": float((measure / kappa)[bounded & (kappa > 0)].mean()),
            "lagrange_multiplier_mean": float(multiplier.mean()),
            "lagrange_multiplier_max": float(multiplier.max()),
            "bounded": float(bounded.float().mean()),
            "active": float((multiplier > 0).float().mean()),
            "skipped_updates": float(self._state["skipped_updates"]),
            "limited_corrections": float(self._state["limited_corrections"]),
        }

    # The update

    @torch.no_grad()
    def step(self) -> None:
        """One update by hand, for loops without an attached optimizer: call it just before its step."""
        self._update_and_correct(found_inf=None)

    def before_step(self, optimizer: Optimizer) -> Tensor | None:
        """The update, in the step of an optimizer that runs its own CPR.

        Returns:
            The multipliers to correct with, float32 ``[J]``, if this step can be taken in one pass and
            so has to make the correction itself; None if it has been made, or there is none to make.
        """
        if self._optimizer is not optimizer:
            return None  # detached
        self._check_step(optimizer)
        if only_makes_state():
            return None
        found_inf = getattr(optimizer, "found_inf", None)
        if self.one_pass is None or not self.one_pass.covers_this_step():
            self._update_and_correct(found_inf)
            return None
        self._follow_device()
        return self._update(self.one_pass.measure(), found_inf)

    @torch.no_grad()
    def _update_and_correct(self, found_inf: Tensor | None) -> None:
        self._follow_device()
        sums = self._sums()
        multiplier = self._update(self.regularizer.measure(sums, self._numel()), found_inf)
        self.regularizer.correct_(local_parts(self.parameters), multiplier, sums, self._numel())

    def _sums(self) -> Tensor:
        return self._shards.total(self.regularizer.sums(local_parts(self.parameters)))

    def _update(self, measure: Tensor, found_inf: Tensor | None) -> Tensor:
        """Algorithm 1 for all matrices at once, without the host waiting for a GPU.

        Args:
            measure: R(theta_t), float32 ``[J]``.
            found_inf: whether the step is skipped, a number on the device, or None; a step that is
                skipped is one in which no measure can be used.

        Returns:
            The multipliers to correct with, float32 ``[J]``; 0 where nothing is to be corrected.
        """
        state = self._state
        kappa, multiplier = state["kappa"], state["lagrange_multiplier"]
        has_grad = self._has_grad()
        taken = None if found_inf is None else found_inf.to(measure.device).reshape(()) == 0
        if taken is not None:
            measure = torch.where(taken, measure, math.nan)
            has_grad = taken if has_grad is None else has_grad & taken

        self.bound.update_(kappa, state["step"], measure, state)

        proposed = torch.add(multiplier, measure - kappa, alpha=self.mu).clamp_(min=0)
        finite = proposed.isfinite()
        updated = finite if has_grad is None else has_grad & finite
        applied = torch.where(updated, proposed, 0.0)

        if self.adaptive:
            was_positive = state["was_positive"]
            fell_back = updated & (multiplier == 0) & was_positive
            torch.where(fell_back, measure, kappa, out=kappa)
            torch.where(updated, multiplier > 0, was_positive, out=was_positive)
        torch.where(updated, proposed, multiplier, out=multiplier)
        skipped = ~finite if has_grad is None else has_grad & ~finite
        state["skipped_updates"] += skipped.sum()
        state["step"] += 1 if taken is None else taken
        limit = self.regularizer.largest_multiplier
        if limit < math.inf:
            state["limited_corrections"] += (applied > limit).sum()
            applied.clamp_(max=limit)
        return applied

    def _numel(self) -> Tensor:
        """The numbers of elements, ``[J]``; on a GPU they stay there."""
        first = self.parameters[0]
        sizes = [p.numel() for p in self.parameters]
        if self._numel_there is not None:
            known, numel = self._numel_there
            if known == sizes and numel.device == first.device:
                return numel
        numel = to_device(sizes, accumulator(first), first.device)
        if first.device.type != "cpu":
            self._numel_there = sizes, numel
        return numel

    def measure_of(self, sums_of_squares: Tensor) -> Tensor:
        """``l2`` of the matrices from the sums of squares of what this process has of them, ``[J]``."""
        return self.regularizer.measure(self._shards.total(sums_of_squares[None]), self._numel())

    # With an optimizer

    def _step_hooks(self, optimizer: Optimizer) -> list[Any]:
        if getattr(optimizer, "cpr", None) is self:  # SGDCPR and AdamCPR run theirs themselves
            return []
        return super()._step_hooks(optimizer)

    def _config(self) -> dict[str, Any]:
        return {
            "kappa": repr(self.bound),
            "regularizer": self.regularizer.name,
            "mu": self.mu,
            "adaptive": self.adaptive,
        }
