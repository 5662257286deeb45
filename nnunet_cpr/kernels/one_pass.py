"""What every backend is: a measure that it may know already, and a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nnunet_cpr.row_norms import is_dense

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


class OnePass:
    """Takes the optimizer's step and CPR's correction for ``l2`` in one pass over the memory.

    While a parameter is at hand its new measure is taken, which the next step needs. It is forgotten
    when the parameter was changed in between, as far as torch's version counter and the address of its
    memory tell.
    """

    device_type: str

    def __init__(self, optimizer: CPROptimizer) -> None:
        self.optimizer = optimizer
        self.matrices: list[Tensor] = optimizer.cpr.parameters
        self.matrix_of = {id(p): j for j, p in enumerate(self.matrices)}
        self._correction: Tensor | None = None
        self._where: list[int] = []  # the addresses of the parameters
        self._known_for: list[int] | None = None  # their versions
        self.reused_measures = 0
        """Steps whose measure was known from the step before."""

    def covers_this_step(self) -> bool:
        """Whether the parameters, their gradients and the settings are such as this pass can take."""
        groups = self.optimizer.param_groups
        # Weight decay can only be on parameters that CPR leaves alone.
        if not all(g["fused"] and g["weight_decay"] == 0 and self.optimizer.is_plain(g) for g in groups):
            return False
        params = [p for group in groups for p in group["params"]]
        where = [p.data_ptr() for p in params]
        if where != self._where:
            self._where = []
            if not all(self._covers(p) for p in params):
                return False
            self._where = where
            self._known_for = None
            self._forget_places()
        grads = [(p.grad, p.dtype) for p in params]
        return all(g is None or (g.dtype is dtype and g.layout is torch.strided) for g, dtype in grads)

    def _covers(self, p: Tensor) -> bool:
        return p.device.type == self.device_type

    # What CPR asks before the step

    def measure(self) -> Tensor:
        """The measure of the parameters as they are now, float32 ``[J]``."""
        if not self._is_known():
            return self._measure()
        self.reused_measures += 1
        return self._known_measure()

    def correct_in_step(self, multiplier: Tensor) -> None:
        """Leave the correction by these multipliers, ``[J]``, to the step that follows."""
        self._correction = multiplier

    def _is_known(self) -> bool:
        return self._known_for is not None and self._known_for == self._now()

    def _now(self) -> list[int]:
        return [p._version for p in self.matrices]

    # The step

    @property
    def is_due(self) -> bool:
        """Whether a correction waits for its step."""
        return self._correction is not None

    def step(self) -> None:
        """The step, with the correction that was left to it."""
        assert self._correction is not None
        correction, self._correction = self._correction, None
        self._known_for = None  # unless all goes well
        self._step(correction)
        self._known_for = self._now()

    # What a backend is made of

    def _measure(self) -> Tensor:
        """Take the measure of all matrices anew."""
        raise NotImplementedError

    def _known_measure(self) -> Tensor:
        """The measure after the step before."""
        raise NotImplementedError

    def _forget_places(self) -> None:
        """The parameters have moved in memory."""

    def _step(self, multiplier: Tensor) -> None:
        raise NotImplementedError


def laid_out_like(p: Tensor, t: Tensor) -> Tensor:
    """``t`` with its elements in the order of those of ``p``, which fused steps take for granted."""
    if t.shape != p.shape or t.stride() == p.stride():
        return t
    if all(a == b for a, b, n in zip(t.stride(), p.stride(), p.shape) if n > 1):
        return t
    return torch.empty_like(p, dtype=t.dtype).copy_(t) if is_dense(p) else t
