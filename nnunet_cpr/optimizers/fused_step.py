"""Step of an optimizer with an attached regularization method, fused where a kernel can take it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from nnunet_cpr.cpr.attachment import RegularizationMethod, attached_method
from nnunet_cpr.cpr.multipliers import Decays
from nnunet_cpr.cpr.regularized_parameters import Params
from nnunet_cpr.cpr.regularizers import L2
from nnunet_cpr.cpr.shards import has_same_placements, is_sharded, local_tensors
from nnunet_cpr.cpr.tensors import check_tensors
from nnunet_cpr.optimizers.groups import LoadsByName, torch_groups, torch_may_fuse
from nnunet_cpr.optimizers.step_tensors import Rule, StepTensors, are_alike, is_enabled, share_memory

Kernel = Callable[[Sequence[tuple[StepTensors, Rule]], Decays], None]
"""Function that takes a step in float32 and subtracts a share of each matrix on the way.

Its arguments are the tensors with gradients and the settings of each parameter group, and the share of
each of the J matrices; matrices without a gradient are not among the tensors.
"""


def find_kernel(device: torch.device) -> Kernel | None:
    """Return the kernel for tensors on a device, None if there is none.

    Example:
        >>> print(find_kernel(torch.device("meta")))
        None
    """
    return _cpu_kernel() if device.type == "cpu" else None


@lru_cache
def _cpu_kernel() -> Kernel | None:
    """Return the kernel if Numba compiles a trial kernel and has a cache; if not, warn."""
    try:
        from nnunet_cpr.optimizers import kernels

        kernels.add_one(1)
        return kernels.fused_step
    except Exception as error:  # its compiler raises errors of many classes
        # If neither the folder of this package nor the user's cache can be written.
        is_cache = "cannot cache function" in str(error)
        advice = "; set NUMBA_CACHE_DIR=<folder that can be written>" if is_cache else ""
        warnings.warn(
            "CPR's fused step on the CPU is disabled: Numba cannot compile a kernel "
            f"({type(error).__name__}: {error}); the slower unfused step is taken instead{advice}",
            stacklevel=2,
        )
        return None


class FusedStep(LoadsByName, ABC):
    """Step of an optimizer, beside its class in torch.

    An unfused step is the method's correction followed by torch's step. A fused step does both in one
    kernel (:mod:`nnunet_cpr.optimizers.kernels`), if the method multiplies each matrix by one number
    (``RegularizationMethod.has_decay``). Without a method, a step is torch's.
    """

    calls_method = True
    """True: a step calls the attached method, which needs no hook."""
    state: Any
    _find_kernel = staticmethod(find_kernel)  # an attribute, so that a trial can choose another
    # Defaults, which a copy has: torch copies groups and state only.
    _may_fuse = True
    _has_shards = True
    _was_fused = False
    """True: the last step was fused."""

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, *, fused: bool | None = None, **options: Any
    ) -> None:
        groups = torch_groups(params)
        torch_fused = fused  # torch's own fused steps; ours are allowed by _may_fuse
        if fused is None and not (options.get("foreach") or options.get("differentiable")):
            torch_fused = torch_may_fuse(groups) or None
        super().__init__(groups, lr=lr, fused=torch_fused, **options)  # type: ignore[call-arg]
        # If True, GradScaler leaves unscaling to the step, and libraries refuse to clip gradients. As in
        # torch, this requires fused=True.
        self._step_supports_amp_scaling = bool(fused)
        self._may_fuse = is_enabled() and fused is not False
        self._has_shards = any(is_sharded(p) for group in self.param_groups for p in group["params"])

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step: the closure, the method's update, and the optimizer's update.

        ``torch.compile`` does not compile it.

        Returns:
            The result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Not in a hook, so that hooks that change gradients and parameters run before.
        optimizer = cast(torch.optim.Optimizer, self)
        method = attached_method(optimizer)
        if method is not None and method.begin_step(optimizer):
            self._was_fused = self._take_fused_step(method)
            if self._was_fused:
                return loss
            method.correct_before_step(optimizer)
        self._take_torchs_step()
        return loss

    def _take_fused_step(self, method: RegularizationMethod) -> bool:
        """Take the step in a kernel; return False if there is none for it."""
        # GradScaler's tensors are left to torch's fused steps. After a step that raised when its
        # correction was done, the kernel would correct again.
        is_scaled = getattr(self, "found_inf", None) is not None
        if not (self._may_fuse and method.has_decay) or is_scaled or method.has_open_correction:
            return False
        kernel = self._find_kernel(method.parameters[0].device)
        groups = self._step_tensors(method) if kernel is not None else None
        if kernel is None or groups is None:
            return False
        decays = method.begin_kernel_step()
        if decays is None:  # R of all matrices first, in a pass of its own
            matrices = local_tensors(method.parameters)
            shares = method.update_decay(lambda: L2().sums(matrices)[0])
            decays = Decays.given(shares.numpy())
        steps = [count for tensors, _ in groups for count in tensors.steps]
        if steps:
            torch._foreach_add_(steps, 1)
        kernel(groups, decays)
        return True

    def _step_tensors(self, method: RegularizationMethod) -> list[tuple[StepTensors, Rule]] | None:
        """Return tensors and rule of each group with gradients, None if a kernel cannot step all."""
        index = {id(p): j for j, p in enumerate(method.parameters)}
        device = method.parameters[0].device
        listed = []
        for group in self.param_groups:
            if all(p.grad is None for p in group["params"]):
                continue
            own = self._group_tensors(group, index)
            if own is None or own[0].dtype != torch.float32 or own[0].device != device:
                return None
            listed.append(own)
        return listed if listed and not share_memory([tensors for tensors, _ in listed]) else None

    def _group_tensors(
        self, group: dict[str, Any], index: dict[int, int]
    ) -> tuple[StepTensors, Rule] | None:
        """Return the tensors of a group and its rule, None if a kernel cannot step them."""
        if group.get("fused") is False or group.get("foreach"):
            return None
        pairs = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
        params = [p for p, _ in pairs]
        if not all([self.state.get(p) for p in params]):
            check_tensors(cast(torch.optim.Optimizer, self), {})  # before it creates missing state
            if any(grad.layout is not torch.strided for _, grad in pairs):
                return None  # torch's step creates it in another way
        own = self._rule_and_state(group, params)
        if own is None:
            return None
        rule, moments, steps = own
        matrices = [index.get(id(p), -1) for p in params]
        columns = [params, [grad for _, grad in pairs], *moments]
        if self._has_shards:
            # A gradient may still be a partial sum over processes, which torch's step adds up.
            if not all(all(map(has_same_placements, params, column)) for column in columns):
                return None
            columns, steps = [local_tensors(column) for column in columns], local_tensors(steps)
        tensors = StepTensors.of(columns, matrices, steps)
        return None if tensors is None else (tensors, rule)

    def _take_torchs_step(self) -> None:
        """Take torch's step, unfused for groups that torch's kernels would not step correctly."""
        scale, found_inf = self._scaling().values()
        if found_inf is not None:
            for group in self.param_groups:
                if not all([self.state.get(p) for p in group["params"] if p.grad is not None]):
                    self._create_state(group)
        is_fused = [bool(g.get("fused")) and self._torch_can_fuse(g) for g in self.param_groups]
        if found_inf is not None and not all(is_fused):  # only fused steps of torch support GradScaler
            if found_inf:
                return
            for p in [p for g in self.param_groups for p in g["params"] if p.grad is not None]:
                p.grad = p.grad if scale is None else p.grad / scale.to(p.grad.device)
            self.found_inf = self.grad_scale = None  # GradScaler deletes them after the step
        with torch.set_grad_enabled(cast(Any, self).defaults["differentiable"]):
            for group, own in zip(self.param_groups, is_fused):
                self._step_group(group, fused=group.get("fused") and own)

    def _scaling(self) -> dict[str, Any]:
        """Return the arguments of torch's functions that GradScaler gives, in its steps."""
        return {key: getattr(self, key, None) for key in ("grad_scale", "found_inf")}

    def _torch_can_fuse(self, group: dict[str, Any]) -> bool:
        """Return True if the state belongs to the gradients and parameters as they are now."""
        pairs = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
        params = [p for p, _ in pairs]
        # If GradScaler skips a first step, torch's fused SGD leaves the momentum uninitialized. With
        # dampening no initial momentum gives torch's first step.
        if getattr(self, "found_inf", None) is not None and group.get("dampening"):
            return False
        if params and params[0].is_cuda:
            # Torch's kernels on a GPU raise for anything else that is wrong. They wait for this code.
            strided = torch.strided
            return all([g.layout is strided and g.stride() == p.stride() for p, g in pairs])
        states = [self.state.get(p, {}) for p in params]
        if any("step" in own and own["step"].device != p.device for p, own in zip(params, states)):
            return False
        keys = {key for own in states for key, t in own.items() if isinstance(t, Tensor)} - {"step"}
        moments = [[own[key] for own in states if isinstance(own.get(key), Tensor)] for key in keys]
        return are_alike([params, [grad for _, grad in pairs], *moments])

    # Implemented by each optimizer

    @abstractmethod
    def _create_state(self, group: dict[str, Any]) -> None:
        """Create the state that parameters with a gradient lack, for a step that may be skipped.

        With it a first step must do the same as torch's without state.
        """

    @abstractmethod
    def _rule_and_state(
        self, group: dict[str, Any], params: list[Tensor]
    ) -> tuple[Rule, list[list[Tensor]], list[Tensor]] | None:
        """Return the settings, moments and step counts of a fused step, None if no kernel has them.

        Args:
            group: parameter group.
            params: those with a gradient. Missing moments are created.
        """

    @abstractmethod
    def _step_group(self, group: dict[str, Any], *, fused: bool | None) -> None:
        """Take torch's step for a parameter group, by the function that torch's class calls.

        Args:
            group: parameter group.
            fused: argument of that function.
        """
