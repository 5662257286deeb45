"""Tensors and settings of a fused step.

A fused step decays each matrix and updates the parameters in one kernel. :class:`StepTensors` lists the
tensors of a step. If they allow no list, or no kernel has the settings, the unfused step is taken: the
regularization method corrects, then torch's optimizer updates. The kernel is tested against it.

There is none for GPUs. There the time of the host counts, which waits for the gradients in mixed
precision and then lets the GPU wait: listing all tensors in Python takes longer than the separate
correction, and torch's own fused step lists them in C++.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from nnunet_cpr.cpr.sums import is_dense

PARAM, GRAD, FIRST, SECOND, STEP, NUMEL, MATRIX = range(7)
"""Rows of :attr:`StepTensors.table`; FIRST is SGD's momentum or Adam's first moment."""

_shape, _dtype, _device, _layout = map(attrgetter, ("shape", "dtype", "device", "layout"))
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
class StepTensors:
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
        cls, columns: Sequence[Sequence[Tensor]], matrices: Sequence[int], steps: Sequence[Tensor] = ()
    ) -> StepTensors | None:
        """Return the tensors of parameters, None if a kernel must not access them by their addresses.

        Users and libraries replace ``p.data``, move and cast models, and change the state between two
        steps. So nothing is known from the step before: all tensors are read anew.

        Args:
            columns: the parameters, their gradients, and first and second moments, as far as a step has
                them; of DTensors the local tensors.
            matrices: index j of each parameter, -1 for those that are not regularized.
            steps: Adam's step counts.
        """
        params = list(columns[0])
        if not are_alike(columns) or len({*map(_dtype, params)}) + len({*map(_device, params)}) != 2:
            return None
        counts = {(type(t), t.dtype, t.device, t.numel()) for t in steps}
        if counts - {(Tensor, torch.float32, params[0].device, 1)}:
            return None
        addresses = [list(map(Tensor.data_ptr, column)) for column in columns]
        none = [0] * len(params)
        addresses += [none] * (STEP - len(columns))
        addresses.append(list(map(Tensor.data_ptr, steps)) if steps else none)
        table = np.array([*addresses, list(map(Tensor.numel, params)), matrices], np.int64)
        return cls(params, table, steps, params[0].dtype, params[0].device)


def share_memory(listed: Sequence[StepTensors]) -> bool:
    """Return True if two parameters of a step share memory: threads would write to it at once."""
    spans: list[tuple[int, int]] = []
    for tensors in listed:
        starts = tensors.table[PARAM]
        ends = starts + tensors.table[NUMEL] * tensors.dtype.itemsize
        spans += zip(starts.tolist(), ends.tolist())
    spans.sort()
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def are_alike(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Return True if the tensors of each parameter have its shape, dtype, device and order in memory.

    False as well if one is not a plain tensor, or one whose elements are not dense in memory.

    Args:
        columns: parameters, and tensors of each of them in the same order.
    """
    tensors = [t for column in columns for t in column]
    if not set(map(type, tensors)) <= _PLAIN or set(map(_layout, tensors)) - {torch.strided}:
        return False
    if any(map(Tensor.is_neg, tensors)):  # torch negates it when it is read
        return False
    for attribute in _shape, _dtype, _device, Tensor.is_contiguous:
        expected = list(map(attribute, columns[0]))
        if any(list(map(attribute, column)) != expected for column in columns[1:]):
            return False
    if all(expected):  # contiguous
        return True
    # The order of the dimensions in memory; the stride of a dimension of size 1 means nothing.
    return all(map(is_dense, columns[0])) and all(
        own == wanted or n <= 1
        for column in columns[1:]
        for t, p in zip(column, columns[0])
        for own, wanted, n in zip(t.stride(), p.stride(), p.shape)
    )


SWITCH = "NNUNET_CPR_FUSED"
"""Environment variable; 0 disables all fused steps."""


def is_enabled() -> bool:
    """Return True unless the environment variable ``NNUNET_CPR_FUSED`` disables fused steps.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"environment variable {SWITCH}: expected 0 or 1, got {value!r}")
    return value == "1"
