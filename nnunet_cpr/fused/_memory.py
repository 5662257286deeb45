"""Memory layout of tensors that kernels access by address.

A kernel cannot check the address, dtype, size and strides that it is given. They are therefore read from
the tensors in every step: users and libraries replace ``p.data``, move and cast models, and change the
state of an optimizer between two steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._row_norms import is_dense

_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}


@dataclass(eq=False)
class Memory:
    """Memory layout of a list of tensors; each field has one entry for each tensor.

    :func:`describe` returns the same object as long as nothing changes.

    Attributes:
        marks: values that reveal a change, see :func:`_marks`.
    """

    addresses: list[int]
    dtypes: list[torch.dtype]
    devices: list[torch.device]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    marks: list[tuple[Any, ...]]

    def part(self, indices: Sequence[int]) -> Memory:
        """Return the layout of the tensors with these indices."""
        return Memory(*([getattr(self, f.name)[i] for i in indices] for f in fields(self)))


def _marks(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return the values that are read from each tensor in every step.

    An address implies the device, and the size of the storage that all elements still exist.
    """
    return [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in tensors]


def describe(tensors: Sequence[Tensor], before: Memory | None = None) -> Memory | None:
    """Return the memory layout of the tensors, None if a kernel cannot access one of them.

    These are tensor subclasses, sparse and meta tensors, lazily negated views, and tensors whose storage
    was resized.

    Args:
        tensors: the tensors.
        before: result of the previous step, which is returned again if nothing has changed.
    """
    if not set(map(type, tensors)) <= _PLAIN:
        return None
    if not {t.layout for t in tensors} <= {torch.strided}:
        return None
    marks = _marks(tensors)
    if before is not None and before.marks == marks:
        return before
    if any(t.is_neg() for t in tensors):  # memory contains the negated elements
        return None
    for t, (address, _, _, _, stored) in zip(tensors, marks):
        if t.nbytes and (not address or stored < t.nbytes + t.storage_offset() * t.itemsize):
            return None
    return Memory(
        addresses=[address for address, *_ in marks],
        dtypes=[dtype for _, _, _, dtype, _ in marks],
        devices=[t.device for t in tensors],
        shapes=[shape for _, shape, *_ in marks],
        strides=[strides for _, _, strides, _, _ in marks],
        marks=marks,
    )


def is_truncated(t: Tensor) -> bool:
    """Return True if the storage of a strided tensor ends before its last element.

    torch's operations do not check this and access memory beyond the end.
    """
    if type(t) not in _PLAIN or t.layout is not torch.strided or t.is_meta or t.numel() == 0:
        return False
    last = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return t.untyped_storage().nbytes() < (last + 1) * t.itemsize


def has_same_layout(params: Memory, others: Memory) -> bool:
    """Return True if each tensor has its parameter's device, shape and memory order."""
    if others.devices != params.devices or others.shapes != params.shapes:
        return False
    return others.strides == params.strides or all(
        same_order(shape, a, b)
        for shape, a, b in zip(params.shapes, params.strides, others.strides)
        if a != b
    )


def same_order(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Return True if strides ``a`` and ``b`` mean the same memory order for a shape."""
    return all(i == j for i, j, n in zip(a, b, shape) if n > 1)


def overlap(columns: Sequence[Memory]) -> bool:
    """Return True if two of the tensors share memory."""
    spans = sorted(
        (address, address + shape.numel() * dtype.itemsize)
        for column in columns
        for address, shape, dtype in zip(column.addresses, column.shapes, column.dtypes)
        if address
    )
    return any(end > start for (_, end), (start, _) in itertools.pairwise(spans))


def in_memory_order(p: Tensor, t: Tensor) -> Tensor:
    """Return ``t`` with the memory order of ``p``.

    Returns:
        ``t`` itself if it has this order or cannot be read to its end, or if ``p`` has gaps.
    """
    if t.shape != p.shape or same_order(p.shape, p.stride(), t.stride()) or not is_dense(p):
        return t
    if is_truncated(t):
        return t
    return torch.empty_like(p, dtype=t.dtype, device=t.device).copy_(t)
