"""Sums of squares of many tensors, exact to about 1e-8 at the speed of one float32 norm.

One float32 norm over millions of elements can be off by 1e-4. Norms of short rows are not, and their
squares, one for a few thousand elements, are cheap to add up in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

_LONGEST_ROW = 8192
_SHORTEST_ROW = 512
_ROW = 4096  # where no length between the two divides the number of elements

Part = tuple[Tensor, Tensor]
"""Rows, ``[rows, length]``, or one row, ``[length]``; and where their norms go, ``[rows]``."""


@lru_cache(maxsize=4096)
def row_length(numel: int) -> int:
    """The length of all rows of a tensor, or of all but a last, shorter one."""
    if numel <= _LONGEST_ROW:
        return max(numel, 1)
    divisors = (n for n in range(_LONGEST_ROW, _SHORTEST_ROW - 1, -1) if numel % n == 0)
    return next(divisors, _ROW)


class RowNorms:
    """The norms of the rows of J tensors on the CPU; a tensor's rows may be taken part by part."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._lengths = [row_length(t.numel()) for t in tensors]
        rows = [-(-t.numel() // length) for t, length in zip(tensors, self._lengths)]
        self._first = [0, *accumulate(rows)]
        wide = any(t.dtype == torch.float64 for t in tensors)
        self._dtype = torch.float64 if wide else torch.float32
        self._norms = torch.zeros(self._first[-1], dtype=self._dtype)
        self._rows = torch.tensor(rows)

    def parts(self, j: int, flat: Tensor, start: int = 0) -> list[Part]:
        """What to :meth:`take` for the elements of tensor j from ``start`` on, the first of a row."""
        length = self._lengths[j]
        first = self._first[j] + start // length
        whole = flat.numel() // length
        end = first + whole
        parts = []
        if whole == 1:
            parts = [(flat[:length], self._norms[first:end])]
        elif whole:
            parts = [(flat[: whole * length].view(whole, length), self._norms[first:end])]
        if flat.numel() > whole * length:
            parts.append((flat[whole * length :], self._norms[end : end + 1]))
        return parts

    def take(self, parts: Iterable[Part]) -> None:
        """Measure those rows as they are now."""
        single: list[Part] = []
        for x, out in parts:
            if x.ndim == 1:
                single.append((x, out))
            else:
                torch.linalg.vector_norm(x, dim=1, dtype=self._dtype, out=out)
        if single:
            norms = torch._foreach_norm([x for x, _ in single], dtype=self._dtype)
            torch._foreach_copy_([out[0] for _, out in single], norms)

    def sums_of_squares(self) -> Tensor:
        """Of each tensor, from the norms taken last, float64 ``[J]``."""
        owner = torch.repeat_interleave(self._rows)
        sums = torch.zeros(len(self._lengths), dtype=torch.float64)
        return sums.index_add_(0, owner, self._norms.double().square())


def flat_in_memory(t: Tensor) -> Tensor:
    """All elements as one dimension: a view if they lie densely, channels-last too, else a copy."""
    if t.is_contiguous():
        return t.view(-1)
    order = sorted(range(t.ndim), key=t.stride().__getitem__, reverse=True)
    return t.permute(order).reshape(-1)


def is_dense(t: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order of the dimensions."""
    if t.is_contiguous():
        return True
    order = sorted(range(t.ndim), key=t.stride().__getitem__, reverse=True)
    return t.permute(order).is_contiguous()


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of each of J tensors on the CPU, float64 ``[J]``."""
    rows = RowNorms(tensors)
    rows.take(part for j, t in enumerate(tensors) for part in rows.parts(j, flat_in_memory(t)))
    return rows.sums_of_squares()
