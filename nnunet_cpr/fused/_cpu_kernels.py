"""Numba kernels of :class:`~nnunet_cpr.fused.cpu.CPUBackend`, in float32.

Each loop over all elements is a function of slices of one chunk. Numba then knows that indices neither
wrap around nor leave the array, and vectorizes the loop.
"""

import math

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from nnunet_cpr.fused.backend import FIRST, GRAD, MATRIX, NUMEL, PARAM, SECOND, STEP

SUM, MOMENTUM, NESTEROV, ADAM = range(4)
"""Actions of :func:`run`: sums only, or a step as well."""

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


@_sum
def _squares(p):
    total = np.float32(0)
    for i in range(p.size):
        total += p[i] * p[i]
    return np.float64(total)


@_kernel
def run(
    action,
    lr,
    beta1,
    beta2,
    eps,
    size,
    table,
    first_chunks,
    decays,
    strides,
    first_samples,
    sums,
    samples,
):
    """Take the step of ``action`` in all chunks, and sum the squares of each chunk of a matrix.

    Args:
        action: :data:`SUM`, :data:`MOMENTUM`, :data:`NESTEROV` or :data:`ADAM`.
        lr, beta1, beta2, eps: settings in float64; ``beta1`` is SGD's momentum.
        size: number of elements of a chunk.
        table: as in :class:`~nnunet_cpr.fused.backend.Plan`.
        first_chunks: index of the first chunk of each tensor, int64 ``[n]``.
        decays: share of each of the J matrices to subtract, float32.
        strides: distance between the elements of each matrix that are sampled, int64 ``[J]``.
        first_samples: index of the first sample of each matrix among all samples, int64 ``[J]``.
        sums: result, float64, one for each chunk.
        samples: result, the sampled elements of all matrices as they are after the step, float32.
    """
    kind = np.float32
    for chunk in numba.prange(sums.size):
        tensor = np.searchsorted(first_chunks, chunk, side="right") - 1
        start = (chunk - first_chunks[tensor]) * size
        count = min(size, table[NUMEL, tensor] - start)
        j = table[MATRIX, tensor]
        decay = decays[j] if j >= 0 else kind(0)
        p = _elements(table, PARAM, tensor, start, count)
        if action != SUM:
            g = _elements(table, GRAD, tensor, start, count)
            first = _elements(table, FIRST, tensor, start, count)
            if action == ADAM:
                second = _elements(table, SECOND, tensor, start, count)
                step = _elements(table, STEP, tensor, 0, 1)[0]
                rate = kind(lr / (1 - beta1**step))
                scale = kind(1 / math.sqrt(1 - beta2**step))
                rest1, rest2 = kind(1 - beta1), kind(1 - beta2)
                _adam(p, g, first, second, decay, rate, rest1, kind(beta2), rest2, scale, kind(eps))
            elif action == NESTEROV:
                _nesterov(p, g, first, decay, kind(lr), kind(beta1))
            else:
                _momentum(p, g, first, decay, kind(lr), kind(beta1))
        if j >= 0:
            sums[chunk] = _squares(p)
            for i in range(-start % strides[j], count, strides[j]):
                samples[first_samples[j] + (start + i) // strides[j]] = p[i]


@_kernel
def count_changes(table, strides, first_samples, samples):
    """Return the number of sampled elements that are not those of the last :func:`run`.

    The columns of ``table`` are the J matrices in their order; the rest is as there.
    """
    changes = 0
    for j in numba.prange(strides.size):
        p = _elements(table, PARAM, j, 0, table[NUMEL, j])
        for i in range(0, p.size, strides[j]):
            changes += samples[first_samples[j] + i // strides[j]] != p[i]
    return changes


@numba.njit
def add_one(x):
    """Return ``x + 1``, a trial of the compiler."""
    return x + 1
