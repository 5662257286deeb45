"""Fused step on the CPU in float32: a table of all tensors, a kernel compiled by Numba, its launch.

Users and libraries replace ``p.data``, move and cast models, and change the state between two steps. So
nothing is known from the step before: all tensors are listed anew.

A step is limited by memory bandwidth. Consecutive tensors form a batch: the squares of its matrices are
summed, their multipliers updated, and all its tensors decayed and stepped, before the next batch is
loaded. Most of what was summed is then still in the cache. Threads meet once for each batch.

Each loop over all elements is a function of slices of one chunk. Numba then knows that indices neither
wrap around nor leave the array, and vectorizes the loop.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numba.core.config
import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from nnunet_cpr.cpr.multipliers import LARGEST, Decays

PARAM, GRAD, FIRST, SECOND, STEP, NUMEL, MATRIX = range(7)
"""Rows of a table of the n parameters of a group, int64 ``[7, n]``: the addresses of each parameter, its
gradient, moments (FIRST is SGD's momentum) and step count, 0 for none; its number of elements, and its
index j among the regularized matrices, -1 for none."""

MOMENTUM, NESTEROV, ADAM = range(3)
"""Rules of :func:`step`."""
_RULES = {"momentum": MOMENTUM, "nesterov": NESTEROV, "adam": ADAM}

_LARGEST = np.float32(LARGEST)

_kernel = numba.njit(parallel=True, cache=True, error_model="numpy")
# Parts are inlined: else a process that compiles runs a part's own code, and one that loads a kernel
# from the cache the copy in there, which is optimized again and may round otherwise. All is IEEE
# arithmetic, except that a sum of squares may be reordered and contracted, always in the same way.
_part = numba.njit(forceinline=True, error_model="numpy")
_sum = numba.njit(forceinline=True, error_model="numpy", fastmath={"contract", "reassoc"})


@intrinsic
def _pointer(typing_context, address, start):
    """Return a pointer to the float32 with index ``start`` at ``address``."""
    pointer = types.CPointer(types.float32)

    def generate(context, builder, signature, values):
        return builder.gep(builder.inttoptr(values[0], context.get_value_type(pointer)), [values[1]])

    return pointer(types.int64, types.int64), generate


@_part
def _elements(table, row, tensor, start, count):
    """Return ``count`` elements of a tensor from ``start``."""
    return numba.carray(_pointer(table[row, tensor], start), count)


@_sum
def _sum_of_squares(p):
    total = np.float64(0)
    for i in range(p.size):
        element = np.float64(p[i])
        total += element * element
    return total


@_part
def _update_multiplier(r, j, decays, kappas, mus, limit, multipliers, skipped, limited):
    """Take Algorithm 1 for matrix j, whose bound is set, and store its decay.

    This repeats :func:`~nnunet_cpr.cpr.multipliers.next_multipliers`.
    """
    moved = multipliers[j] + mus[j] * (r - kappas[j])
    if not moved <= _LARGEST:  # NaN included
        decays[j] = np.float32(0)
        skipped[0] += 1
        return
    multiplier = max(moved, np.float32(0))
    multipliers[j] = multiplier
    limited[0] += multiplier > limit
    decays[j] = np.float32(2) * min(multiplier, limit)


@_part
def _decayed(theta, decay):
    return decay * theta if decay != 0 else decay  # 0 * inf is NaN


@_part
def _momentum(p, g, first, decay, lr, momentum):
    for i in range(p.size):
        m = momentum * first[i] + g[i]
        first[i] = m
        p[i] -= _decayed(p[i], decay) + lr * m


@_part
def _nesterov(p, g, first, decay, lr, momentum):
    for i in range(p.size):
        m = momentum * first[i] + g[i]
        first[i] = m
        p[i] -= _decayed(p[i], decay) + lr * (g[i] + momentum * m)


@_part
def _adam(p, g, first, second, decay, rate, beta1_rest, beta2, beta2_rest, root_scale, eps):
    for i in range(p.size):
        m = first[i] + beta1_rest * (g[i] - first[i])
        v = beta2 * second[i] + beta2_rest * g[i] * g[i]
        first[i] = m
        second[i] = v
        p[i] -= _decayed(p[i], decay) + rate * m / (math.sqrt(v) * root_scale + eps)


@_part
def _prepare(table, size, kappas):
    """Return the first chunk of each tensor, and the end; and if it is a matrix with a bound."""
    first_chunks = np.zeros(table.shape[1] + 1, np.int64)
    needs_sum = np.zeros(table.shape[1], np.bool_)
    for tensor in range(table.shape[1]):
        first_chunks[tensor + 1] = first_chunks[tensor] + (table[NUMEL, tensor] + size - 1) // size
        j = table[MATRIX, tensor]
        needs_sum[tensor] = j >= 0 and kappas[j] < np.inf
    return first_chunks, needs_sum


@_part
def _total(sums, first_chunk, end):
    """Add up sums of chunks in their order."""
    total = 0.0
    for chunk in range(first_chunk, end):
        total += sums[chunk]
    return total


@_part
def _place(chunk, first_chunks, table, size):
    """Return the tensor of a chunk, its first element and its number of elements."""
    tensor = np.searchsorted(first_chunks, chunk, side="right") - 1
    start = (chunk - first_chunks[tensor]) * size
    return tensor, start, min(size, table[NUMEL, tensor] - start)


@_part
def _step_chunk(rule, settings, table, tensor, start, count, decay):
    """Decay and step ``count`` elements of a tensor from ``start``."""
    kind = np.float32
    lr, beta1, beta2, eps = settings
    p = _elements(table, PARAM, tensor, start, count)
    g = _elements(table, GRAD, tensor, start, count)
    first = _elements(table, FIRST, tensor, start, count)
    if rule == ADAM:
        second = _elements(table, SECOND, tensor, start, count)
        step = _elements(table, STEP, tensor, 0, 1)[0]
        rate = kind(lr / (1 - beta1**step))
        scale = kind(1 / math.sqrt(1 - beta2**step))
        rest1, rest2 = kind(1 - beta1), kind(1 - beta2)
        _adam(p, g, first, second, decay, rate, rest1, kind(beta2), rest2, scale, kind(eps))
    elif rule == NESTEROV:
        _nesterov(p, g, first, decay, kind(lr), kind(beta1))
    else:
        _momentum(p, g, first, decay, kind(lr), kind(beta1))


@_part
def _chunks_of_thread(begin, end, thread, threads):
    """Return the first chunk that a thread takes of a range, and the end of its chunks."""
    count = end - begin
    return begin + thread * count // threads, begin + (thread + 1) * count // threads


@_kernel
def step(
    rule,
    settings,
    table,
    size,
    batch,
    threads,
    decays,
    kappas,
    mus,
    limit,
    multipliers,
    skipped,
    limited,
):
    """Take the step of ``rule`` for all tensors, and update the multipliers of matrices with a bound.

    Sums do not depend on the number of threads: those of chunks are added up in their order.

    Args:
        rule: :data:`MOMENTUM`, :data:`NESTEROV` or :data:`ADAM`.
        settings: lr, beta1 (SGD's momentum), beta2 and eps, in float64.
        table: see :data:`PARAM`.
        size: number of elements of a chunk.
        batch: number of chunks of a batch, except for a single tensor with more.
        threads: number of threads.
        decays, kappas, mus, limit, multipliers, skipped, limited: as in
            :class:`~nnunet_cpr.cpr.multipliers.Decays`.
    """
    n = table.shape[1]
    first_chunks, needs_sum = _prepare(table, size, kappas)
    sums = np.zeros(first_chunks[n])
    # Each round steps the batch that the round before has summed, and sums the next one: tensors from
    # ``stepped`` to ``summed``, and from there to ``end``. The first round steps nothing.
    stepped, summed = 0, 0
    while stepped < n:
        end = summed
        while end < n and (end == summed or first_chunks[end + 1] - first_chunks[summed] <= batch):
            end += 1

        for thread in numba.prange(threads):
            low, high = _chunks_of_thread(first_chunks[stepped], first_chunks[summed], thread, threads)
            for i in range(high - low):
                chunk = high - 1 - i  # what was summed last is in the cache
                tensor, start, length = _place(chunk, first_chunks, table, size)
                j = table[MATRIX, tensor]
                decay = decays[j] if j >= 0 else np.float32(0)
                _step_chunk(rule, settings, table, tensor, start, length, decay)
            low, high = _chunks_of_thread(first_chunks[summed], first_chunks[end], thread, threads)
            for chunk in range(low, high):
                tensor, start, length = _place(chunk, first_chunks, table, size)
                if needs_sum[tensor]:
                    sums[chunk] = _sum_of_squares(_elements(table, PARAM, tensor, start, length))

        for tensor in range(summed, end):
            if needs_sum[tensor]:
                total = _total(sums, first_chunks[tensor], first_chunks[tensor + 1])
                r = np.float32(total / table[NUMEL, tensor])
                j = table[MATRIX, tensor]
                _update_multiplier(r, j, decays, kappas, mus, limit, multipliers, skipped, limited)
        stepped, summed = summed, end


@numba.njit
def add_one(x):
    """Return ``x + 1``, a trial of the compiler."""
    return x + 1


CHUNK = 65536
"""Number of elements of a chunk, which one thread handles."""
BATCH = 16
"""Number of chunks that are summed before they are stepped, so that they stay in the cache."""
_LITTLE = 131_072
"""Number of elements that one thread steps as soon as several do."""

_launch_lock = threading.Lock()


def fused_step(groups: Sequence[Any], decays: Callable[[], Decays]) -> bool:
    """Take a step; see ``Kernel`` and ``GroupStep`` of ``fused_step.py``, which imports this module."""
    tables = [table for group in groups if (table := _table(*group[2:])) is not None]
    if len(tables) < len(groups):
        return False
    # Threads would write at once to memory that two parameters share.
    spans = np.concatenate([[table[PARAM], table[PARAM] + 4 * table[NUMEL]] for table in tables], axis=1)
    starts, ends = spans[:, spans[0].argsort(kind="stable")]
    if (starts[1:] < ends[:-1]).any():
        return False
    shares = decays()
    if steps := [count for group in groups for count in group.steps]:
        torch._foreach_add_(steps, 1)
    most = numba.core.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    with _launch_lock:  # without OpenMP, Numba aborts on concurrent launches
        of_torch, before = torch.get_num_threads(), numba.get_num_threads()
        try:
            for group, table in zip(groups, tables):
                # As many of Numba's threads as torch uses, one if there is little to do.
                threads = min(of_torch, most) if table[NUMEL].sum() > _LITTLE else 1
                numba.set_num_threads(threads)
                step(
                    _RULES[group.rule],
                    group.settings,
                    table,
                    CHUNK,
                    BATCH,
                    threads,
                    shares.value,
                    shares.kappa,
                    shares.mu,
                    shares.limit,
                    shares.multiplier,
                    shares.skipped,
                    shares.limited,
                )
        finally:
            numba.set_num_threads(before)
            # Numba's first call sets the number of OpenMP's threads, which torch uses, to its own.
            if torch.get_num_threads() != of_torch:
                torch.set_num_threads(of_torch)
    # Kernels do not raise the version counters.
    torch.autograd.graph.increment_version([p for group in groups for p in group.columns[0]])
    return True


def _table(
    columns: Sequence[Sequence[Tensor]], matrices: Sequence[int], steps: Sequence[Tensor]
) -> np.ndarray | None:
    """Return the table of a group, None if it is not in float32 on the CPU.

    The tensors of a :class:`~nnunet_cpr.optimizers.fused_step.GroupStep` are alike in memory.
    """
    params = columns[0]
    kinds = {(p.dtype, p.device.type) for p in params} | {(t.dtype, t.device.type) for t in steps}
    counts = {(type(t), t.numel()) for t in steps}
    if kinds != {(torch.float32, "cpu")} or counts - {(Tensor, 1)}:
        return None
    none = [0] * len(params)
    rows = [list(map(Tensor.data_ptr, column)) for column in columns]
    rows += [none] * (STEP - len(columns))
    rows.append(list(map(Tensor.data_ptr, steps)) if steps else none)
    return np.array([*rows, list(map(Tensor.numel, params)), matrices], np.int64)
