"""Sums of squares of many tensors, exact to about 1e-8 at the speed of one float32 norm.

One float32 norm over millions of elements can be off by 1e-4. Norms of short rows are not, and their
squares, one for a few thousand elements, are cheap to add up in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

_LONGEST_ROW = 8192
_SHORTEST_ROW = 512


@lru_cache(maxsize=4096)
def row_length(numel: int) -> int:
    """The length of all rows of a tensor, or of all but a last, shorter one."""
    if numel <= _LONGEST_ROW:
        return max(numel, 1)
    divisors = (n for n in range(_LONGEST_ROW, _SHORTEST_ROW - 1, -1) if numel % n == 0)
    return next(divisors, _LONGEST_ROW)


def rows(flat: Tensor, numel: int) -> Iterator[Tensor]:
    """Rows, ``[n, length]``, and what is left over, ``[less]``; one row alone is ``[numel]``.

    Args:
        flat: a tensor's elements, or a part of them that begins with a row.
        numel: how many the whole tensor has.
    """
    length = row_length(numel)
    whole = flat.numel() // length if numel > length else 0
    if whole:
        yield flat[: whole * length].view(whole, length)
    if flat.numel() > whole * length:
        yield flat[whole * length :]


class SumsOfSquares:
    """Of J tensors on the CPU, from their rows; the rows of one tensor must come in their order."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._norms: list[Tensor] = []
        self._owners: list[int] = []
        self._rows: list[int] = []  # for each owner, how many norms in a row are its

    def add(self, parts: Iterable[tuple[int, Tensor]]) -> None:
        """Measure parts of tensors: the tensor's number and what :func:`rows` gave."""
        single: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        for j, x in parts:
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            if x.ndim == 1:
                single.setdefault(dtype, []).append((j, x))
            else:
                self._norms.append(torch.linalg.vector_norm(x, dim=1, dtype=dtype))
                self._owners.append(j)
                self._rows.append(x.shape[0])
        for dtype, some in single.items():
            self._norms.append(torch.stack(torch._foreach_norm([x for _, x in some], dtype=dtype)))
            self._owners += [j for j, _ in some]
            self._rows += [1] * len(some)

    def total(self) -> Tensor:
        """The sums, float64 ``[J]``; 0 where nothing was added."""
        sums = torch.zeros(self._count, dtype=torch.float64)
        if not self._norms:
            return sums
        owners = torch.repeat_interleave(torch.tensor(self._owners), torch.tensor(self._rows))
        return sums.index_add_(0, owners, torch.cat(self._norms).double().square_())

    @property
    def added(self) -> Tensor | None:
        """Of which tensors something was added, bool ``[J]``; None where it is all of them."""
        owners = set(self._owners)
        if len(owners) == self._count:
            return None
        return torch.tensor([j in owners for j in range(self._count)])


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of each of J tensors on the CPU, float64 ``[J]``."""
    sums = SumsOfSquares(len(tensors))
    sums.add((j, part) for j, t in enumerate(tensors) for part in rows(flat_in_memory(t), t.numel()))
    return sums.total()


def flat_in_memory(t: Tensor) -> Tensor:
    """All elements as one dimension: a view if they lie densely, channels-last too, else a copy."""
    if t.is_contiguous():
        return t.view(-1)
    return _in_memory_order(t).reshape(-1)


def is_dense(t: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order of the dimensions."""
    return t.is_contiguous() or _in_memory_order(t).is_contiguous()


def _in_memory_order(t: Tensor) -> Tensor:
    return t.permute(sorted(range(t.ndim), key=t.stride().__getitem__, reverse=True))
