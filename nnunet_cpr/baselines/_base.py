"""Base class of the comparison methods."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr._attachment import RegularizationMethod, StepInputs
from nnunet_cpr._distributed import is_sharded
from nnunet_cpr.param_groups import Params
from nnunet_cpr.regularizers import L2


class Baseline(RegularizationMethod):
    """Base class of the comparison methods, which regularize the same matrices as CPR.

    A comparison method runs before the optimizer update. It is thus decoupled from momentum and Adam's
    moments, like AdamW's weight decay. It does not change a matrix without a gradient in a step (except
    for :class:`NormRescaling`), and a step that ``GradScaler`` skips does not count. Learning rates are
    those of the parameter groups at the step.
    """

    state_key = "baseline"

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        for name, p in zip(self.names, self.parameters):
            if is_sharded(p):
                raise TypeError(
                    f"parameter {name!r}: expected a plain tensor, got a DTensor, which {self.title} "
                    "does not support; use CPR"
                )

    @property
    def title(self) -> str:  # type: ignore[override]
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        # All use the same key in the optimizer's state dict; the name keeps them apart.
        state = super().state_dict()
        return {**state, "config": {"method": self.title, **state["config"]}}

    def _learning_rates(self) -> list[float | Tensor]:
        """Return the learning rate of each matrix."""
        assert self._optimizer is not None  # updates run only before its steps
        rate = {id(p): g["lr"] for g in self._optimizer.param_groups for p in g["params"]}
        return [rate[id(p)] for p in self.parameters]

    def _gradient_scale(self) -> Tensor | None:
        """Return the scale of the gradients, which ``GradScaler`` leaves to fused optimizers."""
        return getattr(self._optimizer, "grad_scale", None)

    def _with_gradient(self) -> list[tuple[int, Tensor, float | Tensor]]:
        """Return index, matrix and learning rate of the matrices with a gradient in this step."""
        return [
            (j, p, lr)
            for j, (p, lr) in enumerate(zip(self.parameters, self._learning_rates()))
            if p.grad is not None
        ]

    def _zeros_per_matrix(self) -> Tensor:
        """Return zeros for a state with one value for each matrix, float32 ``[J]``."""
        return torch.zeros(len(self.parameters), dtype=torch.float32, device=self._device())

    def _taken(self, found_inf: Tensor | None) -> Tensor:
        """Return 1 if this step is taken and 0 if it is skipped, without waiting for a GPU."""
        step = self._state["step"]
        if found_inf is None:
            return torch.ones_like(step)
        return (found_inf.to(step.device).reshape(()) == 0).to(step.dtype)


class DecayBaseline(Baseline):
    """Base class of comparison methods that multiply each matrix by one number in a step.

    A subclass implements :meth:`update_decay`, which fused and unfused steps call.
    """

    has_decay = True

    @torch.no_grad()
    def _update_and_correct(self, found_inf: Tensor | None) -> None:
        decay = self.update_decay(StepInputs(lambda: L2().sums(self.parameters)[0], found_inf))
        for j, p in enumerate(self.parameters):
            if p.grad is not None:
                shrink_(p, decay[j])

    def _rates(self) -> Tensor:
        """Return the learning rate of each matrix, float32 ``[J]``, without waiting for a GPU."""
        assert self._optimizer is not None  # updates run only before its steps
        one = torch.ones((), dtype=torch.float32, device=self._device())
        rates: dict[int, Tensor] = {}
        for group in self._optimizer.param_groups:
            lr = (one * group["lr"]).float().reshape(())
            rates.update((id(p), lr) for p in group["params"])
        return torch.stack([rates[id(p)] for p in self.parameters])


class UpdateBaseline(Baseline):
    """Base class of comparison methods that depend on the optimizer's update.

    The update is the difference of a matrix before and after the optimizer step, so it is known for any
    optimizer. The matrices are copied for the duration of the step.
    """

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._before: list[tuple[int, Tensor, float | Tensor]] = []

    @abstractmethod
    def _correct_update(self, index: int, before: Tensor, lr: float | Tensor, taken: Tensor) -> None:
        """Correct a matrix after the optimizer step.

        Args:
            index: index of the matrix.
            before: its values before the step.
            lr: its learning rate.
            taken: 1 if the step was taken, 0 if it was skipped.
        """

    def _step_hooks(self, optimizer: Optimizer) -> list[Any]:
        after_step = torch.compiler.disable(self._after_step)
        return [*super()._step_hooks(optimizer), optimizer.register_step_post_hook(after_step)]

    @torch.no_grad()
    def _update_and_correct(self, found_inf: Tensor | None) -> None:
        self._before = [(j, p.detach().clone(), lr) for j, p, lr in self._with_gradient()]
        self._state["step"] += self._taken(found_inf)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        taken = self._taken(getattr(optimizer, "found_inf", None))
        copies, self._before = self._before, []
        for index, before, lr in copies:
            self._correct_update(index, before, lr, taken)


def shrink_(p: Tensor, amount: Tensor) -> None:
    """Multiply ``p`` by ``1 - amount`` in place; ``amount`` is a scalar or has the shape of ``p``."""
    # As a difference, since 1 - amount loses digits of a small amount in half precision.
    p.addcmul_(p, amount.to(p), value=-1)


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all elements, a float32 scalar on the device of the first tensor."""
    return L2().sums(tensors).sum().sqrt().float()


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of each tensor, float32 ``[J]`` on the device of the first tensor."""
    return L2().sums(tensors)[0].sqrt().float()
