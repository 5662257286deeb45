"""Interface of the backends of fused steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor

from nnunet_cpr._row_norms import is_dense
from nnunet_cpr.fused._memory import Memory, describe, has_same_layout, overlap
from nnunet_cpr.fused._tables import GRAD, PARAM


@dataclass(frozen=True)
class Rule:
    """Settings of an optimizer step."""

    adam: bool
    lr: float | Tensor
    beta1: float
    """Adam's beta1, or SGD's momentum."""
    beta2: float = 0.0
    eps: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass(eq=False)
class Layout:
    """Memory layout of the tensors of a parameter group's step.

    It is the same object as long as nothing changes, so that all that follows from it is computed once.

    Attributes:
        params: the parameters.
        matrices: index j of each parameter among the regularized ones, -1 for the others.
        columns: layout of the parameters, the gradients, each state and the step counts.
    """

    params: list[Tensor]
    matrices: list[int]
    columns: list[Memory]


@dataclass
class GroupStep:
    """Tensors that the step of one parameter group reads and writes; of DTensors the local tensors.

    Attributes:
        state: SGD's momentum, or Adam's first, second and maximum second moments; a list may be empty.
        steps: Adam's step counts.
        matrices: index j of each parameter among the regularized ones, -1 for the others.
        layout: set by :meth:`read_layout`.
    """

    rule: Rule
    params: list[Tensor]
    grads: list[Tensor]
    state: list[list[Tensor]]
    steps: list[Tensor]
    matrices: list[int]
    layout: Layout = field(init=False)

    @property
    def columns(self) -> list[Memory]:
        """Memory layout of ``params``, ``grads``, ``state`` and ``steps``."""
        return self.layout.columns

    def read_layout(self, before: Layout | None = None) -> bool:
        """Read the memory layout; return True if a kernel may access the tensors by address.

        Args:
            before: the layout of the previous step of this group, if this returned True then.
        """
        tensors = [self.params, self.grads, *self.state, self.steps]
        known = before.columns if before is not None else []
        columns = [describe(own, last) for own, last in zip_longest(tensors, known)]
        if before is not None and self.matrices is before.matrices and columns == known:
            self.layout = before
            return True
        if None in columns:
            return False
        self.layout = Layout(self.params, self.matrices, columns)  # type: ignore[arg-type]
        params, grads, *state, steps = self.columns
        return (
            all(has_same_layout(params, other) for other in (grads, *state) if other.addresses)
            and grads.dtypes == params.dtypes
            and (params in known or all(is_dense(p) for p in self.params))
            and all(n == 1 for n in map(torch.Size.numel, steps.shapes))
            and steps.devices == params.devices[: len(steps.devices)]
            and set(steps.dtypes) <= {torch.float32}
        )

    def has_one_dtype(self) -> bool:
        """Return True if the state has the parameters' dtypes, which torch's fused steps require."""
        params, _, *state = self.columns[:-1]
        return all(column.dtypes == params.dtypes for column in state if column.addresses)


def sample_stride(numel: int) -> int:
    """Return the distance between the elements of a matrix that are compared with those written last.

    These are all elements of a matrix of up to 1,023, several hundred of a larger one, and one in 2,039
    of the largest: more would cost too much. An odd distance spreads the samples over the columns.
    """
    return min(2039, numel // 512) | 1


class FusedBackend(ABC):
    """Fused step: optimizer update and decay of each matrix in one kernel.

    The kernel also computes the new sums of squares, which a regularization method may need in the next
    step. They are computed anew if a matrix was changed in between, according to its version counter,
    its address, or a sample of its elements, since writes through ``.data`` do not raise the version. A
    backend is valid as long as the matrices keep their sizes, dtypes and device.

    Args:
        matrices: regularized parameters; of DTensors the local tensors.
        device: device of all parameters.

    Attributes:
        dtypes: parameter dtypes that the kernels support.
        reused_measures: number of steps that used the sums of squares of the previous step, as far as
            the host knows.
    """

    dtypes: ClassVar[Mapping[torch.dtype, Any]]

    def __init__(self, matrices: Sequence[Tensor], device: torch.device) -> None:
        self.matrices = list(matrices)
        self.device = device
        self.sizes = [p.numel() for p in self.matrices]
        # Versions and addresses of the matrices that the sums belong to.
        self._sums_are_of: tuple[list[int], list[Any]] | None = None
        self._stepped: list[Memory] = []  # parameters of the last step, if they include all matrices
        self._supported: list[Memory] = []  # columns found supported last
        self.reused_measures = 0

    def supports(self, groups: Sequence[GroupStep], has_current_sums: bool) -> bool:
        """Return True if this backend can step the groups, whose ``read_layout()`` was True."""
        # The gradients have the dtypes and devices of the parameters, and are only read.
        columns = [c for g in groups for i, c in enumerate(g.columns) if i != GRAD]
        if columns != self._supported:
            for group in groups:
                params, _, *state = group.columns[:-1]
                if not set(params.dtypes) <= set(self.dtypes):
                    return False
                if not set(params.devices) <= {self.device}:
                    return False
                if not self.supports_state(params, [column for column in state if column.addresses]):
                    return False
            if overlap([c for g in groups for i, c in enumerate(g.columns[:-1]) if i != GRAD]):
                return False
            self._supported = columns
        return has_current_sums or self._can_sum()

    def supports_state(self, params: Memory, state: Sequence[Memory]) -> bool:
        """Return True if a kernel supports the dtypes of the state."""
        return all(column.dtypes == params.dtypes for column in state)

    def _can_sum(self) -> bool:
        memory = describe(self.matrices)
        return (
            memory is not None
            and set(memory.dtypes) <= set(self.dtypes)
            and set(memory.devices) <= {self.device}
            and all(is_dense(p) for p in self.matrices)
        )

    def sums_of_squares(self, reuse: bool) -> Tensor:
        """Return the sum of squares of each present matrix, float64 ``[J]``.

        Args:
            reuse: use the sums of the last step, which requires :meth:`has_current_sums`.
        """
        if not reuse:
            self._compute_partials()
        elif not self._refresh_partials():
            self.reused_measures += 1
        return self._add_partials()

    def discard_sums(self) -> None:
        """Discard the sums of squares, before a step that this backend does not take."""
        self._sums_are_of = None

    def has_current_sums(self, groups: Sequence[GroupStep]) -> bool:
        """Return True if no matrix has changed since the sums of squares were computed.

        Args:
            groups: the groups of the present step, whose ``read_layout()`` was True.
        """
        if self._sums_are_of is None:
            return False
        versions, addresses = self._sums_are_of
        if versions != self._versions():
            return False
        return self.has_stepped(groups) or addresses == self._addresses()

    def has_stepped(self, groups: Sequence[GroupStep]) -> bool:
        """Return True if the last step had the same parameters, and these include all matrices."""
        return bool(self._stepped) and self._stepped == [group.columns[PARAM] for group in groups]

    def _versions(self) -> list[int]:
        return [p._version for p in self.matrices]

    def _addresses(self) -> list[Any]:
        return [(p.data_ptr(), p.nbytes, p.untyped_storage().nbytes()) for p in self.matrices]

    def step(
        self,
        groups: Sequence[GroupStep],
        decay: Tensor,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Take an optimizer step that also subtracts a share of each matrix.

        Args:
            groups: all parameter groups, whose ``read_layout()`` was True.
            decay: share of each matrix to subtract, float32 ``[J]``.
            grad_scale: scale of ``GradScaler``; the gradients are unscaled in place.
            found_inf: flag of ``GradScaler``; if it is not 0, the step is skipped.
        """
        known, self._sums_are_of = self._sums_are_of, None  # until the step has succeeded
        self._step(groups, decay, grad_scale, found_inf)
        # Neither the kernels nor torch's fused CPU steps do this.
        torch.autograd.graph.increment_version([p for group in groups for p in group.params])
        if known is not None and self.has_stepped(groups):
            self._sums_are_of = self._versions(), known[1]
            return
        self._sums_are_of = self._versions(), self._addresses()
        stepped = {j for group in groups for j in group.matrices} - {-1}
        is_complete = len(stepped) == len(self.matrices)
        self._stepped = [group.columns[PARAM] for group in groups] if is_complete else []

    # Implemented by backends

    @abstractmethod
    def _compute_partials(self) -> None:
        """Compute the sums of squares of all chunks of the present matrices."""

    @abstractmethod
    def _refresh_partials(self) -> bool:
        """Compute the sums anew if sampled elements have changed since; return True if so.

        On a GPU, which the host does not wait for, only the affected matrices are computed anew, and the
        result is False.
        """

    @abstractmethod
    def _add_partials(self) -> Tensor:
        """Return the sums of the chunks as last computed, float64 ``[J]``."""

    @abstractmethod
    def _step(
        self,
        groups: Sequence[GroupStep],
        decay: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Decay and update all parameters, and compute the sums of squares of the chunks."""
