"""Interface of the backends of fused steps, and the tensors that they step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from nnunet_cpr._row_norms import is_dense

PARAM, GRAD, FIRST, SECOND, LARGEST, STEP = range(6)
"""Columns of a kernel's table of addresses; FIRST is SGD's momentum or Adam's first moment."""
COLUMNS = 6

_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}


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


@dataclass
class GroupStep:
    """Tensors that the step of one parameter group reads and writes; of DTensors the local tensors.

    Attributes:
        state: SGD's momentum, or Adam's first, second and maximum second moments; a list may be empty.
        steps: Adam's step counts.
        matrices: index j of each parameter among the regularized ones, -1 for the others.
    """

    rule: Rule
    params: list[Tensor]
    grads: list[Tensor]
    state: list[list[Tensor]]
    steps: list[Tensor]
    matrices: list[int]

    def is_regular(self) -> bool:
        """Return True if a kernel can access all tensors by their addresses.

        A kernel cannot check what is at an address. Users and libraries replace ``p.data``, move and
        cast models and change the state between two steps, so this is read in every step, in lists,
        which are faster than generators.
        """
        columns = [self.params, self.grads, *filter(None, self.state)]
        tensors = [*chain(*columns), *self.steps]
        return (
            set(map(type, tensors)) <= _PLAIN
            and {t.layout for t in self.grads} <= {torch.strided}
            and [t.dtype for t in self.grads] == [p.dtype for p in self.params]
            and len({t.device for t in tensors}) <= 1
            and _are_parallel(columns)
            and all([count.dtype == torch.float32 and count.numel() == 1 for count in self.steps])
        )

    def dtypes(self) -> list[tuple[torch.dtype, ...]]:
        """Return the dtypes of each parameter and its state."""
        columns = [self.params, *filter(None, self.state)]
        return list(zip(*([t.dtype for t in column] for column in columns)))

    def by_dtype(self) -> list[GroupStep]:
        """Return the tensors with the same dtypes of parameter and state as groups of their own."""
        kinds = self.dtypes()
        distinct = list(dict.fromkeys(kinds))
        if len(distinct) <= 1:
            return [self]

        def of_kind(column: list[Any], kind: Any) -> list[Any]:
            return [value for value, own in zip(column, kinds) if own == kind]

        return [
            replace(
                self,
                params=of_kind(self.params, kind),
                grads=of_kind(self.grads, kind),
                state=[of_kind(column, kind) for column in self.state],
                steps=of_kind(self.steps, kind),
                matrices=of_kind(self.matrices, kind),
            )
            for kind in distinct
        ]

    def has_one_dtype(self) -> bool:
        """Return True if the state has the parameters' dtypes, which torch's fused steps require."""
        return all([len(set(row)) == 1 for row in set(self.dtypes())])

    def addresses(self) -> list[int]:
        """Return the table of addresses, one row of :data:`COLUMNS` for each parameter, 0 for none."""
        missing = [0] * len(self.params)
        columns = [[t.data_ptr() for t in column] for column in (self.params, self.grads, *self.state)]
        columns += [[]] * (STEP - len(columns)) + [[count.data_ptr() for count in self.steps]]
        return list(chain(*zip(*(column or missing for column in columns))))


def _are_parallel(columns: list[list[Tensor]]) -> bool:
    """Return True if all tensors are dense and have the shape and memory order of their parameter."""
    shapes = [p.shape for p in columns[0]]
    if any([[t.shape for t in column] != shapes for column in columns]):
        return False
    if all([t.is_contiguous() for t in chain(*columns)]):
        return True
    return (
        all(map(is_dense, columns[0]))
        and all(
            own == wanted or n <= 1  # the stride of a dimension of size 1 means nothing
            for column in columns[1:]
            for p, t in zip(columns[0], column)
            for own, wanted, n in zip(t.stride(), p.stride(), p.shape)
        )
    )


def share_memory(params: Sequence[Tensor]) -> bool:
    """Return True if two parameters share memory, to which threads of a kernel would write at once."""
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in params if p.numel())
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def sample_stride(numel: int) -> int:
    """Return the distance between the elements of a matrix that are compared with those written last.

    These are all elements of a matrix of up to 767, and about 400 of a larger one. A distance without
    common divisors with the size, and so with any dimension, spreads the samples over rows, columns and
    the elements of a convolution's kernels.
    """
    stride = max(numel // 384, 1)
    while math.gcd(stride, numel) > 1:
        stride += 1
    return stride


class FusedBackend(ABC):
    """Fused step: optimizer update and decay of each matrix in one kernel.

    The kernel also computes the new sums of squares, which a regularization method may need in the next
    step. They are computed anew if a matrix was changed in between, according to its version counter or
    a sample of its elements, since writes through ``.data`` do not raise the version. A backend is valid
    as long as the matrices keep their sizes, dtypes and device.

    Args:
        matrices: regularized parameters; of DTensors the local tensors.
        device: device of all parameters.

    Attributes:
        dtypes: parameter dtypes that the kernels support.
        needs_self_check: True if the kernels are compared with torch's unfused step at first use.
        reused_measures: number of steps that used the sums of squares of the previous step, as far as
            the host knows.
    """

    dtypes: ClassVar[Mapping[torch.dtype, Any]]
    needs_self_check: ClassVar[bool] = False

    def __init__(self, matrices: Sequence[Tensor], device: torch.device) -> None:
        self.matrices = list(matrices)
        self.device = device
        self.sizes = [p.numel() for p in self.matrices]
        self._summed: list[int] | None = None  # versions of the matrices that the sums belong to
        self.reused_measures = 0

    def supports(self, groups: Sequence[GroupStep]) -> bool:
        """Return True if this backend can step the groups, which must be regular."""
        for group in groups:
            if group.params and not (
                group.params[0].device == self.device and self._supports_dtypes(group)
            ):
                return False
        if {j for group in groups for j in group.matrices}.issuperset(range(len(self.matrices))):
            return True
        rest = GroupStep(Rule(False, 0, 0), self.matrices, self.matrices, [], [], [])
        return rest.is_regular() and self.matrices[0].device == self.device

    def _supports_dtypes(self, group: GroupStep) -> bool:
        kinds = set(group.dtypes())
        return all(kind[0] in self.dtypes and len(set(kind)) == 1 for kind in kinds)

    def sums_of_squares(self) -> Tensor:
        """Return the sum of squares of each present matrix, float64 ``[J]``."""
        if self._summed is None or self._summed != self._versions():
            self._compute_partials()
        elif not self._refresh_partials():
            self.reused_measures += 1
        return self._add_partials()

    def discard_sums(self) -> None:
        """Discard the sums of squares, before a step that this backend does not take."""
        self._summed = None

    def _versions(self) -> list[int]:
        return [p._version for p in self.matrices]

    def step(
        self,
        groups: Sequence[GroupStep],
        decay: Tensor,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Take an optimizer step that also subtracts a share of each matrix, after the sums.

        Args:
            groups: all parameter groups, which this backend supports.
            decay: share of each matrix to subtract, float32 ``[J]``.
            grad_scale: scale of ``GradScaler``; the gradients are unscaled in place.
            found_inf: flag of ``GradScaler``; if it is not 0, the step is skipped.
        """
        self._summed = None  # until the step has succeeded
        for group in groups:
            for launch in group.by_dtype() if group.params else ():
                self._step(launch, decay, grad_scale, found_inf)
        # Neither the kernels nor torch's fused CPU steps do this.
        torch.autograd.graph.increment_version([p for group in groups for p in group.params])
        self._summed = self._versions()

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
        launch: GroupStep,
        decay: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Decay and update parameters with the same dtypes, and compute the sums of their chunks."""
