"""What every backend is: a measure that it may know already, and a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nnunet_cpr.row_norms import is_dense
from nnunet_cpr.sharding import is_sharded, local_parts

if TYPE_CHECKING:
    from nnunet_cpr.optim import CPROptimizer


@dataclass
class StepTensors:
    """What an optimizer step of one parameter group reads and writes, for each of its parameters."""

    params: list[Tensor]
    grads: list[Tensor]
    state: list[list[Tensor]]
    """The optimizer's state in the order in which torch's fused step takes it; a list may be empty.

    SGD: momentum. Adam: first, second and largest second moments, counts of steps.
    """


@dataclass(frozen=True)
class Rule:
    """The settings of an optimizer step beside the learning rate."""

    adam: bool
    beta1: float
    """Adam's, or SGD's momentum."""
    beta2: float = 0.0
    eps: float = 0.0
    nesterov: bool = False


class OnePass(ABC):
    """Takes the optimizer's step and CPR's correction for ``l2`` in one pass over the memory.

    While a parameter is at hand its new measure is taken, which the next step needs. It is forgotten
    when the parameter was changed in between, as far as torch's version counter tells. A pass serves
    as long as the parameters stay where they are; the optimizer makes another when they have moved.
    Of DTensors it takes what this process has.
    """

    dtypes: ClassVar[Container[torch.dtype]]
    """Of parameters that a kernel can step."""

    def __init__(self, optimizer: CPROptimizer) -> None:
        self.optimizer = optimizer
        self.matrices = local_parts(optimizer.cpr.parameters)
        self.matrix_of = {id(p): j for j, p in enumerate(self.matrices)}
        self._local = {id(p): local for p, local in zip(optimizer.cpr.parameters, self.matrices)}
        """Of the parameters, so that they are the same tensors in every step."""
        self._has_shards = any(is_sharded(p) for g in optimizer.param_groups for p in g["params"])
        self._known_for: list[int] | None = None  # versions of the parameters
        self.reused_measures = 0
        """Steps whose measure was known from the step before."""

    def covers_this_step(self) -> bool:
        """Whether the parameters, their gradients and the settings are such as this pass can take."""
        groups = self.optimizer.param_groups
        # torch has no fused SGD of DTensors. Weight decay can only be on what CPR leaves alone.
        if not all(
            (g["fused"] or self._has_shards)
            and g["weight_decay"] == 0
            and self.optimizer.allows_one_pass(g)
            for g in groups
        ):
            return False
        stepped = [p for group in groups for p in group["params"] if p.grad is not None]
        kinds = {(p.dtype, p.device) for p in stepped}
        device = self.matrices[0].device
        return all(dtype in self.dtypes and place == device for dtype, place in kinds) and all(
            _lie_alike(p, p.grad) for p in stepped
        )

    # What CPR asks before the step

    def measure(self) -> Tensor:
        """The measure of the parameters as they are now, float32 ``[J]``."""
        if self._is_known():
            self.reused_measures += 1
        else:
            self._measure()
        # Here, once in every step: processes that share a matrix may not agree on what is known.
        return self.optimizer.cpr.measure_of(self._sums_of_squares())

    def forget_measure(self) -> None:
        """A step is taken that this pass does not see."""
        self._known_for = None

    def _is_known(self) -> bool:
        return self._known_for is not None and self._known_for == self._now()

    def _now(self) -> list[int]:
        return [p._version for p in self.matrices]

    # The step

    def step(self, multiplier: Tensor) -> None:
        """The optimizer's step, with a correction by these multipliers, ``[J]``."""
        self._known_for = None  # unless all goes well
        self._step(multiplier)
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self._has_shards:
            params = [self._local_part(p) for p in params]
        torch.autograd.graph.increment_version(params)  # no kernel does it, nor torch's fused CPU steps
        self._known_for = self._now()

    def _local_part(self, p: Tensor) -> Tensor:
        """What this process has of a parameter."""
        if id(p) not in self._local:
            self._local[id(p)] = local_parts([p])[0]
        return self._local[id(p)]

    def columns(self, tensors: StepTensors) -> list[list[Tensor]]:
        """What a kernel reads and writes, in the order of the columns of its tables."""
        if not self._has_shards:
            return [tensors.params, tensors.grads, *tensors.state]
        params = [self._local_part(p) for p in tensors.params]
        return [params, local_parts(tensors.grads), *(local_parts(state) for state in tensors.state)]

    # What a backend is made of

    @abstractmethod
    def _measure(self) -> None:
        """Take the sums of squares anew."""

    @abstractmethod
    def _sums_of_squares(self) -> Tensor:
        """Of the matrices as last measured, in this step or in the one before: float64 ``[J]``."""

    @abstractmethod
    def _step(self, multiplier: Tensor) -> None:
        """Step and correct all parameters, and take the sums of squares of what comes out."""


def _lie_alike(p: Tensor, grad: Tensor | None) -> bool:
    """Whether a gradient is such as a kernel can read beside its parameter."""
    if grad is None:
        return True
    if grad.dtype is not p.dtype or grad.layout is not torch.strided:
        return False
    if not is_sharded(p):
        return True
    here, there = local_parts([p, grad])
    placed_alike = is_sharded(grad) and grad.placements == p.placements  # type: ignore[attr-defined]
    return placed_alike and here.stride() == there.stride()


def laid_out_like(p: Tensor, t: Tensor) -> Tensor:
    """``t`` with its elements in the order of those of ``p``, which fused steps take for granted."""
    if t.shape != p.shape or t.stride() == p.stride():
        return t
    if all(a == b for a, b, n in zip(t.stride(), p.stride(), p.shape) if n > 1):
        return t
    return torch.empty_like(p, dtype=t.dtype).copy_(t) if is_dense(p) else t
