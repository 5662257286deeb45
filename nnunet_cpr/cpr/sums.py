"""Accurate sums of squares of many tensors, at the speed of one norm in float32.

On the CPU a float32 norm over millions of elements can be off by 1e-4. Norms of short rows are accurate,
and adding up their squares in float64 is cheap: sums are exact to about 1e-8, and to 2e-5 where all
elements are equal. On a GPU torch's norm of a list adds at most 128 squares in a row, then such sums in
trees, and is exact to 2e-6 (``tests/cpr/test_sums.py`` in the same order, ``tests/test_gpu.py``).
Float64 would be slow on GPUs with few units for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_MAX_ROW = 8192
_MIN_ROW = 512


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each of J tensors, ``[J]`` on the device of the first of them.

    It is in float64 where the device has it, and does not wait for a GPU.

    Example:
        >>> sums_of_squares([torch.ones(2, 2), torch.ones(4, 4)]).tolist()
        [4.0, 16.0]
    """
    if all(t.device.type == "cpu" for t in tensors):
        sums = [_sum_on_cpu(t) for t in tensors]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64, device="cpu")
    return squared_norms(tensors)


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squares of torch's norms, in float64 of float64 tensors and else in float32."""
    kinds = {(t.device, t.dtype) for t in tensors}
    first = tensors[0].device
    exact = torch.float32 if first.type == "mps" else torch.float64
    if len(kinds) == 1:
        norms = torch._foreach_norm(list(tensors), dtype=_dtype_of_norm(tensors[0]))
        return torch.stack(norms).to(exact).square_()
    each = [torch.linalg.vector_norm(t, dtype=_dtype_of_norm(t)) for t in tensors]
    return torch.stack([norm.to(first, exact) for norm in each]).square_()


def _dtype_of_norm(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _sum_on_cpu(t: Tensor) -> Tensor:
    """Return the sum of squares of a tensor from norms of its rows in memory, in float64."""
    flat, dtype = flat_in_memory(t), _dtype_of_norm(t)
    length = _row_length(flat.numel())
    count = flat.numel() // length
    rows, rest = flat[: count * length].view(count, length), flat[count * length :]
    norms = [torch.linalg.vector_norm(rows, dim=1, dtype=dtype)]
    if rest.numel():
        norms.append(torch.linalg.vector_norm(rest, dtype=dtype).reshape(1))
    return torch.cat(norms).double().square_().sum()


@lru_cache(maxsize=4096)
def _row_length(numel: int) -> int:
    """Return the row length for a tensor; the last row may be shorter."""
    if numel <= _MAX_ROW:
        return max(numel, 1)
    divisors = (n for n in range(_MAX_ROW, _MIN_ROW - 1, -1) if numel % n == 0)
    return next(divisors, _MAX_ROW)


def flat_in_memory(t: Tensor) -> Tensor:
    """Return all elements as one dimension: a view if they are dense in memory, else a copy."""
    if t.is_contiguous():
        return t.view(-1)
    return _in_memory_order(t).reshape(-1)


def is_dense(t: Tensor) -> bool:
    """Return True if the elements are adjacent in memory, in any order of the dimensions."""
    return t.is_contiguous() or _in_memory_order(t).is_contiguous()


def _in_memory_order(t: Tensor) -> Tensor:
    return t.permute(sorted(range(t.ndim), key=t.stride().__getitem__, reverse=True))
