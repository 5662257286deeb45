"""Description of tensors in memory, so that a kernel is given only addresses that it may use.

A kernel reaches a tensor by its address and believes what it is told of dtype, size and order of the
elements. Everything that it is told is therefore read from the tensors anew in every step: users, and
libraries, replace ``p.data``, move and cast models and change an optimizer's state between two steps.
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

    Objects are compared by identity: :func:`describe` returns the same one as long as nothing changes.
    """

    addresses: list[int]
    dtypes: list[torch.dtype]
    devices: list[torch.device]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    marks: list[tuple[Any, ...]]
    """Values by which a change is noticed, see :func:`_marks`."""

    def part(self, indices: Sequence[int]) -> Memory:
        """Return the description of the tensors with these indices."""
        return Memory(*([getattr(self, f.name)[i] for i in indices] for f in fields(self)))


def _marks(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return what is read of each tensor in every step.

    An address belongs to one device, and the same storage size means that all elements are still there.
    """
    return [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in tensors]


def describe(tensors: Sequence[Tensor], before: Memory | None = None) -> Memory | None:
    """Return where the tensors lie; None if one has no memory of its own that holds all its elements.

    Such are tensor subclasses, sparse and meta tensors, lazily negated views, and tensors whose storage
    has been resized.

    Args:
        tensors: the tensors.
        before: what was returned in the step before, which is returned again if nothing has changed.
    """
    if not set(map(type, tensors)) <= _PLAIN:
        return None
    if not {t.layout for t in tensors} <= {torch.strided}:
        return None
    marks = _marks(tensors)
    if before is not None and before.marks == marks:
        return before
    if any(t.is_neg() for t in tensors):  # its elements are the negatives of what is in memory
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


def is_cut_short(t: Tensor) -> bool:
    """Return True if the storage of a strided tensor ends before its last element.

    torch does not look for that: its own operations read and write past the end of such memory.
    """
    if type(t) not in _PLAIN or t.layout is not torch.strided or t.is_meta or t.numel() == 0:
        return False
    last = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return t.untyped_storage().nbytes() < (last + 1) * t.itemsize


def lie_alike(params: Memory, others: Memory) -> bool:
    """Return True if every tensor has its parameter's device, shape and order of elements."""
    if others.devices != params.devices or others.shapes != params.shapes:
        return False
    return others.strides == params.strides or all(
        same_order(shape, a, b)
        for shape, a, b in zip(params.shapes, params.strides, others.strides)
        if a != b
    )


def same_order(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Return True if strides ``a`` and ``b`` put the elements of such a tensor into one order."""
    return all(i == j for i, j, n in zip(a, b, shape) if n > 1)


def overlap(columns: Sequence[Memory]) -> bool:
    """Return True if two of the tensors share memory, so that a kernel must not write to both."""
    spans = sorted(
        (address, address + shape.numel() * dtype.itemsize)
        for column in columns
        for address, shape, dtype in zip(column.addresses, column.shapes, column.dtypes)
        if address
    )
    return any(end > start for (_, end), (start, _) in itertools.pairwise(spans))


def laid_out_like(p: Tensor, t: Tensor) -> Tensor:
    """Return ``t`` with its elements in the memory order of ``p``; itself if they are, or p has gaps."""
    if t.shape != p.shape or same_order(p.shape, p.stride(), t.stride()) or not is_dense(p):
        return t
    return torch.empty_like(p, dtype=t.dtype, device=t.device).copy_(t)
