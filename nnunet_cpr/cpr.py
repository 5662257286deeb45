"""Constrained Parameter Regularization, attached to any torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr import saved_state
from nnunet_cpr.bounds import Bound, KappaWS
from nnunet_cpr.kernels import OnePass
from nnunet_cpr.regularizers import accumulator, get_regularizer
from nnunet_cpr.saved_state import some
from nnunet_cpr.selection import Params, regularized
from nnunet_cpr.transfer import to_device

STATE_KEY = "cpr"
"""Where an optimizer's ``state_dict()`` keeps the state of the CPR attached to it."""


class CPR:
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
        self.bound = kappa
        self.regularizer = get_regularizer(regularizer)
        self.mu = float(mu)
        self.adaptive = bool(adaptive)

        chosen = regularized(params)
        self.names = list(chosen)
        self.parameters: list[Tensor] = list(chosen.values())
        self.one_pass: OnePass | None = None  # an optimizer of ours sets it
        self._optimizer: Optimizer | None = None
        self._hooks: list[Any] = []
        self._pending_state: dict[str, Tensor] | None = None
        self._grad_mask: tuple[tuple[bool, ...], Tensor] | None = None
        self._numel_there: tuple[list[int], Tensor] | None = None

        device = self.parameters[0].device
        vector = torch.zeros(len(self.parameters), dtype=torch.float32, device=device)
        count = torch.zeros((), dtype=torch.int64, device=device)
        self._state: dict[str, Tensor] = {
            "step": count.clone(),
            "skipped_updates": count.clone(),
            "limited_corrections": count.clone(),
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
        return self.regularizer.measure(self.regularizer.sums(self.parameters), self._numel())

    @property
    def step_count(self) -> int:
        """Number of updates so far: t of the paper's algorithm."""
        return int(self._state["step"])

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

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self._config().items())
        return f"CPR({len(self.names)} matrices, {settings})"

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
        self._check_decay(optimizer)
        found_inf = getattr(optimizer, "found_inf", None)
        if self.one_pass is None or not self.one_pass.covers_this_step():
            self._update_and_correct(found_inf)
            return None
        self._follow_device()
        return self._update(self.one_pass.measure(), found_inf)

    @torch.no_grad()
    def _update_and_correct(self, found_inf: Tensor | None) -> None:
        self._follow_device()
        sums = self.regularizer.sums(self.parameters)
        multiplier = self._update(self.regularizer.measure(sums, self._numel()), found_inf)
        self.regularizer.correct_(self.parameters, multiplier, sums, self._numel())

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

    def _has_grad(self) -> Tensor | None:
        """Which parameters have a gradient, bool ``[J]``; None where all have."""
        pattern = tuple(p.grad is not None for p in self.parameters)
        device = self._state["kappa"].device
        if all(pattern):
            return None
        if self._grad_mask is None or self._grad_mask[0] != pattern:
            self._grad_mask = pattern, to_device(pattern, torch.bool, device)
        return self._grad_mask[1]

    def _numel(self) -> Tensor:
        """The numbers of elements, ``[J]``; on a GPU they stay there."""
        sizes = [p.numel() for p in self.parameters]
        if self._numel_there is not None and self._numel_there[0] == sizes:
            return self._numel_there[1]
        first = self.parameters[0]
        numel = to_device(sizes, accumulator(first), first.device)
        if first.device.type != "cpu":
            self._numel_there = sizes, numel
        return numel

    def _follow_device(self) -> None:
        """Keep the state beside the parameters when the model has been moved."""
        device = self.parameters[0].device
        if self._state["kappa"].device != device:
            self._state = {key: value.to(device) for key, value in self._state.items()}
            self._grad_mask = None
            self._numel_there = None

    def measure_of(self, sums_of_squares: Tensor) -> Tensor:
        """``l2`` of the matrices from the sums of their squares, ``[J]``."""
        return self.regularizer.measure(sums_of_squares[None], self._numel())

    # With an optimizer

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Run before every step of ``optimizer``, and save and load with its state dict.

        Returns:
            The optimizer.

        Raises:
            RuntimeError: this CPR is attached already, or another one is to this optimizer.
            TypeError: it is no torch optimizer, or a wrapper around one.
            ValueError: the optimizer does not hold a regularized parameter, or decays one itself; the
                latter is looked at before every step as well.
        """
        if self._optimizer is not None:
            raise RuntimeError("this CPR is attached already; detach() it first")
        hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", {}).values()
        if any(isinstance(getattr(hook, "__self__", None), CPR) for hook in hooks):
            raise RuntimeError("another CPR is attached to this optimizer; detach() that one first")
        if not isinstance(optimizer, Optimizer) or not hasattr(
            optimizer, "_optimizer_state_dict_post_hooks"
        ):
            raise TypeError(
                f"cannot attach to a {type(optimizer).__name__}, which does not run torch's optimizer "
                "hooks; if it wraps an optimizer, attach to that one"
            )
        self._check_optimizer(optimizer)
        self._optimizer = optimizer
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._add_to_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._check_loaded_state_dict),
            optimizer.register_load_state_dict_post_hook(self._take_loaded_state),
        ]
        if getattr(optimizer, "cpr", None) is not self:  # SGDCPR and AdamCPR run theirs themselves
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        return optimizer

    def detach(self) -> None:
        """Leave the optimizer alone again; bounds and multipliers are kept."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._optimizer = None

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [n for n, p in zip(self.names, self.parameters) if id(p) not in held]
        if missing:
            raise ValueError(
                f"the optimizer does not hold {some(missing)}, which CPR is to regularize; give "
                "both the same parameters"
            )
        self._check_decay(optimizer)

    def _check_decay(self, optimizer: Optimizer) -> None:
        decayed = {
            id(p)
            for group in optimizer.param_groups
            if not isinstance(group.get("weight_decay", 0), Tensor) and group.get("weight_decay", 0)
            for p in group["params"]
        }
        if decayed:
            names = [n for n, p in zip(self.names, self.parameters) if id(p) in decayed]
            if names:
                raise ValueError(
                    f"the optimizer applies its own weight decay to {some(names)}; CPR takes its "
                    "place, so build the optimizer with weight_decay=0"
                )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._check_decay(optimizer)  # a scheduler or a loaded state may have changed it
        found_inf = getattr(optimizer, "found_inf", None)  # set by GradScaler for fused optimizers
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._update_and_correct(found_inf)
            return None

        # The closure computes the gradient at theta_t, so the correction must come after it; some
        # optimizers call it again, at other points.
        done = False

        def closure_then_update() -> Any:
            nonlocal done
            loss = closure()
            if not done:
                done = True
                self._update_and_correct(found_inf)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_update, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_update}

    # State

    def _config(self) -> dict[str, Any]:
        return {
            "kappa": repr(self.bound),
            "regularizer": self.regularizer.name,
            "mu": self.mu,
            "adaptive": self.adaptive,
        }

    def state_dict(self) -> dict[str, Any]:
        """Bounds, multipliers and counters, with the names, shapes and configuration they belong to.

        Holds tensors and plain values only, so ``torch.load(..., weights_only=True)`` reads it.
        """
        return {
            "version": saved_state.VERSION,
            "config": self._config(),
            "names": list(self.names),
            "shapes": [list(p.shape) for p in self.parameters],
            "state": {key: value.clone() for key, value in self._state.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave. Parameters may come in another order.

        Raises:
            ValueError: names, shapes or configuration differ; nothing is changed then.
        """
        self._state = self._checked(state_dict)

    def _checked(self, saved: Any) -> dict[str, Tensor]:
        return saved_state.checked(saved, self.state_dict())

    def _add_to_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[STATE_KEY] = self.state_dict()

    def _check_loaded_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if STATE_KEY not in state_dict:
            raise ValueError(
                "the optimizer state was saved without CPR, so it holds no bounds and multipliers; "
                "to start CPR anew from it, load it before attaching CPR"
            )
        self._pending_state = self._checked(state_dict[STATE_KEY])

    def _take_loaded_state(self, optimizer: Optimizer) -> None:
        # Only now has the optimizer's own state been accepted.
        if self._pending_state is not None:
            self._state, self._pending_state = self._pending_state, None
