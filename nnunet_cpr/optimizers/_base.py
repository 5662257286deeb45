"""Base class of the optimizers whose fused step applies the attached regularization method."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from nnunet_cpr._attachment import RegularizationMethod, StepInputs, attached_method
from nnunet_cpr._distributed import has_same_placements, is_sharded, local_tensors
from nnunet_cpr.fused import FusedBackend, GroupStep, Rule, find_backend, is_enabled
from nnunet_cpr.fused._memory import in_memory_order, is_truncated
from nnunet_cpr.fused._self_check import passes_self_check
from nnunet_cpr.fused.backend import Layout
from nnunet_cpr.optimizers._groups import choose_fused, torch_groups
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
        self.register_load_state_dict_post_hook(_copy_loaded_state)  # type: ignore[arg-type]
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
        if attached_method(self) is not self._method:
            self._rebind_parameters()
        groups, has_current_sums = self._group_steps()
        scaler = {
            key: value
            for key in ("grad_scale", "found_inf")  # set by GradScaler for fused optimizers
            if (value := getattr(self, key, None)) is not None
        }
        backend = self._usable_backend(groups, has_current_sums) if method is not None else None
        if method is not None and backend is not None:
            inputs = StepInputs(
                partial(backend.sums_of_squares, has_current_sums),
                scaler.get("found_inf"),
                all_as_before=backend.has_stepped(groups),  # type: ignore[arg-type]
            )
            decay = method.update_decay(inputs)
            self._count_steps(groups)
            backend.step(groups, decay, **scaler)  # type: ignore[arg-type]
            if "found_inf" in scaler:
                self._count_steps(groups, scaler["found_inf"])
            return loss
        can_fuse = [
            group is not None and group.has_one_dtype() and self._torch_fuses(settings)
            for group, settings in zip(groups, self.param_groups)
        ]
        for settings, can in zip(self.param_groups, can_fuse):
            if not can:
                self._check_tensors(settings["params"])
        if self._backend is not None:
            self._backend.discard_sums()
        if method is not None:
            method.check_devices()
            method._update_and_correct(scaler.get("found_inf"))
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
        self._layouts: dict[int, Layout] = {}  # of each group in the last step
        method = self._method = attached_method(self)
        self._matrices = [] if method is None else method.parameters
        self._matrix_index = {id(p): j for j, p in enumerate(self._matrices)}
        held = [p for group in self.param_groups for p in group["params"]]
        self._has_shards = any(map(is_sharded, held))
        self._local = dict(zip(map(id, held), local_tensors(held))) if self._has_shards else {}
        self._signature = self._parameter_signature()
        matrices = [self._local.get(id(p), p) for p in self._matrices]
        # The backend checks a frozen parameter when it gets a gradient later.
        params = [self._local.get(id(p), p) for p in held if p.requires_grad]
        self._backend: FusedBackend | None = None
        if method is not None and method.has_decay and params and self._allows_fused:
            self._backend = self._find_backend(matrices, params)

    def _parameter_signature(self) -> list[Any]:
        """Return the properties of the parameters that a backend depends on."""
        if not self._has_shards:
            return [(p.numel(), p.dtype, p.device) for p in self._matrices]
        # The local tensors of DTensors may be replaced.
        held = local_tensors(p for group in self.param_groups for p in group["params"])
        return [(p.numel(), p.dtype, p.device, p.data_ptr()) for p in held]

    def _group_steps(self) -> tuple[list[GroupStep | None], bool]:
        """Return each group's step, and True if the backend has the sums of squares of the matrices.

        If a size, dtype or device has changed, the backend is chosen again.
        """
        if self._has_shards and self._signature != self._parameter_signature():
            self._rebind_parameters()
        groups = [self._group_step(*item) for item in enumerate(self.param_groups)]
        backend = self._backend
        known = [group for group in groups if group is not None]
        if backend is not None and len(known) == len(groups) and backend.has_current_sums(known):
            return groups, True
        if not self._has_shards and self._signature != self._parameter_signature():
            self._rebind_parameters()
        return groups, False

    def _usable_backend(
        self, groups: Sequence[GroupStep | None], has_current_sums: bool
    ) -> FusedBackend | None:
        """Return the backend if it can take this step."""
        backend = self._backend
        if backend is None:
            return None
        for group, settings in zip(groups, self.param_groups):
            # Parameters that the method does not regularize may have weight decay.
            if group is None or settings["weight_decay"] != 0:
                return None
        known = [group for group in groups if group is not None]
        if not backend.supports(known, has_current_sums):
            return None
        return backend if passes_self_check(backend, known) else None

    def _group_step(self, index: int, group: dict[str, Any]) -> GroupStep | None:
        """Return the group's tensors for a fused step, ours or torch's; None if neither is possible."""
        # fused is never set for DTensors of SGD, for which torch has no fused step.
        is_set = group.get("fused") or (self._has_shards and not self._torch_fuses_shards)
        if not (self._allows_fused and is_set and self._supports_fused(group)):
            return None
        stepped = group["params"]
        grads = [p.grad for p in stepped]
        if any([grad is None for grad in grads]):
            stepped = [p for p, grad in zip(stepped, grads) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        before = self._layouts.get(index)
        has_same_params = before is not None and _are_same(stepped, before.params)
        if not has_same_params:  # before state is created for them
            if [g.layout for g in grads] != [torch.strided] * len(grads):
                return None
            if [g.dtype for g in grads] != [p.dtype for p in stepped]:
                return None
        # A gradient may still be a partial sum over processes, which torch's unfused step adds up.
        if self._has_shards and not all(map(has_same_placements, stepped, grads)):
            return None
        matrices = before.matrices if has_same_params and before is not None else None
        tensors = self._gather_tensors(group, stepped, grads, matrices)
        if tensors is None:
            return None
        if not tensors.read_layout(before):
            _match_memory_order(self, stepped)
            tensors = self._gather_tensors(group, stepped, [p.grad for p in stepped], matrices)
            if tensors is None or not tensors.read_layout():
                return None
        self._layouts[index] = tensors.layout
        return tensors

    def _gather_tensors(
        self,
        group: dict[str, Any],
        stepped: list[Tensor],
        grads: list[Any],
        matrices: list[int] | None,
    ) -> GroupStep | None:
        params = list(stepped)
        state, steps = self._state_tensors(group, stepped)
        if self._has_shards:
            if not all(all(map(has_same_placements, stepped, column)) for column in state if column):
                return None
            params = [self._local.get(id(p), p) for p in stepped]
            grads = local_tensors(grads)
            state = [local_tensors(column) for column in state]
            steps = local_tensors(steps)
        if matrices is None:
            matrices = [self._matrix_index.get(id(p), -1) for p in stepped]
        return GroupStep(self._rule(group), params, grads, state, steps, matrices)

    def _check_tensors(self, params: list[Tensor]) -> None:
        """Check that torch's step can use the tensors, before anything is changed.

        Raises:
            RuntimeError: the storage of a tensor is too short, a gradient is sparse, or a gradient or
                state has another device, shape or dtype than its parameter.
        """
        for p in params:
            if p.grad is not None and p.grad.layout is not torch.strided and not self._takes_sparse:
                raise RuntimeError(f"{self._torch_class.__name__} does not support sparse gradients")
            state = self.state.get(p, {})
            states = {f"state {key!r}": state.get(key) for key in (*self._state_keys, "step")}
            tensors = {"parameter": p, "gradient": p.grad, **states}
            for key, t in tensors.items():
                if not isinstance(t, Tensor):
                    continue
                if is_truncated(t):
                    raise RuntimeError(
                        f"{key} of shape {tuple(t.shape)}: expected storage for all elements, got "
                        f"{t.untyped_storage().nbytes()} bytes; resize its storage before the step"
                    )
                if p.grad is None or key in ("parameter", "state 'step'"):
                    continue
                title = f"{key} of a parameter of shape {tuple(p.shape)}"
                if t.device != p.device:
                    raise RuntimeError(
                        f"{title}: expected the parameter's device {p.device}, got {t.device}; load the "
                        "optimizer's state_dict() again after moving the model"
                    )
                if t.shape != p.shape:
                    raise RuntimeError(
                        f"{title}: expected the parameter's shape, got {tuple(t.shape)}; build a new "
                        "optimizer after changing the shapes of parameters"
                    )
                if t.dtype != p.dtype and not self._allows_other_dtypes:
                    raise RuntimeError(
                        f"{title}: expected the parameter's dtype {p.dtype}, got {t.dtype}; load the "
                        "optimizer's state_dict() again after casting the model"
                    )

    # Unfused step

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

    _state_keys: tuple[str, ...]
    """Keys of the state tensors with the parameters' shapes."""
    _allows_other_dtypes = False
    """True if torch's unfused step supports gradients and state of another dtype."""
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

    def _states(self, params: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Return the state of each parameter."""
        if _are_same(params, self.state):  # usual, and faster than looking up each
            return list(self.state.values())
        return [self.state[p] for p in params]

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


def _are_same(a: Collection[Any], b: Collection[Any]) -> bool:
    """Return True if two collections have the same objects in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step of a torch optimizer without torch's wrapper, which would run hooks again."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def _match_memory_order(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
    """Give gradients and state the memory order of their parameters, which fused steps require."""
    for p in params:
        if p.grad is not None and p.grad.layout is torch.strided:
            grad = in_memory_order(p, p.grad)
            if grad is not p.grad:
                p.grad = grad
        for key, value in optimizer.state.get(p, {}).items():
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                continue
            if 0 not in value.stride():  # torch refuses expanded state
                optimizer.state[p][key] = in_memory_order(p, value)


def _copy_loaded_state(optimizer: FusedOptimizer) -> None:
    """Copy a loaded state, in the memory order of the parameters.

    torch keeps the tensors of the loaded dict: steps would change them, and a checkpoint read with
    ``mmap`` could not be overwritten.
    """
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():  # users may add other values
            if isinstance(value, Tensor):
                state[key] = value.clone()
    for group in optimizer.param_groups:
        _match_memory_order(optimizer, group["params"] if group.get("fused") else [])
