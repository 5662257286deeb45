"""Memory layout of tensors that kernels access by address.

A kernel cannot check the address, dtype, size and strides that it is given. They are therefore read from
the tensors in every step: users and libraries replace ``p.data``, move and cast models, and change the
state of an optimizer between two steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._row_norms import is_dense

try:
    # torch.compile's check of its inputs: reading the same properties in Python takes five times as
    # long, which many tensors would turn into a third of a step. It is private; without it, everything
    # is read anew in every step.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment,misc]

_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}


@dataclass(eq=False)
class Memory:
    """Memory layout of a list of tensors; each list has one entry for each tensor.

    :func:`describe` returns the same object as long as nothing changes.

    Attributes:
        places: address and size of the storage in bytes of each tensor in turn.
        guards: check of all properties but the places; None if torch does not have it.
    """

    places: list[int]
    dtypes: list[torch.dtype]
    devices: list[torch.device]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    guards: Any = None

    @cached_property
    def addresses(self) -> list[int]:
        """Addresses of the first elements."""
        return self.places[::2]

    @cached_property
    def distinct_dtypes(self) -> list[torch.dtype]:
        """Dtypes without repetitions, in the order of the tensors."""
        return list(dict.fromkeys(self.dtypes))

    def has_properties_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if the tensors have all these properties, except perhaps the places."""
        same_count = len(tensors) == len(self.dtypes)
        return same_count and self.guards is not None and self.guards.check(*tensors)

    def part(self, indices: Sequence[int]) -> Memory:
        """Return the layout of the tensors with these indices."""
        return Memory(
            places=[place for i in indices for place in self.places[2 * i : 2 * i + 2]],
            dtypes=[self.dtypes[i] for i in indices],
            devices=[self.devices[i] for i in indices],
            shapes=[self.shapes[i] for i in indices],
            strides=[self.strides[i] for i in indices],
        )


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Return the address and the size of the storage of each tensor in turn.

    The size shows that all elements still exist. One pass reads both: after a step, tensor objects are
    no longer in the processor's caches.
    """
    return [place for t in tensors for place in (t.data_ptr(), t.untyped_storage().nbytes())]


def describe(tensors: Sequence[Tensor], before: Memory | None = None) -> Memory | None:
    """Return the memory layout of the tensors, None if a kernel cannot access one of them.

    These are tensor subclasses, sparse and meta tensors, lazily negated views, and tensors whose storage
    was resized.

    Args:
        tensors: the tensors.
        before: result of the previous step, which is returned again if nothing has changed.
    """
    known = before if before is not None and before.has_properties_of(tensors) else None
    if known is None:
        if not set(map(type, tensors)) <= _PLAIN:
            return None
        if not {t.layout for t in tensors} <= {torch.strided}:
            return None
        if any(t.is_neg() for t in tensors):  # memory contains the negated elements
            return None
    places = _places(tensors)
    if known is not None and known.places == places:
        return known
    for t, address, stored in zip(tensors, places[::2], places[1::2]):
        if t.nbytes and (not address or stored < t.nbytes + t.storage_offset() * t.itemsize):
            return None
    if known is not None:
        return replace(known, places=places)
    guards = None
    if TensorGuards is not None:
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return Memory(
        places=places,
        dtypes=[t.dtype for t in tensors],
        devices=[t.device for t in tensors],
        shapes=[t.shape for t in tensors],
        strides=[t.stride() for t in tensors],
        guards=guards,
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
