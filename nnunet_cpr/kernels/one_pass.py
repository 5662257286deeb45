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
    when the parameter was changed in between, as far as torch's version counter tells. A pass serves
    as long as the parameters stay where they are; the optimizer makes another when they have moved.
    """

    def __init__(self, optimizer: CPROptimizer) -> None:
        self.optimizer = optimizer
        self.matrices: list[Tensor] = optimizer.cpr.parameters
        self.matrix_of = {id(p): j for j, p in enumerate(self.matrices)}
        self._known_for: list[int] | None = None  # versions of the parameters
        self.reused_measures = 0
        """Steps whose measure was known from the step before."""

    def covers_this_step(self) -> bool:
        """Whether the parameters, their gradients and the settings are such as this pass can take."""
        groups = self.optimizer.param_groups
        # Weight decay can only be on parameters that CPR leaves alone.
        if not all(
            g["fused"] and g["weight_decay"] == 0 and self.optimizer.allows_one_pass(g) for g in groups
        ):
            return False
        params = [p for group in groups for p in group["params"]]
        grads = [(p.grad, p.dtype) for p in params]
        return all(g is None or (g.dtype is dtype and g.layout is torch.strided) for g, dtype in grads)

    # What CPR asks before the step

    def measure(self) -> Tensor:
        """The measure of the parameters as they are now, float32 ``[J]``."""
        if not self._is_known():
            return self._measure()
        self.reused_measures += 1
        return self._known_measure()

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
        torch.autograd.graph.increment_version(params)  # no kernel does it, nor torch's fused CPU steps
        self._known_for = self._now()

    # What a backend is made of

    def _measure(self) -> Tensor:
        """Take the measure of all matrices anew."""
        raise NotImplementedError

    def _known_measure(self) -> Tensor:
        """The measure after the step before."""
        raise NotImplementedError

    def _step(self, multiplier: Tensor) -> None:
        raise NotImplementedError


def laid_out_like(p: Tensor, t: Tensor) -> Tensor:
    """``t`` with its elements in the order of those of ``p``, which fused steps take for granted."""
    if t.shape != p.shape or t.stride() == p.stride():
        return t
    if all(a == b for a, b, n in zip(t.stride(), p.stride(), p.shape) if n > 1):
        return t
    return torch.empty_like(p, dtype=t.dtype).copy_(t) if is_dense(p) else t
