"""Interface of the backends: a measure that may be known already, and a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from nnunet_cpr._row_norms import is_dense
from nnunet_cpr.fused._memory import Memory, describe, lie_alike, overlap


@dataclass(frozen=True)
class Rule:
    """The settings of an optimizer step."""

    adam: bool
    lr: float | Tensor
    beta1: float
    """Adam's, or SGD's momentum."""
    beta2: float = 0.0
    eps: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass
class GroupStep:
    """Tensors that an optimizer step of one parameter group reads and writes.

    Of DTensors these are the parts that this process has.
    """

    rule: Rule
    params: list[Tensor]
    grads: list[Tensor]
    state: list[list[Tensor]]
    """SGD: momentum. Adam: first, second and largest second moments. A list may be empty."""
    steps: list[Tensor]
    """Adam's counts of steps."""
    matrices: list[int]
    """The number j of each parameter among the regularized ones, -1 for the others."""
    columns: list[Memory] = field(default_factory=list)
    """Memory layout of ``params``, ``grads``, ``state`` and ``steps``, as :meth:`look` found it."""

    def look(self, before: Sequence[Memory] = ()) -> bool:
        """Look where the tensors lie; return True if a kernel may reach them by their addresses.

        Args:
            before: the columns of the group in the step before, for which the answer was True.
        """
        tensors = [self.params, self.grads, *self.state, self.steps]
        known = before if len(before) == len(tensors) else [None] * len(tensors)
        columns = [describe(own, last) for own, last in zip(tensors, known)]
        if None in columns or any([grad.is_neg() for grad in self.grads]):  # a view of imaginary parts
            return False
        self.columns = columns  # type: ignore[assignment]
        if all(now is last for now, last in zip(columns, known)):
            return True
        params, grads, *state, steps = self.columns
        return (
            all(lie_alike(params, other) for other in (grads, *state) if other.addresses)
            and grads.dtypes == params.dtypes
            and all(is_dense(p) for p in self.params)
            and all(n == 1 for n in map(torch.Size.numel, steps.shapes))
            and steps.devices == params.devices[: len(steps.devices)]
            and set(steps.dtypes) <= {torch.float32}
        )

    def has_one_dtype(self) -> bool:
        """Return True if the state has the parameters' dtypes, as torch's fused steps need it."""
        params, _, *state = self.columns[:-1]
        return all(column.dtypes == params.dtypes for column in state if column.addresses)


class OnePass(ABC):
    """The optimizer's step and CPR's correction for ``l2`` in one pass over the memory.

    While a parameter is at hand its new sum of squares is taken, which the next step's measure needs. It
    is forgotten when the parameter was changed in between, as far as torch's version counter and the
    address tell. A backend serves as long as the matrices keep their sizes, dtypes and device.

    Args:
        matrices: the regularized parameters; of DTensors the parts that this process has.
        device: where all parameters are.
    """

    dtypes: ClassVar[Mapping[torch.dtype, Any]]
    """Of parameters that a kernel can step."""

    def __init__(self, matrices: Sequence[Tensor], device: torch.device) -> None:
        self.matrices = list(matrices)
        self.device = device
        self.sizes = [p.numel() for p in self.matrices]
        self.made_for = [(p.numel(), p.dtype, p.device) for p in self.matrices]
        self._known_for: list[Any] | None = None  # how the matrices were when they were measured
        self._covered: list[Memory] = []  # the columns that were looked at last
        self.reused_measures = 0
        """Steps whose measure was known from the step before."""

    def covers(self, groups: Sequence[GroupStep]) -> bool:
        """Return True if this backend can step the groups, whose ``look()`` was True."""
        columns = [column for group in groups for column in group.columns]
        if columns != self._covered:
            for group in groups:
                params, _, *state = group.columns[:-1]
                if not set(params.dtypes) <= set(self.dtypes):
                    return False
                if not set(params.devices) <= {self.device}:
                    return False
                if not self.takes_state(params, [column for column in state if column.addresses]):
                    return False
            if overlap([c for g in groups for i, c in enumerate(g.columns[:-1]) if i != 1]):
                return False
            self._covered = columns
        return self._is_known() or self._can_measure()

    def is_outdated(self) -> bool:
        """Return True if a matrix has another size or dtype, or has moved to another device."""
        return not self._is_known() and self.made_for != [
            (p.numel(), p.dtype, p.device) for p in self.matrices
        ]

    def takes_state(self, params: Memory, state: Sequence[Memory]) -> bool:
        """Return True if a kernel can step parameters with a state of these dtypes."""
        return all(column.dtypes == params.dtypes for column in state)

    def _can_measure(self) -> bool:
        where = describe(self.matrices)
        return (
            where is not None
            and set(where.dtypes) <= set(self.dtypes)
            and set(where.devices) <= {self.device}
            and all(is_dense(p) for p in self.matrices)
        )

    def sums_of_squares(self) -> Tensor:
        """Return the sum of squares of each matrix as it is now, float64 ``[J]``."""
        if self._is_known():
            self.reused_measures += 1
        else:
            self._measure()
        return self._sums_of_squares()

    def forget_measure(self) -> None:
        """Forget the sums of squares, before a step that this backend does not see."""
        self._known_for = None

    def _is_known(self) -> bool:
        return self._known_for is not None and self._known_for == self._now()

    def _now(self) -> list[Any]:
        return [(p._version, p.data_ptr(), p.nbytes) for p in self.matrices]

    def step(
        self,
        groups: Sequence[GroupStep],
        multiplier: Tensor,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Take the optimizer's step with a correction by the multipliers.

        Args:
            groups: all parameter groups, whose ``look()`` was True.
            multiplier: lambda of each matrix, float32 ``[J]``.
            grad_scale: GradScaler's scale of the gradients, which are unscaled in place.
            found_inf: GradScaler's flag; not 0 where the step has to be skipped.
        """
        self._known_for = None  # unless all goes well
        self._step(groups, multiplier, grad_scale, found_inf)
        # No kernel does it, nor do torch's fused CPU steps.
        torch.autograd.graph.increment_version([p for group in groups for p in group.params])
        self._known_for = self._now()

    # What a backend is made of

    @abstractmethod
    def _measure(self) -> None:
        """Take the sums of squares anew."""

    @abstractmethod
    def _sums_of_squares(self) -> Tensor:
        """Return the sums of squares as last taken, in this step or the one before, float64 ``[J]``."""

    @abstractmethod
    def _step(
        self,
        groups: Sequence[GroupStep],
        multiplier: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Step and correct all parameters, and take the sums of squares of what comes out."""
