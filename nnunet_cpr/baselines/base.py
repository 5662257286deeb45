"""Base class of the comparison methods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import InitVar, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from nnunet_cpr.cpr.method import RegularizationMethod
from nnunet_cpr.cpr.regularized_parameters import Params
from nnunet_cpr.cpr.regularizers import L2
from nnunet_cpr.cpr.shards import is_sharded
from nnunet_cpr.refusals import positive_integer, positive_number

_COUNTS = ("start", "steps")
_MAY_BE_ZERO = ("weight_decay", "alpha", "start")


@dataclass(eq=False, repr=False)
class Baseline(RegularizationMethod):
    """Base class of the comparison methods, which regularize the same matrices as CPR.

    A comparison method is decoupled from momentum and Adam's moments, like AdamW's weight decay. It does
    not change a matrix without a gradient in a step (except for :class:`NormRescaling`), and a step that
    ``GradScaler`` skips does not count. Learning rates are those of the parameter groups at the step.

    A subclass is a dataclass, whose fields are the settings that a saved state belongs to, positive
    numbers. It implements :meth:`_around_step`.
    """

    params: InitVar[Params]

    state_key = "baseline"
    _scalar_state: ClassVar[tuple[str, ...]] = ()
    """Names of float32 scalars in the state, which are 0 at first."""
    _matrix_state: ClassVar[tuple[str, ...]] = ()
    """Names of float32 vectors in the state with a value for each matrix, which are 0 at first."""

    def __post_init__(self, params: Params) -> None:
        super().__init__(params)
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            check = positive_integer if name in _COUNTS else positive_number
            if value is not setting.default:
                setattr(self, name, check(name, value, allow_zero=name in _MAY_BE_ZERO))
        for name in self._scalar_state + self._matrix_state:
            shape = (len(self.names),) if name in self._matrix_state else ()
            self._state[name] = torch.zeros(shape, dtype=torch.float32, device=self._device())
        for name, p in zip(self.names, self.parameters):
            if is_sharded(p):
                raise TypeError(f"parameter {name!r}: expected a plain tensor, got a DTensor; use CPR")

    @property
    def title(self) -> str:  # type: ignore[override]
        return type(self).__name__

    def _around_step(self, found_inf: Tensor | None) -> Iterator[None]:
        """Change the matrices before the optimizer's update and, after a ``yield``, after it.

        Args:
            found_inf: as in :meth:`update_and_correct`.
        """
        raise NotImplementedError

    @torch.no_grad()
    def update_and_correct(self, found_inf: Tensor | None) -> Iterator[None]:
        step = self._around_step(found_inf)
        next(step)
        return step

    def _config(self) -> dict[str, Any]:
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}

    def _own_state_dict(self) -> dict[str, Any]:
        # All use the same key in the optimizer's state dict; the name keeps them apart.
        state = super()._own_state_dict()
        return {**state, "config": {"method": self.title, **state["config"]}}

    def _rates(self) -> Tensor:
        """Return the learning rate of each matrix, float32 ``[J]``."""
        assert self.optimizer is not None  # updates run only before its steps
        rate = {id(p): float(g["lr"]) for g in self.optimizer.param_groups for p in g["params"]}
        return self._constant("lr", [rate[id(p)] for p in self.parameters], torch.float32)

    def _taken(self, found_inf: Tensor | None) -> Tensor:
        """Return 1 if this step is taken and 0 if it is skipped, without waiting for a GPU."""
        step = self._state["step"]
        if found_inf is None:
            return torch.ones_like(step)
        return (found_inf.to(step.device).reshape(()) == 0).to(step.dtype)


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of all elements, a float32 scalar on the device of the first tensor."""
    return L2().sums(tensors).sum().sqrt().float()
