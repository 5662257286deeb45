"""Numba kernels of :class:`~nnunet_cpr.fused.cpu.CPUBackend`.

Each loop over elements is a function of slices of one chunk. Numba then knows that indices neither wrap
around nor leave the array, and vectorizes the loop.
"""

import math
from typing import NamedTuple

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from nnunet_cpr.fused.backend import FIRST, GRAD, LARGEST, PARAM, SECOND, STEP

# Kernels. A process runs the code that it has compiled, another one that of the cache.
_kernel = numba.njit(nogil=True, cache=True, error_model="numpy")
_threads = numba.njit(parallel=True, cache=True, error_model="numpy")
# Their parts are inlined: else a process that compiles runs a part's own code, and one that loads a
# kernel from the cache the copy in there, which is optimized again and may round otherwise. All is IEEE
# arithmetic, except that a sum of squares may be reordered; the order is always the same.
_part = numba.njit(forceinline=True, error_model="numpy")
_sum = numba.njit(forceinline=True, error_model="numpy", fastmath={"contract", "reassoc"})


@intrinsic
def _pointer(typing_context, address, start, like):
    """Return a pointer to element ``start`` at ``address``, with elements of the type of ``like``."""
    pointer = types.CPointer(like)

    def generate(context, builder, signature, values):
        return builder.gep(builder.inttoptr(values[0], context.get_value_type(pointer)), [values[1]])

    return pointer(types.int64, types.int64, like), generate


@_part
def _elements_at(addresses, tensor, column, start, count, like):
    """Return ``count`` elements of a tensor from ``start``; an empty array for missing state."""
    address = addresses[tensor, column]
    return numba.carray(_pointer(address, start, like), count if address else 0)


@_part
def _unscale(g, factor):
    for i in range(g.size):
        g[i] *= factor


@_part
def _decayed(theta, decay):
    return decay * theta if decay != 0 else decay  # 0 * inf is NaN


@_part
def _sgd(p, g, sign, decay, rate):
    for i in range(p.size):
        p[i] -= _decayed(p[i], decay) + rate * (sign * g[i])


@_part
def _momentum(p, g, first, sign, decay, rate, momentum):
    for i in range(p.size):
        m = momentum * first[i] + sign * g[i]
        first[i] = m
        p[i] -= _decayed(p[i], decay) + rate * m


@_part
def _nesterov(p, g, first, sign, decay, rate, momentum):
    for i in range(p.size):
        gradient = sign * g[i]
        m = momentum * first[i] + gradient
        first[i] = m
        p[i] -= _decayed(p[i], decay) + rate * (gradient + momentum * m)


@_part
def _adam(p, g, first, second, sign, decay, rate, beta1_rest, beta2, beta2_rest, root_scale, eps):
    for i in range(p.size):
        gradient = sign * g[i]
        m = first[i] + beta1_rest * (gradient - first[i])
        v = beta2 * second[i] + beta2_rest * gradient * gradient
        first[i] = m
        second[i] = v
        p[i] -= _decayed(p[i], decay) + rate * m / (math.sqrt(v) * root_scale + eps)


@_part
def _amsgrad(
    p, g, first, second, largest, sign, decay, rate, beta1_rest, beta2, beta2_rest, root_scale, eps
):
    for i in range(p.size):
        gradient = sign * g[i]
        m = first[i] + beta1_rest * (gradient - first[i])
        v = beta2 * second[i] + beta2_rest * gradient * gradient
        first[i] = m
        second[i] = v
        if not v <= largest[i]:  # also for NaN
            largest[i] = v
        p[i] -= _decayed(p[i], decay) + rate * m / (math.sqrt(largest[i]) * root_scale + eps)


@_sum
def _squares(p):
    total = p.dtype.type(0)
    for i in range(p.size):
        total += p[i] * p[i]
    return np.float64(total)


@_part
def _sample(bits, start, stride, magnitude):
    """Return a checksum of the magnitudes of every ``stride``-th element of a tensor.

    It is a sum of integers, which does not depend on the order.

    Args:
        bits: elements of a chunk as integers.
        start: index of the chunk's first element in the tensor.
        magnitude: mask of all bits but the sign.
    """
    total = np.int64(0)
    for i in range(-start % stride, bits.size, stride):
        value = np.int64(bits[i] & magnitude)
        # The exponent of float64 is in the highest bits, which the sum may lose.
        total += ((value >> 32) + (value & 0xFFFFFFFF)) * (start + i + 1)
    return total


class TableArrays(NamedTuple):
    """Tables of the n tensors of a launch.

    Attributes:
        addresses: int64 ``[n, COLUMNS]``, 0 for missing state.
        numels: number of elements of each tensor, int64 ``[n]``.
        matrices: matrix index j of each tensor, -1 if it is not regularized, int32 ``[n]``.
        first_chunks: index of each tensor's first chunk, and the number of chunks, int32 ``[n + 1]``.
        first_partials: index of each matrix's first chunk among the chunks of all matrices, and their
            number, int32.
        strides: distance between the sampled elements of each matrix, int64.
    """

    addresses: np.ndarray
    numels: np.ndarray
    matrices: np.ndarray
    first_chunks: np.ndarray
    first_partials: np.ndarray
    strides: np.ndarray


class StepSettings(NamedTuple):
    """Settings of the step of a parameter group.

    Attributes:
        sign: -1 to maximize.
        unscale: factor of the gradients.
    """

    adam: bool
    nesterov: bool
    sign: float
    unscale: float
    lr: float
    beta1: float
    beta2: float
    eps: float


@_part
def step_chunks(begin, end, size, like, magnitude, tables, partials, samples, settings, coefficients):
    """Correct and update the chunks from ``begin`` to ``end``, and compute their sums of squares.

    ``like`` is a 0 of the parameters' dtype, in which everything but Adam's bias corrections and the
    sums over chunks is computed. ``partials`` are the sums of squares of the chunks of all matrices,
    float64, and ``samples`` the checksums of their sampled elements, int64.
    """
    kind = type(like)
    sign, lr, eps = kind(settings.sign), kind(settings.lr), kind(settings.eps)
    beta1, beta1_rest = kind(settings.beta1), kind(1 - settings.beta1)
    beta2, beta2_rest = kind(settings.beta2), kind(1 - settings.beta2)
    for chunk in range(begin, end):
        tensor, index, start, count = _chunk_position(tables, chunk, size)
        p = _elements_at(tables.addresses, tensor, PARAM, start, count, like)
        g = _elements_at(tables.addresses, tensor, GRAD, start, count, like)
        first = _elements_at(tables.addresses, tensor, FIRST, start, count, like)
        j = tables.matrices[tensor]
        decay = kind(coefficients[j]) if j >= 0 else kind(0)
        if settings.unscale != 1:
            _unscale(g, kind(settings.unscale))  # stored, as torch's fused steps do
        if settings.adam:
            step = _elements_at(tables.addresses, tensor, STEP, 0, 1, np.float32(0))[0]
            rate = kind(settings.lr / (1 - settings.beta1**step))
            scale = kind(1 / math.sqrt(1 - settings.beta2**step))
            second = _elements_at(tables.addresses, tensor, SECOND, start, count, like)
            largest = _elements_at(tables.addresses, tensor, LARGEST, start, count, like)
            if largest.size:
                _amsgrad(
                    p, g, first, second, largest,
                    sign, decay, rate, beta1_rest, beta2, beta2_rest, scale, eps,
                )  # fmt: skip
            else:
                _adam(p, g, first, second, sign, decay, rate, beta1_rest, beta2, beta2_rest, scale, eps)
        elif first.size == 0:
            _sgd(p, g, sign, decay, lr)
        elif settings.nesterov:
            _nesterov(p, g, first, sign, decay, lr, beta1)
        else:
            _momentum(p, g, first, sign, decay, lr, beta1)
        if j >= 0:
            partials[tables.first_partials[j] + index] = _squares(p)
            bits = _elements_at(tables.addresses, tensor, PARAM, start, count, magnitude)
            sample = _sample(bits, start, tables.strides[j], magnitude)
            samples[tables.first_partials[j] + index] = sample


@_part
def sum_chunks(begin, end, size, like, magnitude, tables, partials, samples):
    """Compute the sums of squares of the chunks, bitwise equal to those of :func:`step_chunks`."""
    for chunk in range(begin, end):
        tensor, index, start, count = _chunk_position(tables, chunk, size)
        p = _elements_at(tables.addresses, tensor, PARAM, start, count, like)
        j = tables.matrices[tensor]
        partials[tables.first_partials[j] + index] = _squares(p)
        bits = _elements_at(tables.addresses, tensor, PARAM, start, count, magnitude)
        sample = _sample(bits, start, tables.strides[j], magnitude)
        samples[tables.first_partials[j] + index] = sample


@_part
def _chunk_position(tables, chunk, size):
    """Return the tensor index, chunk index, start offset and length of a chunk."""
    tensor = np.searchsorted(tables.first_chunks, chunk, side="right") - 1
    index = chunk - tables.first_chunks[tensor]
    start = index * np.int64(size)
    return tensor, index, start, min(size, tables.numels[tensor] - start)


# Launches on all chunks, which also add up the sums of the chunks of each matrix into ``sums`` and
# their checksums into ``checks``.


@_kernel
def step_serial(
    chunks, size, like, magnitude, tables, partials, samples, sums, checks, settings, coefficients
):
    """Run :func:`step_chunks` on all chunks."""
    step_chunks(0, chunks, size, like, magnitude, tables, partials, samples, settings, coefficients)
    _add_up(tables, partials, samples, sums, checks)


@_threads
def step_parallel(
    task, chunks, size, like, magnitude, tables, partials, samples, sums, checks, settings, coefficients
):
    """Run :func:`step_chunks` on all chunks, ``task`` chunks at a time."""
    for i in numba.prange(-(-chunks // task)):
        begin, end = i * task, min(chunks, (i + 1) * task)
        step_chunks(begin, end, size, like, magnitude, tables, partials, samples, settings, coefficients)
    _add_up(tables, partials, samples, sums, checks)


@_kernel
def sum_serial(chunks, size, like, magnitude, tables, partials, samples, sums, checks):
    """Run :func:`sum_chunks` on all chunks."""
    sum_chunks(0, chunks, size, like, magnitude, tables, partials, samples)
    _add_up(tables, partials, samples, sums, checks)


@_threads
def sum_parallel(task, chunks, size, like, magnitude, tables, partials, samples, sums, checks):
    """Run :func:`sum_chunks` on all chunks, ``task`` chunks at a time."""
    for i in numba.prange(-(-chunks // task)):
        begin, end = i * task, min(chunks, (i + 1) * task)
        sum_chunks(begin, end, size, like, magnitude, tables, partials, samples)
    _add_up(tables, partials, samples, sums, checks)


@_kernel
def changed_serial(magnitude, tables, checks):
    """Return the number of matrices whose sampled elements are not those of the last sums."""
    changed = 0
    for tensor in range(tables.numels.size):
        changed += _has_changed(tensor, magnitude, tables, checks)
    return changed


@_threads
def changed_parallel(magnitude, tables, checks):
    """Return the result of :func:`changed_serial`."""
    changed = 0
    for tensor in numba.prange(tables.numels.size):
        changed += _has_changed(tensor, magnitude, tables, checks)
    return changed


@_part
def _has_changed(tensor, magnitude, tables, checks):
    bits = _elements_at(tables.addresses, tensor, PARAM, 0, tables.numels[tensor], magnitude)
    j = tables.matrices[tensor]
    return int(_sample(bits, 0, tables.strides[j], magnitude) != checks[j])


@_part
def _add_up(tables, partials, samples, sums, checks):
    """Set the sum and the checksum of each matrix of a launch, adding up its chunks in order."""
    for j in tables.matrices:
        if j >= 0:
            total, check = 0.0, np.int64(0)
            for i in range(tables.first_partials[j], tables.first_partials[j + 1]):
                total += partials[i]
                check += samples[i]
            sums[j] = total
            checks[j] = check


@_kernel
def add_one(x):
    """Return ``x + 1``, a trial of the compiler."""
    return x + 1
