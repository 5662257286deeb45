"""Base class of the optimizers whose fused step applies the attached regularization method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from nnunet_cpr._attachment import RegularizationMethod, StepInputs, attached_method
from nnunet_cpr._distributed import has_same_placements, is_sharded, local_tensors
from nnunet_cpr.fused import FusedBackend, GroupStep, Rule, find_backend, is_enabled
from nnunet_cpr.fused._self_check import passes_self_check
from nnunet_cpr.fused.backend import share_memory
from nnunet_cpr.optimizers._groups import choose_fused, copy_loaded_state, torch_groups
from nnunet_cpr.param_groups import Params, param_groups


class FusedOptimizer(torch.optim.Optimizer, ABC):
    """Base class of the optimizers whose fused step applies the attached regularization method.

    An unfused step is the method's correction followed by torch's step. A fused step does both in one
    kernel (:mod:`nnunet_cpr.fused`), if the method multiplies each matrix by one number
    (``RegularizationMethod.has_decay``); a subclass provides its rule and the tensors that it reads and
    writes. Without a method, a step is torch's.
    """

    calls_method = True
    """True: a step calls the attached method, which needs no hook."""
    _torch_class: type[torch.optim.Optimizer]
    _find_backend = staticmethod(find_backend)
    _step_uncompiled: Callable[..., Any] | None = None

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, *, fused: bool | None = None, **options: Any
    ) -> None:
        groups = torch_groups(param_groups(params), params if isinstance(params, nn.Module) else None)
        chosen = choose_fused(fused, groups, is_sgd=self._torch_class is torch.optim.SGD)
        super().__init__(groups, lr=lr, fused=chosen, **options)  # type: ignore[call-arg]
        self._prepare(fused)

    def _prepare(self, fused: bool | None) -> None:
        """Prepare for steps; called at the end of the construction."""
        # If True, GradScaler leaves unscaling to the step, and libraries refuse to clip gradients. As in
        # torch, this requires fused=True.
        self._step_supports_amp_scaling = bool(fused)
        self.register_load_state_dict_post_hook(copy_loaded_state)
        if FusedOptimizer._step_uncompiled is None:  # not at import, where it takes a second
            FusedOptimizer._step_uncompiled = staticmethod(
                torch.compiler.disable(FusedOptimizer._step_eagerly)
            )
        self._allows_fused = is_enabled() and fused is not False
        self._rebind_parameters()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step: the closure, the method's update, and the optimizer's update.

        ``torch.compile`` does not compile it.

        Returns:
            The result of the closure.
        """
        assert FusedOptimizer._step_uncompiled is not None
        return FusedOptimizer._step_uncompiled(self, closure)

    @torch.no_grad()
    def _step_eagerly(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Not in a hook, so that hooks that change gradients and parameters run before.
        method = self._begin_step()
        if self._binding != self._current_binding():
            self._rebind_parameters()
        scaler = {
            key: value
            for key in ("grad_scale", "found_inf")  # set by GradScaler for fused optimizers
            if (value := getattr(self, key, None)) is not None
        }
        groups = [self._group_step(group) for group in self.param_groups]
        backend = self._usable_backend(groups) if method is not None else None
        if method is not None and backend is not None:
            decay = method.update_decay(StepInputs(backend.sums_of_squares, scaler.get("found_inf")))
            self._count_steps(groups)
            backend.step(groups, decay, **scaler)  # type: ignore[arg-type]
            if "found_inf" in scaler:
                self._count_steps(groups, scaler["found_inf"])
            return loss
        if self._backend is not None:
            self._backend.discard_sums()
        if method is not None:
            method.check_devices()
            self._refuse_sparse_gradients()
            method._update_and_correct(scaler.get("found_inf"))
        can_fuse = [
            group is not None and group.has_one_dtype() and self._torch_fuses(settings)
            for group, settings in zip(groups, self.param_groups)
        ]
        self._torch_step(can_fuse, scaler)
        return loss

    def _begin_step(self) -> RegularizationMethod | None:
        """Check the optimizer before a step; return the method whose update must precede the step."""
        method = attached_method(self)
        if method is None or not method.begin_step(self) or not method.parameters:
            return None
        return method

    # Fused step

    def _rebind_parameters(self) -> None:
        """Choose the backend for the present method and parameters."""
        method = attached_method(self)
        self._matrices = [] if method is None else method.parameters
        self._matrix_index = {id(p): j for j, p in enumerate(self._matrices)}
        held = [p for group in self.param_groups for p in group["params"]]
        self._has_shards = any(map(is_sharded, held))
        self._binding = self._current_binding()
        # A frozen parameter counts when it gets a gradient.
        params = local_tensors(p for p in held if p.requires_grad)
        self._backend: FusedBackend | None = None
        may_fuse = self._allows_fused and params and not share_memory(params)
        if method is not None and method.has_decay and may_fuse:
            self._backend = self._find_backend(local_tensors(self._matrices), params)

    def _current_binding(self) -> Any:
        """Return the method and the properties of its matrices that a backend depends on."""
        matrices = local_tensors(self._matrices) if self._has_shards else self._matrices
        return attached_method(self), [(p.numel(), p.dtype, p.device) for p in matrices]

    def _usable_backend(self, groups: list[GroupStep | None]) -> FusedBackend | None:
        """Return the backend if it can take this step."""
        backend = self._backend
        if backend is None or None in groups:
            return None
        # Parameters that the method does not regularize may have weight decay.
        if any(settings["weight_decay"] != 0 for settings in self.param_groups):
            return None
        if self._has_shards:
            backend.matrices = local_tensors(self._matrices)
        known = [group for group in groups if group is not None]
        return backend if backend.supports(known) and passes_self_check(backend, known) else None

    def _group_step(self, group: dict[str, Any]) -> GroupStep | None:
        """Return the group's tensors for a fused step, ours or torch's; None if neither is possible."""
        # fused is never set for DTensors of SGD, for which torch has no fused step.
        is_set = group.get("fused") or (self._has_shards and not self._torch_fuses_shards)
        if not (self._allows_fused and is_set and self._supports_fused(group)):
            return None
        pairs = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
        params, grads = [p for p, _ in pairs], [grad for _, grad in pairs]
        matrices = [self._matrix_index.get(id(p), -1) for p in params]
        # Before state is created for them, which torch would create in another way.
        if any(
            [g.layout is not torch.strided or g.dtype != p.dtype or g.shape != p.shape for p, g in pairs]
        ):
            return None
        state, steps = self._state_tensors(group, params)
        if self._has_shards:
            # A gradient may still be a partial sum over processes, which torch's unfused step adds up.
            if not all(all(map(has_same_placements, params, c)) for c in (grads, *state) if c):
                return None
            params, grads, steps = map(local_tensors, (params, grads, steps))
            state = list(map(local_tensors, state))
        step = GroupStep(self._rule(group), params, grads, state, steps, matrices)
        return step if step.is_regular() else None

    # Unfused step

    def _refuse_sparse_gradients(self) -> None:
        """Raise torch's error before the method changes anything."""
        params = [p for group in self.param_groups for p in group["params"]]
        if not self._takes_sparse and any(p.grad is not None and p.grad.is_sparse for p in params):
            raise RuntimeError(f"{self._torch_class.__name__} does not support sparse gradients")

    def _torch_step(self, can_fuse: list[bool], scaler: dict[str, Tensor]) -> None:
        """Take torch's step, unfused for groups that cannot be fused."""
        unfused = [g for g, can in zip(self.param_groups, can_fuse) if g.get("fused") and not can]
        if unfused and scaler:
            # Only torch's fused steps handle GradScaler's tensors.
            if "found_inf" in scaler and bool(scaler["found_inf"]):
                return
            scale = scaler.get("grad_scale")
            grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            for grad in grads if scale is not None else []:
                grad.div_(scale.to(grad.device))  # type: ignore[union-attr]
            self.grad_scale = self.found_inf = None  # GradScaler deletes them after the step
        for group in unfused:
            group["fused"] = False
        try:
            _without_hooks(self._torch_class.step)(self)
        finally:
            for group in unfused:
                group["fused"] = True

    def _torch_fuses(self, group: dict[str, Any]) -> bool:
        """Return True if torch has a fused step for the group, with or without DTensors."""
        sharded = {is_sharded(p) for p in group["params"]} if self._has_shards else {False}
        return sharded == {False} or (sharded == {True} and self._torch_fuses_shards)

    # Implemented by subclasses

    _torch_fuses_shards = False
    """True if torch's fused step supports DTensors."""

    _takes_sparse = False
    """True if torch's step supports sparse gradients."""

    @abstractmethod
    def _supports_fused(self, group: dict[str, Any]) -> bool:
        """Return True if a fused step supports the settings of the group."""

    def _state_tensors(
        self, group: dict[str, Any], stepped: list[Tensor]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Return the state tensors and step counts of the parameters; create missing ones."""
        raise NotImplementedError(f"{type(self).__name__} has no fused step")

    def _rule(self, group: dict[str, Any]) -> Rule:
        """Return the settings of a fused step."""
        raise NotImplementedError(f"{type(self).__name__} has no fused step")

    def _count_steps(self, groups: Sequence[GroupStep | None], found_inf: Tensor | None = None) -> None:
        """Add 1 to the step counts, or subtract ``found_inf`` from them."""
        steps = [count for group in groups if group is not None for count in group.steps]
        if steps and found_inf is None:
            torch._foreach_add_(steps, 1)
        elif steps:
            assert found_inf is not None
            torch._foreach_sub_(steps, [found_inf.to(steps[0].device)] * len(steps))

    def __getstate__(self) -> NoReturn:
        # torch's __getstate__ drops hooks: a copy would silently train without the method.
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled; build a new one and load this "
            "one's state_dict() into it"
        )


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step of a torch optimizer without torch's wrapper, which would run hooks again."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
