"""Sums of squares of many tensors, exact to about 1e-8 at the speed of one float32 norm.

One float32 norm over millions of elements can be off by 1e-4. Norms of short rows are not, and their
squares, one for a few thousand elements, are cheap to add up in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

_LONGEST_ROW = 8192
_SHORTEST_ROW = 512


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of each of J tensors on the CPU, float64 ``[J]``."""
    norms: list[Tensor] = []
    owners: list[int] = []
    counts: list[int] = []  # for each owner, how many norms in a row are its
    short: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for j, t in enumerate(tensors):
        dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
        for x in _rows(flat_in_memory(t)):
            if x.ndim == 1:
                short.setdefault(dtype, []).append((j, x))
            else:
                norms.append(torch.linalg.vector_norm(x, dim=1, dtype=dtype))
                owners.append(j)
                counts.append(x.shape[0])
    for dtype, some in short.items():
        norms.append(torch.stack(torch._foreach_norm([x for _, x in some], dtype=dtype)))
        owners += [j for j, _ in some]
        counts += [1] * len(some)
    sums = torch.zeros(len(tensors), dtype=torch.float64, device="cpu")
    if norms:
        whose, how_many = torch.tensor([owners, counts], device="cpu")
        places = torch.repeat_interleave(whose, how_many)
        sums.index_add_(0, places, torch.cat(norms).double().square_())
    return sums


def _rows(flat: Tensor) -> Iterator[Tensor]:
    """Rows, ``[n, length]``, and what is left over, ``[less]``; one row alone is ``[less]``, too."""
    length = _row_length(flat.numel())
    whole = flat.numel() // length if flat.numel() > length else 0
    if whole:
        yield flat[: whole * length].view(whole, length)
    if flat.numel() > whole * length:
        yield flat[whole * length :]


@lru_cache(maxsize=4096)
def _row_length(numel: int) -> int:
    """The length of all rows of a tensor, or of all but a last, shorter one."""
    if numel <= _LONGEST_ROW:
        return max(numel, 1)
    divisors = (n for n in range(_LONGEST_ROW, _SHORTEST_ROW - 1, -1) if numel % n == 0)
    return next(divisors, _LONGEST_ROW)


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
