"""Step of an optimizer with an attached regularization method, fused where a kernel can take it."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from nnunet_cpr.cpr.attachment import attachments
from nnunet_cpr.cpr.method import RegularizationMethod
from nnunet_cpr.cpr.multipliers import Decays
from nnunet_cpr.cpr.regularized_parameters import Params
from nnunet_cpr.cpr.shards import has_same_placements, is_sharded, local_tensors
from nnunet_cpr.cpr.sums import is_dense
from nnunet_cpr.cpr.tensors import check_tensors
from nnunet_cpr.optimizers.groups import LoadsByName, torch_groups

_shape, _dtype, _device, _layout = map(attrgetter, ("shape", "dtype", "device", "layout"))
_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}


class GroupStep(NamedTuple):
    """Settings and tensors of a parameter group in a fused step.

    Attributes:
        rule: ``momentum``, ``nesterov`` or ``adam``.
        settings: lr, beta1 (SGD's momentum), beta2 and eps.
        columns: the parameters with a gradient, their gradients, and first and second moments, as far as
            the rule has them, alike in memory (:func:`_are_alike`); of DTensors the local tensors.
        matrices: index of each parameter among the regularized ones, -1 for others.
        steps: Adam's step counts.
    """

    rule: str
    settings: tuple[float, float, float, float]
    columns: list[list[Tensor]]
    matrices: list[int]
    steps: list[Tensor]


Kernel = Callable[[Sequence[GroupStep], Callable[[], Decays]], bool]
"""Function that takes a step in float32 and subtracts a share of each matrix on the way.

It returns False, and has done nothing, if it cannot step the tensors. Else it calls its second argument
once, which counts the step of the method and returns the shares.
"""


@lru_cache
def find_kernel(device: torch.device) -> Kernel | None:
    """Return the kernel for tensors on a device, None if there is none.

    There is none for GPUs. There the time of the host counts, which waits for the gradients in mixed
    precision and then lets the GPU wait: listing all tensors in Python takes longer than the separate
    correction, and torch's own fused step lists them in C++.

    Warns:
        UserWarning: Numba cannot compile a kernel on this machine.

    Example:
        >>> print(find_kernel(torch.device("meta")))
        None
    """
    if device.type != "cpu":
        return None
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


SWITCH = "NNUNET_CPR_FUSED"
"""Environment variable; 0 disables all fused steps."""


def is_enabled() -> bool:
    """Return True unless the environment variable ``NNUNET_CPR_FUSED`` disables fused steps.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"environment variable {SWITCH}: expected 0 or 1, got {value!r}")
    return value == "1"


class FusedStep(LoadsByName, ABC):
    """Step of an optimizer, beside its class in torch.

    A fused step corrects and steps in one kernel (:mod:`nnunet_cpr.optimizers.kernels`), if the attached
    method multiplies each matrix by one number (``RegularizationMethod.has_decay``). An unfused step is
    the method's correction followed by torch's step, which on a GPU is torch's fused one. Without a
    method, a step is torch's.
    """

    calls_attachment = True
    """True: a step calls the attachment, which needs no hook before it."""
    state: Any
    _find_kernel = staticmethod(find_kernel)  # an attribute, so that a trial can choose another
    # Defaults, which a copy has: torch copies groups and state only.
    _may_fuse = True
    _has_shards = True

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, *, fused: bool | None = None, **options: Any
    ) -> None:
        groups = torch_groups(params)
        torch_fused = fused  # torch's own fused steps; ours are allowed by _may_fuse
        if fused is None and not (options.get("foreach") or options.get("differentiable")):
            torch_fused = (is_enabled() and _torch_may_fuse(groups)) or None
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
        attachment = attachments.get(optimizer)
        if attachment is None or not attachment.begin_step(optimizer):
            self._take_torchs_step()
        # After a step that raised when its correction was done, the kernel would correct again.
        elif attachment.has_open_correction or not self._take_fused_step(attachment.method):
            attachment.correct(optimizer)  # which a hook after the step finishes
            self._take_torchs_step()
        return loss

    def _take_fused_step(self, method: RegularizationMethod) -> bool:
        """Take the step in a kernel; return False, with nothing done, if none can take it."""
        # GradScaler's tensors are left to torch's fused steps.
        if not (self._may_fuse and method.has_decay) or getattr(self, "found_inf", None) is not None:
            return False
        kernel = self._find_kernel(method.parameters[0].device)
        if kernel is None:
            return False
        index = {id(p): j for j, p in enumerate(method.parameters)}
        groups = []
        for group in self.param_groups:
            pairs = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
            if not pairs:
                continue
            own = self._group_step(group, pairs, index)
            if own is None:
                return False
            groups.append(own)
        return bool(groups) and kernel(groups, method.decays)

    def _group_step(
        self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]], index: dict[int, int]
    ) -> GroupStep | None:
        """Return settings and tensors of a group, None if a kernel cannot step it.

        Args:
            group: parameter group.
            pairs: its parameters with a gradient, and their gradients.
            index: index of each regularized parameter by its id.
        """
        if group.get("fused") is False or group.get("foreach"):
            return None
        params, grads = [p for p, _ in pairs], [grad for _, grad in pairs]
        if not all([self.state.get(p) for p in params]):
            check_tensors(cast(torch.optim.Optimizer, self), {})  # before it creates missing state
            if any(grad.layout is not torch.strided for grad in grads):
                return None  # torch's step creates it in another way
        own = self._rule_and_state(group, params)
        if own is None:
            return None
        rule, settings, moments, steps = own
        columns = [params, grads, *moments]
        matrices = [index.get(id(p), -1) for p in params]
        if self._has_shards:
            # A gradient may still be a partial sum over processes, which torch's step adds up.
            if not all(all(map(has_same_placements, params, column)) for column in columns):
                return None
            columns, steps = [local_tensors(column) for column in columns], local_tensors(steps)
        if not _are_alike(columns):
            return None
        return GroupStep(rule, settings, columns, matrices, steps)

    def _take_torchs_step(self) -> None:
        """Take torch's step, unfused for groups that its kernels would not step correctly."""
        is_fused = [bool(g.get("fused")) and self._torch_can_fuse(g) for g in self.param_groups]
        scaling = {key: getattr(self, key, None) for key in ("grad_scale", "found_inf")}
        scale, found_inf = scaling.values()
        if found_inf is not None and not all(is_fused):  # only fused steps of torch support GradScaler
            if found_inf:
                return
            for p in [p for g in self.param_groups for p in g["params"] if p.grad is not None]:
                p.grad = p.grad if scale is None else p.grad / scale.to(p.grad.device)
            self.found_inf = self.grad_scale = None  # GradScaler deletes them after the step
            scaling = dict.fromkeys(scaling)
        with torch.set_grad_enabled(cast(Any, self).defaults["differentiable"]):
            for group, own in zip(self.param_groups, is_fused):
                self._step_group(group, fused=group.get("fused") and own, **scaling)

    def _torch_can_fuse(self, group: dict[str, Any]) -> bool:
        """Return True if torch's fused step is right for a group, whose missing state is created."""
        if group.get("dampening"):  # with it no initial momentum gives torch's first step
            return False
        pairs = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
        is_strided = all([g.layout is torch.strided and g.stride() == p.stride() for p, g in pairs])
        if not is_strided:
            return False
        # Torch's fused SGD raises for a parameter that gets its first gradient later, and leaves the
        # momentum uninitialized if GradScaler skips a first step.
        if not all([self.state.get(p) for p, _ in pairs]):
            self._create_state(group)
        if all([p.is_cuda for p, _ in pairs]):  # the GPU waits for this code
            return True
        # Torch's kernels for the CPU do not check what they are given.
        for p, grad in pairs:
            state = self.state.get(p, {}).values()
            moments = [[t] for t in state if isinstance(t, Tensor) and t.ndim]  # no counts of steps
            if not _are_alike([[p], [grad], *moments]):
                return False
        return True

    # Implemented by each optimizer

    @abstractmethod
    def _create_state(self, group: dict[str, Any]) -> None:
        """Create the state that parameters with a gradient lack, for an equal first step of torch."""

    @abstractmethod
    def _rule_and_state(
        self, group: dict[str, Any], params: list[Tensor]
    ) -> tuple[str, tuple[float, float, float, float], list[list[Tensor]], list[Tensor]] | None:
        """Return rule, settings, moments and step counts of a :class:`GroupStep`, None without kernel.

        Args:
            group: parameter group.
            params: those with a gradient. Missing moments are created.
        """

    @abstractmethod
    def _step_group(self, group: dict[str, Any], **options: Any) -> None:
        """Take torch's step for a parameter group, by the function that torch's class calls.

        Args:
            group: parameter group.
            options: ``fused``, ``grad_scale`` and ``found_inf`` of that function.
        """


def _torch_may_fuse(groups: list[dict[str, Any]]) -> bool:
    """Return True if torch's fused steps support the parameters, which is the default here."""
    items = [item for group in groups for item in group["params"]]
    params = [item[1] if isinstance(item, tuple) else item for item in items]
    # torch's fused SGD in half precision on the CPU is wrong in versions up to 2.13.
    has_kernel = all(
        p.is_cuda or (p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64))
        for p in params
    )
    return has_kernel and _are_alike([params])


def _are_alike(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Return True if the tensors of each parameter have its shape, dtype, device and order in memory.

    False as well if one is not a plain tensor, or one whose elements are not dense in memory.

    Args:
        columns: parameters, and tensors of each of them in the same order.
    """
    tensors = [t for column in columns for t in column]
    if not set(map(type, tensors)) <= _PLAIN or set(map(_layout, tensors)) - {torch.strided}:
        return False
    if any(map(Tensor.is_neg, tensors)):  # torch negates it when it is read
        return False
    for attribute in _shape, _dtype, _device, Tensor.is_contiguous:
        expected = list(map(attribute, columns[0]))
        if any(list(map(attribute, column)) != expected for column in columns[1:]):
            return False
    if all(expected):  # contiguous
        return True
    # The order of the dimensions in memory; the stride of a dimension of size 1 means nothing.
    return all(map(is_dense, columns[0])) and all(
        own == wanted or n <= 1
        for column in columns[1:]
        for t, p in zip(column, columns[0])
        for own, wanted, n in zip(t.stride(), p.stride(), p.shape)
    )
