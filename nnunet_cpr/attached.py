"""What a regularizer attached to a torch optimizer has to do, whichever regularizer it is.

It runs in every step before the optimizer moves, travels with the optimizer's state dict, and takes
the place of the optimizer's own weight decay. :class:`~nnunet_cpr.cpr.CPR` and the methods it is
compared with (:mod:`nnunet_cpr.baselines`) differ in their update alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr import saved_state
from nnunet_cpr.saved_state import some
from nnunet_cpr.selection import Params, regularized
from nnunet_cpr.transfer import to_device


class Attached:
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
        chosen = regularized(params)
        self.names = list(chosen)
        self.parameters: list[Tensor] = list(chosen.values())
        self._optimizer: Optimizer | None = None
        self._hooks: list[Any] = []
        self._pending_state: dict[str, Tensor] | None = None
        self._grad_mask: tuple[tuple[bool, ...], Tensor] | None = None
        step = torch.zeros((), dtype=torch.int64, device=self.parameters[0].device)
        self._state: dict[str, Tensor] = {"step": step}

    @property
    def step_count(self) -> int:
        """Number of updates so far: t of the algorithms."""
        return int(self._state["step"])

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self._config().items())
        return f"{self.title}({len(self.names)} matrices, {settings})"

    # What a subclass makes

    def _update_and_correct(self, found_inf: Tensor | None) -> None:
        """One update: read the point and the gradients before the step, and correct the point.

        Args:
            found_inf: not 0 where ``GradScaler`` has a fused optimizer skip this step, which is no
                step then; a number on the device, or None.
        """
        raise NotImplementedError

    def _config(self) -> dict[str, Any]:
        """The settings that a saved state belongs to, as plain values."""
        raise NotImplementedError

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

    def _follow_device(self) -> None:
        """Keep the state beside the parameters when the model has been moved."""
        device = self.parameters[0].device
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
            TypeError: it is no torch optimizer, or a wrapper around one.
            ValueError: the optimizer does not hold a regularized parameter, or decays one itself; the
                latter is looked at before every step as well.
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
        self._optimizer = optimizer
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._add_to_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._check_loaded_state_dict),
            optimizer.register_load_state_dict_post_hook(self._take_loaded_state),
            *self._step_hooks(optimizer),
        ]
        return optimizer

    def _step_hooks(self, optimizer: Optimizer) -> list[Any]:
        return [optimizer.register_step_pre_hook(self._before_step)]

    def detach(self) -> None:
        """Leave the optimizer alone again; what was found so far is kept."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._optimizer = None

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [n for n, p in zip(self.names, self.parameters) if id(p) not in held]
        if missing:
            raise ValueError(
                f"the optimizer does not hold {some(missing)}, which {self.title} is to regularize; "
                "give both the same parameters"
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
                    f"the optimizer applies its own weight decay to {some(names)}; {self.title} takes "
                    "its place, so build the optimizer with weight_decay=0"
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

    def state_dict(self) -> dict[str, Any]:
        """What was found so far, with the names, shapes and configuration that it belongs to.

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
        return saved_state.checked(self.title, saved, self.state_dict())

    def _add_to_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[self.state_key] = self.state_dict()

    def _check_loaded_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if self.state_key not in state_dict:
            raise ValueError(
                f"the optimizer state was saved without {self.title}, so it holds nothing that "
                f"{self.title} has found; to start {self.title} anew from it, load it before attaching "
                f"{self.title}"
            )
        self._pending_state = self._checked(state_dict[self.state_key])

    def _take_loaded_state(self, optimizer: Optimizer) -> None:
        # Only now has the optimizer's own state been accepted.
        if self._pending_state is not None:
            self._state, self._pending_state = self._pending_state, None
