"""Fused step on the CPU in float32: a kernel compiled by Numba, and its launch.

A step is limited by memory bandwidth. Consecutive tensors form a batch: the squares of its matrices are
summed, their multipliers updated, and all its tensors decayed and stepped, before the next batch is
loaded. Most of what was summed is then still in the cache. Threads meet once for each batch.

Each loop over all elements is a function of slices of one chunk. Numba then knows that indices neither
wrap around nor leave the array, and vectorizes the loop.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numba
import numba.core.config
import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic

from nnunet_cpr.cpr.multipliers import LARGEST, Decays, moved_multiplier
from nnunet_cpr.optimizers import step_tensors as row
from nnunet_cpr.optimizers.step_tensors import Rule, StepTensors

MOMENTUM, NESTEROV, ADAM = range(3)
"""Rules of :func:`step`."""

_LARGEST = np.float32(LARGEST)

_kernel = numba.njit(parallel=True, cache=True, error_model="numpy")
# Parts are inlined: else a process that compiles runs a part's own code, and one that loads a kernel
# from the cache the copy in there, which is optimized again and may round otherwise. All is IEEE
# arithmetic, except that a sum of squares may be reordered and contracted, always in the same way.
_part = numba.njit(forceinline=True, error_model="numpy")
_sum = numba.njit(forceinline=True, error_model="numpy", fastmath={"contract", "reassoc"})
_moved_multiplier = _part(moved_multiplier)


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
    """Take Algorithm 1 for matrix j, whose bound is set, and store its decay."""
    moved = _moved_multiplier(multipliers[j], mus[j], r, kappas[j])
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
        first_chunks[tensor + 1] = first_chunks[tensor] + (table[row.NUMEL, tensor] + size - 1) // size
        j = table[row.MATRIX, tensor]
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
    return tensor, start, min(size, table[row.NUMEL, tensor] - start)


@_part
def _step_chunk(rule, settings, table, tensor, start, count, decay):
    """Decay and step ``count`` elements of a tensor from ``start``."""
    kind = np.float32
    lr, beta1, beta2, eps = settings
    p = _elements(table, row.PARAM, tensor, start, count)
    g = _elements(table, row.GRAD, tensor, start, count)
    first = _elements(table, row.FIRST, tensor, start, count)
    if rule == ADAM:
        second = _elements(table, row.SECOND, tensor, start, count)
        step = _elements(table, row.STEP, tensor, 0, 1)[0]
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
        table: as in :class:`~nnunet_cpr.optimizers.step_tensors.StepTensors`.
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
                j = table[row.MATRIX, tensor]
                decay = decays[j] if j >= 0 else np.float32(0)
                _step_chunk(rule, settings, table, tensor, start, length, decay)
            low, high = _chunks_of_thread(first_chunks[summed], first_chunks[end], thread, threads)
            for chunk in range(low, high):
                tensor, start, length = _place(chunk, first_chunks, table, size)
                if needs_sum[tensor]:
                    sums[chunk] = _sum_of_squares(_elements(table, row.PARAM, tensor, start, length))

        for tensor in range(summed, end):
            if needs_sum[tensor]:
                total = _total(sums, first_chunks[tensor], first_chunks[tensor + 1])
                r = np.float32(total / table[row.NUMEL, tensor])
                j = table[row.MATRIX, tensor]
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


def fused_step(groups: Sequence[tuple[StepTensors, Rule]], decays: Decays) -> None:
    """Take a step; see :data:`~nnunet_cpr.optimizers.fused_step.Kernel`."""
    for tensors, rule in groups:
        sgd = NESTEROV if rule.nesterov else MOMENTUM
        _launch(ADAM if rule.adam else sgd, rule, tensors, decays)
    # Kernels do not raise the version counters.
    torch.autograd.graph.increment_version([p for tensors, _ in groups for p in tensors.params])


def _launch(kernel_rule: int, rule: Rule, tensors: StepTensors, decays: Decays) -> None:
    """Run the kernel on as many of Numba's threads as torch uses, on one if there is little to do."""
    most = numba.core.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    with _launch_lock:  # without OpenMP, Numba aborts on concurrent launches
        of_torch = torch.get_num_threads()
        before = numba.get_num_threads()
        threads = min(of_torch, most) if tensors.table[row.NUMEL].sum() > _LITTLE else 1
        numba.set_num_threads(threads)
        try:
            step(
                kernel_rule,
                (rule.lr, rule.beta1, rule.beta2, rule.eps),
                tensors.table,
                CHUNK,
                BATCH,
                threads,
                decays.value,
                decays.kappa,
                decays.mu,
                decays.limit,
                decays.multiplier,
                decays.skipped,
                decays.limited,
            )
        finally:
            numba.set_num_threads(before)
            # Numba's first call sets the number of OpenMP's threads, which torch uses, to its own.
            if torch.get_num_threads() != of_torch:
                torch.set_num_threads(of_torch)
