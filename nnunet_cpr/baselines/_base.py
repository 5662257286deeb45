"""What the methods share that CPR is compared with."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr._attachment import Attached
from nnunet_cpr._distributed import is_sharded
from nnunet_cpr.param_groups import Params
from nnunet_cpr.regularizers import L2


class Baseline(Attached):
    """A regularizer attached to any torch optimizer, on the same matrices and by the same rules as CPR.

    It runs before the optimizer moves, so what it computes is decoupled from momentum and from Adam's
    moments, as AdamW's weight decay is. A matrix without a gradient in a step is left alone in it (but
    by :class:`NormRescaling`), and a step that ``GradScaler`` skips is no step. The learning rate is the
    parameter group's at that step.
    """

    state_key = "baseline"

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        for name, p in zip(self.names, self.parameters):
            if is_sharded(p):
                raise TypeError(
                    f"parameter {name!r} is a DTensor, which CPR takes and {self.title} does not"
                )

    @property
    def title(self) -> str:  # type: ignore[override]
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        # All keep their state in one place; without its name one would take over another's.
        state = super().state_dict()
        return {**state, "config": {"method": self.title, **state["config"]}}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._follow_device()
        return super()._before_step(optimizer, args, kwargs)

    def _learning_rates(self) -> list[float | Tensor]:
        """Of each matrix, by its parameter group."""
        assert self._optimizer is not None  # the update runs from its hook alone
        rate = {id(p): g["lr"] for g in self._optimizer.param_groups for p in g["params"]}
        return [rate[id(p)] for p in self.parameters]

    def _gradient_scale(self) -> Tensor | None:
        """What the gradients are still multiplied with: ``GradScaler`` leaves it to fused optimizers."""
        return getattr(self._optimizer, "grad_scale", None)

    def _with_gradient(self) -> list[tuple[Tensor, float | Tensor]]:
        """The matrices that have a gradient in this step, each with its learning rate."""
        return [
            pair for pair in zip(self.parameters, self._learning_rates()) if pair[0].grad is not None
        ]

    def _taken(self, found_inf: Tensor | None) -> Tensor:
        """1 where this step is taken and 0 where it is skipped, without waiting for a GPU."""
        step = self._state["step"]
        if found_inf is None:
            return torch.ones_like(step)
        return (found_inf.to(step.device).reshape(()) == 0).to(step.dtype)


def shrink_(p: Tensor, amount: Tensor) -> None:
    """Theta <- (1 - amount) theta, in place; ``amount`` is a scalar or has the shape of theta."""
    # As a difference, since 1 - amount has few digits of the amount left in half precision.
    p.addcmul_(p, amount.to(p), value=-1)


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all elements together, a float32 scalar on the first one's device."""
    return L2().sums(tensors).sum().sqrt().float()


def checked_number(name: str, value: float, *, zero: bool = False) -> float:
    """A setting that must be positive and finite, or 0 where that is allowed.

    Raises:
        ValueError: it is not.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not (0 < value < math.inf or (zero and value == 0)):
        least = "not negative" if zero else "positive"
        raise ValueError(f"{name} must be {least} and finite, got {value!r}")
    return float(value)
