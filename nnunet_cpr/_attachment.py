"""What a regularizer attached to a torch optimizer has to do, whichever regularizer it is.

It runs in every step before the optimizer moves, travels with the optimizer's state dict, and takes
the place of the optimizer's own weight decay. :class:`~nnunet_cpr.cpr.CPR` and the methods it is
compared with (:mod:`nnunet_cpr.baselines`) differ in their update alone.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr import _state_dict
from nnunet_cpr._device import to_device
from nnunet_cpr._distributed import is_saved_in_shards, only_makes_state, refuse_flat_shards
from nnunet_cpr._state_dict import some
from nnunet_cpr.param_groups import Params, param_groups, select


class Attached(ABC):
    """A regularizer of matrices that an optimizer runs before its steps.

    A subclass makes :meth:`_update_and_correct` and says its settings in :meth:`_config`; what it
    remembers are the tensors in ``_state``, for all J matrices at once.

    Attributes:
        names: of the regularized matrices.
        parameters: the matrices, in the order of ``names``.
    """

    title: ClassVar[str]
    """What error messages call it."""
    state_key: ClassVar[str]
    """Where an optimizer's ``state_dict()`` keeps the state of what is attached to it."""

    def __init__(self, params: Params) -> None:
        groups = param_groups(params)
        chosen = select(groups)
        self.names = [name for name, _, _ in chosen]
        self._positions = groups.positions_of([p for _, p, _ in chosen])
        self.parameters: list[Tensor] = [p for _, p, _ in chosen]
        if not chosen:
            warnings.warn(
                f"no parameter to regularize, so {self.title} has nothing to do: it takes trainable "
                "parameters with two or more dimensions that are no embedding, bias or normalization "
                "weight",
                stacklevel=3,
            )
        # Weak, so that an optimizer is freed with its state as soon as its last user drops it.
        self._optimizer_ref: weakref.ref[Optimizer] | None = None
        self._hooks: list[Any] = []
        self._held: list[int] = []  # the optimizer's parameters, by id
        self._pending_state: dict[str, Tensor] | None = None
        self._grad_mask: tuple[tuple[bool, ...], Tensor] | None = None
        self._first_device = next(
            (p.device for g in groups for _, p in g["params"]), torch.device("cpu")
        )
        step = torch.zeros((), dtype=torch.int64, device=self._device())
        self._state: dict[str, Tensor] = {"step": step}

    @property
    def _optimizer(self) -> Optimizer | None:
        """The optimizer that this is attached to, while it lives."""
        return None if self._optimizer_ref is None else self._optimizer_ref()

    @property
    def step_count(self) -> int:
        """Number of updates so far: t of the algorithms."""
        return int(self._state["step"])

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self._config().items())
        return f"{self.title}({len(self.names)} matrices, {settings})"

    # What a subclass makes

    @abstractmethod
    def _update_and_correct(self, found_inf: Tensor | None) -> None:
        """One update: read the point and the gradients before the step, and correct the point.

        Args:
            found_inf: not 0 where ``GradScaler`` has a fused optimizer skip this step, which is no
                step then; a number on the device, or None.
        """

    @abstractmethod
    def _config(self) -> dict[str, Any]:
        """The settings that a saved state belongs to, as plain values."""

    # What its update may need

    def _has_grad(self) -> Tensor | None:
        """Which parameters have a gradient, bool ``[J]``; None where all have."""
        pattern = tuple(p.grad is not None for p in self.parameters)
        device = self._state["step"].device
        if all(pattern):
            return None
        if self._grad_mask is None or self._grad_mask[0] != pattern:
            self._grad_mask = pattern, to_device(pattern, torch.bool, device)
        return self._grad_mask[1]

    def _device(self) -> torch.device:
        """Return the device of the state: that of the parameters, or the CPU while they are on meta."""
        device = self.parameters[0].device if self.parameters else self._first_device
        return torch.device("cpu") if device.type == "meta" else device

    def _follow_device(self) -> None:
        """Keep the state beside the parameters when the model has been moved."""
        device = self._device()
        if self._state["step"].device != device:
            self._state = {key: value.to(device) for key, value in self._state.items()}
            self._grad_mask = None

    # With an optimizer

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Run before every step of ``optimizer``, and save and load with its state dict.

        Returns:
            The optimizer.

        Raises:
            RuntimeError: this is attached already, or another regularizer is to this optimizer.
            TypeError: it is no torch optimizer, or a wrapper around one; or the parameters have been
                flattened since this was built.
            ValueError: the optimizer does not hold a regularized parameter, or decays one itself; both
                are looked at before every step as well.
        """
        if self._optimizer is not None:
            raise RuntimeError(f"this {self.title} is attached already; detach() it first")
        for hook in getattr(optimizer, "_optimizer_state_dict_post_hooks", {}).values():
            other = getattr(hook, "__self__", None)
            if isinstance(other, Attached):
                raise RuntimeError(
                    f"another {other.title} is attached to this optimizer; detach() that one first"
                )
        if not isinstance(optimizer, Optimizer) or not hasattr(
            optimizer, "_optimizer_state_dict_post_hooks"
        ):
            raise TypeError(
                f"cannot attach to a {type(optimizer).__name__}, which does not run torch's optimizer "
                "hooks; if it wraps an optimizer, attach to that one"
            )
        self._check_optimizer(optimizer)
        self._optimizer_ref = weakref.ref(optimizer)
        optimizer.__getstate__ = self._refuse_copy  # type: ignore[method-assign]
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._add_to_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._check_loaded_state_dict),
            optimizer.register_load_state_dict_post_hook(self._take_loaded_state),
            *self._step_hooks(optimizer),
        ]
        return optimizer

    def _step_hooks(self, optimizer: Optimizer) -> list[Any]:
        # torch.compile would take what it reads on the host for constants, or compile anew for it.
        return [optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step))]

    def detach(self) -> None:
        """Leave the optimizer alone again; what was found so far is kept."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        optimizer = self._optimizer
        if optimizer is not None:
            del optimizer.__getstate__
        self._optimizer_ref = None

    def _refuse_copy(self) -> NoReturn:
        # torch's own __getstate__ drops hooks: a copy would go on silently without this.
        raise TypeError(
            f"an optimizer that {self.title} is attached to cannot be copied or pickled; build another "
            "with one of its own and load this one's state_dict() into it"
        )

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        held = _held_by(optimizer)
        known = set(held)
        missing = [n for n, p in zip(self.names, self.parameters) if id(p) not in known]
        if missing:
            raise ValueError(
                f"the optimizer does not hold {some(missing)}, which {self.title} is to regularize; "
                "give both the same parameters (a library that lets an optimizer step on copies of the "
                f"parameters, as DeepSpeed does, cannot be used with {self.title})"
            )
        for name, p in zip(self.names, self.parameters):
            refuse_flat_shards(name, p)
        self._check_decay(optimizer)
        self._held = held

    def _check_step(self, optimizer: Optimizer) -> None:
        # A library may have put other parameters into it; a scheduler or a loaded state, a weight decay.
        if _held_by(optimizer) != self._held:
            self._check_optimizer(optimizer)
        else:
            self._check_decay(optimizer)

    def _check_decay(self, optimizer: Optimizer) -> None:
        decaying = [g for g in optimizer.param_groups if _may_decay(g.get("weight_decay", 0))]
        if not decaying:
            return
        own = {id(p): name for name, p in zip(self.names, self.parameters)}
        decayed = [own[id(p)] for group in decaying for p in group["params"] if id(p) in own]
        if decayed:
            raise ValueError(
                f"the optimizer applies its own weight decay to {some(decayed)}; {self.title} takes its "
                "place, so build the optimizer with weight_decay=0"
            )

    def begin_step(self, optimizer: Optimizer) -> bool:
        """Check what a step of ``optimizer`` relies on; return True if an update has to precede it.

        Raises:
            ValueError: the optimizer lacks a regularized parameter, or decays one itself.
            RuntimeError: a regularized parameter is on the meta device.
        """
        if self._optimizer is not optimizer:
            return False  # detached
        self._check_step(optimizer)
        on_meta = [name for name, p in zip(self.names, self.parameters) if p.is_meta]
        if on_meta:
            raise RuntimeError(
                f"parameter {on_meta[0]!r} is on the meta device, which holds no values; build the "
                "optimizer after the model has been given memory, by to_empty() for example"
            )
        return not only_makes_state()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self.begin_step(optimizer) or not self.parameters:
            return None
        found_inf = getattr(optimizer, "found_inf", None)  # set by GradScaler for fused optimizers
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._update_and_correct(found_inf)
            return None

        # The closure computes the gradient at theta_t, so the correction must come after it; some
        # optimizers call it again, at other points, and torch.compile would trace it.
        done = False
        update = torch.compiler.disable(self._update_and_correct)

        def closure_then_update() -> Any:
            nonlocal done
            loss = closure()
            if not done:
                done = True
                update(found_inf)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_update, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_update}

    # State

    def state_dict(self) -> dict[str, Any]:
        """What was found so far, with the names, shapes and configuration that it belongs to.

        Holds tensors and plain values only, so ``torch.load(..., weights_only=True)`` reads it.
        """
        return {
            "version": _state_dict.VERSION,
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

    def _checked(self, saved: Any, order: list[str] | None = None) -> dict[str, Tensor]:
        return _state_dict.checked(self.title, saved, self.state_dict(), self._positions, order)

    def _add_to_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        state = state_dict[self.state_key] = self.state_dict()
        if is_saved_in_shards():  # takes the parameter groups of a state and leaves the rest
            first, *others = state_dict["param_groups"]
            state_dict["param_groups"] = [{**first, self.state_key: state}, *others]

    def _check_loaded_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._pending_state = None  # of a load that torch refused
        groups = state_dict.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
            raise ValueError("this is no state of an optimizer: it has no param_groups")
        saved = [holder[self.state_key] for holder in (state_dict, *groups) if self.state_key in holder]
        if not saved:
            raise ValueError(
                f"the optimizer state was saved without {self.title}, so it holds nothing that "
                f"{self.title} has found; to start {self.title} anew from it, load it before attaching "
                f"{self.title}"
            )
        names = [group.get("param_names") for group in groups]
        order = None if None in names else [str(name) for own in names for name in own]
        pending = self._checked(saved[0], order)
        if state_dict.get("state"):
            renamed = _state_dict.under_names(saved[0], self.names, self._positions, order)
            self._check_order(optimizer, renamed["names"])
        self._pending_state = pending
        state_dict["param_groups"] = [
            {key: value for key, value in group.items() if key != self.state_key} for group in groups
        ]

    def _check_order(self, optimizer: Optimizer, saved: list[str]) -> None:
        # This goes by name, but torch's own state by order.
        held = {p: place for place, p in enumerate(_held_by(optimizer))}
        places = [held[id(p)] for p in self.parameters]
        if saved != self.names and places == sorted(places):
            raise ValueError(
                f"cannot load the {self.title} state: the optimizer had its parameters in another "
                "order, and torch would give their momenta to others; build it with them in the saved "
                f"order, {some(saved)}"
            )

    def _take_loaded_state(self, optimizer: Optimizer) -> None:
        # Only now has the optimizer's own state been accepted.
        if self._pending_state is not None:
            self._state, self._pending_state = self._pending_state, None


def _held_by(optimizer: Optimizer) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def _may_decay(weight_decay: Any) -> bool:
    if isinstance(weight_decay, Tensor) and weight_decay.device.type != "cpu":
        return True  # to look at it, the host would have to wait in every step
    return bool(weight_decay)
