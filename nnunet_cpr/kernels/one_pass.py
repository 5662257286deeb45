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
    moments: list[list[Tensor]]
    """Lists of what the optimizer keeps: momentum, or first, second and largest second moments."""
    steps: list[Tensor]
    """Adam's count of steps; empty for SGD."""


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

    While a parameter is at hand its new sum of squares is taken, which the next step's measure needs.
    It is forgotten when the parameter was changed in between, as far as torch's version counter and the
    address of its memory tell.
    """

    device_type: str

    def __init__(self, optimizer: CPROptimizer) -> None:
        self.optimizer = optimizer
        self.matrices: list[Tensor] = optimizer.cpr.parameters
        self.matrix_of = {id(p): j for j, p in enumerate(self.matrices)}
        self._correction: Tensor | None = None
        self._known_for: list[tuple[int, int]] | None = None
        self.reused_measures = 0
        """Steps whose measure was known from the step before."""

    def covers_this_step(self) -> bool:
        """Whether the parameters, their gradients and the settings are such as this pass can take."""
        return all(
            self._covers_settings(group) and all(self._covers(p) for p in group["params"])
            for group in self.optimizer.param_groups
        )

    def _covers_settings(self, group: dict) -> bool:
        # Weight decay can only be on parameters that CPR leaves alone.
        return bool(group["fused"]) and group["weight_decay"] == 0 and self.optimizer.is_plain(group)

    def _covers(self, p: Tensor) -> bool:
        grad = p.grad
        if p.device.type != self.device_type:
            return False
        return grad is None or (grad.layout == torch.strided and grad.dtype == p.dtype)

    # What CPR asks before the step

    def sums(self) -> Tensor:
        """The sums of squares of the parameters as they are now, ``[1, J]``."""
        if self._is_known():
            self.reused_measures += 1
        else:
            self._measure()
        return self._sums()[None]

    def correct_in_step(self, multiplier: Tensor) -> None:
        """Leave the correction by these multipliers, ``[J]``, to the step that follows."""
        self._correction = multiplier

    def _is_known(self) -> bool:
        return self._known_for is not None and self._known_for == self._now()

    def _now(self) -> list[tuple[int, int]]:
        return [(p._version, p.data_ptr()) for p in self.matrices]

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

    def _measure(self) -> None:
        """Take the sums of squares of all matrices anew."""
        raise NotImplementedError

    def _sums(self) -> Tensor:
        """The sums of squares taken last, float64 ``[J]``."""
        raise NotImplementedError

    def _step(self, multiplier: Tensor) -> None:
        raise NotImplementedError


def laid_out_like(p: Tensor, t: Tensor) -> Tensor:
    """``t`` with its elements in the order of those of ``p``, which fused steps take for granted."""
    if t.stride() == p.stride() or t.layout != torch.strided or t.shape != p.shape:
        return t
    if all(a == b for a, b, n in zip(t.stride(), p.stride(), p.shape) if n > 1):
        return t
    return torch.empty_like(p, dtype=t.dtype).copy_(t) if is_dense(p) else t
