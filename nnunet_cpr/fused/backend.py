"""Interface of the backends of fused steps, and the tensors that they step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nnunet_cpr._multipliers import Decays
from nnunet_cpr._row_norms import is_dense

PARAM, GRAD, FIRST, SECOND, STEP, NUMEL, MATRIX = range(7)
"""Rows of :attr:`Plan.table`; FIRST is SGD's momentum or Adam's first moment."""

_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}


@dataclass(frozen=True)
class Rule:
    """Settings of an optimizer step: Adam's, or SGD's with momentum ``beta1``."""

    adam: bool
    lr: float
    beta1: float
    beta2: float = 0.0
    eps: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class Plan:
    """Tensors that a kernel reads and writes.

    Attributes:
        params: the n parameters.
        table: int64 ``[7, n]``: for each parameter its address and those of its gradient, moments and
            step count (0 for none), its number of elements, and its index j among the regularized
            matrices (-1 for none).
        steps: Adam's step counts, float32.
        dtype, device: those of all parameters, gradients and moments.
    """

    params: list[Tensor]
    table: np.ndarray
    steps: Sequence[Tensor]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(
        cls,
        columns: Sequence[Sequence[Tensor]],
        matrices: Sequence[int],
        steps: Sequence[Tensor] = (),
    ) -> Plan | None:
        """Return the plan of parameters, None if a kernel must not access them by their addresses.

        Users and libraries replace ``p.data``, move and cast models, and change the state between two
        steps. So nothing is known from the step before: all tensors are read anew.

        Args:
            columns: the parameters, their gradients, and first and second moments, as far as a step has
                them; of DTensors the local tensors.
            matrices: index j of each parameter, -1 for those that are not regularized.
            steps: Adam's step counts.
        """
        layouts = common_layouts(columns)
        params = list(columns[0])
        if layouts is None or len({(dtype, device) for _, dtype, device, _ in layouts}) != 1:
            return None
        counts = {(type(t), t.dtype, t.device, t.numel()) for t in steps}
        if counts - {(Tensor, torch.float32, params[0].device, 1)}:
            return None
        addresses = [[t.data_ptr() for t in column] for column in columns]
        none = [0] * len(params)
        addresses += [none] * (STEP - len(columns))
        addresses.append([t.data_ptr() for t in steps] if steps else none)
        table = np.array([*addresses, [p.numel() for p in params], matrices], np.int64)
        return cls(params, table, steps, params[0].dtype, params[0].device)


def share_memory(plans: Sequence[Plan]) -> bool:
    """Return True if two parameters of a step share memory: threads would write to it at once."""
    end = 0
    for start, numel, size in sorted(
        (start, numel, plan.dtype.itemsize)
        for plan in plans
        for start, numel in plan.table[[PARAM, NUMEL]].T.tolist()
    ):
        if start < end:
            return True
        end = start + numel * size
    return False


def common_layouts(columns: Sequence[Sequence[Tensor]]) -> list[Any] | None:
    """Return shape, dtype, device and contiguity of each parameter if all its tensors are alike.

    None if they are not, or if a tensor is not a plain one whose elements are dense in memory.

    Args:
        columns: parameters, and tensors of each of them in the same order.
    """
    tensors = [t for column in columns for t in column]
    if not set(map(type, tensors)) <= _PLAIN or {t.layout for t in tensors} - {torch.strided}:
        return None
    if any(map(Tensor.is_neg, tensors)):  # torch negates it when it is read
        return None
    layouts = [[(t.shape, t.dtype, t.device, t.is_contiguous()) for t in column] for column in columns]
    if any(own != layouts[0] for own in layouts[1:]):
        return None
    # The order of the dimensions in memory; the stride of a dimension of size 1 means nothing.
    turned = [i for i, (_, _, _, is_contiguous) in enumerate(layouts[0]) if not is_contiguous]
    are_alike = all(is_dense(columns[0][i]) for i in turned) and all(
        own == wanted or n <= 1
        for column in columns[1:]
        for i in turned
        for own, wanted, n in zip(column[i].stride(), columns[0][i].stride(), column[i].shape)
    )
    return layouts[0] if are_alike else None


class Backend(ABC):
    """Kernels that take an optimizer's step and decay each matrix on the way.

    Attributes:
        dtypes: dtypes of parameters, gradients and moments that the kernels support.
    """

    dtypes: ClassVar[Collection[torch.dtype]]

    @abstractmethod
    def step(self, groups: Sequence[tuple[Plan, Rule]], decays: Decays) -> None:
        """Take an optimizer step that also subtracts a share of each matrix.

        Args:
            groups: the parameters with gradients, and the settings, of each parameter group.
            decays: share of each of the J matrices; matrices without a gradient are not in ``groups``.
        """
