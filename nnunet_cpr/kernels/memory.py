"""Description of tensors in memory, so that a kernel is given only addresses that it may use.

A kernel reaches a tensor by its address and believes what it is told of dtype, size and order of the
elements. Everything that it is told is therefore read from the tensors anew in every step: users, and
libraries, replace ``p.data``, move and cast models and change an optimizer's state between two steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import ge
from typing import NamedTuple

import torch
from torch import Tensor

from nnunet_cpr.row_norms import is_dense

_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}


class Memory(NamedTuple):
    """Where a list of tensors lies; each field has one entry for each tensor."""

    addresses: list[int]
    dtypes: list[torch.dtype]
    devices: list[torch.device]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]

    def part(self, indices: Sequence[int]) -> Memory:
        """Return the description of the tensors with these indices."""
        return Memory(*([field[i] for i in indices] for field in self))  # type: ignore[arg-type]


def describe(tensors: Sequence[Tensor]) -> Memory | None:
    """Return where the tensors lie; None if one has no memory of its own that holds all its elements.

    Such are tensor subclasses, sparse and meta tensors, lazily negated views, and tensors whose storage
    has been resized.
    """
    if not set(map(type, tensors)) <= _PLAIN:
        return None
    if any(t.layout is not torch.strided or t.is_neg() for t in tensors):
        return None
    addresses = [t.data_ptr() for t in tensors]
    sizes: list[int] = [t.nbytes for t in tensors]
    if 0 in addresses and any(size and not address for address, size in zip(addresses, sizes)):
        return None
    offsets = [t.storage_offset() for t in tensors]
    if any(offsets):
        sizes = [int(size + offset * t.itemsize) for size, offset, t in zip(sizes, offsets, tensors)]
    if not all(map(ge, [t.untyped_storage().nbytes() for t in tensors], sizes)):
        return None
    return Memory(
        addresses,
        [t.dtype for t in tensors],
        [t.device for t in tensors],
        [t.shape for t in tensors],
        [t.stride() for t in tensors],
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
