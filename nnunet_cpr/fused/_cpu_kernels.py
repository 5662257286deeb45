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

from nnunet_cpr.fused._tables import FIRST, GRAD, LARGEST, PARAM, SECOND, STEP

# IEEE arithmetic, except that a product and a sum may be contracted. Only the sum of squares may be
# reordered; the order is always the same.
_plain = numba.njit(nogil=True, cache=True, error_model="numpy")
_elements = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
_sum = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
_threads = numba.njit(parallel=True, cache=True, error_model="numpy")


@intrinsic
def _pointer(typing_context, address, start, like):
    """Return a pointer to element ``start`` at ``address``, with elements of the type of ``like``."""
    pointer = types.CPointer(like)

    def generate(context, builder, signature, values):
        return builder.gep(builder.inttoptr(values[0], context.get_value_type(pointer)), [values[1]])

    return pointer(types.int64, types.int64, like), generate


@_plain
def _elements_at(addresses, tensor, column, start, count, like):
    """Return ``count`` elements of a tensor from ``start``; an empty array for missing state."""
    address = addresses[tensor, column]
    return numba.carray(_pointer(address, start, like), count if address else 0)


@_elements
def _unscale(g, factor):
    for i in range(g.size):
        g[i] *= factor


@_elements
def _sgd(p, g, sign, decay, rate):
    for i in range(p.size):
        p[i] -= decay * p[i] + rate * (sign * g[i])


@_elements
def _momentum(p, g, first, sign, decay, rate, momentum):
    for i in range(p.size):
        m = momentum * first[i] + sign * g[i]
        first[i] = m
        p[i] -= decay * p[i] + rate * m


@_elements
def _nesterov(p, g, first, sign, decay, rate, momentum):
    for i in range(p.size):
        gradient = sign * g[i]
        m = momentum * first[i] + gradient
        first[i] = m
        p[i] -= decay * p[i] + rate * (gradient + momentum * m)


@_elements
def _adam(p, g, first, second, sign, decay, rate, beta1_rest, beta2, beta2_rest, root_scale, eps):
    for i in range(p.size):
        gradient = sign * g[i]
        m = first[i] + beta1_rest * (gradient - first[i])
        v = beta2 * second[i] + beta2_rest * gradient * gradient
        first[i] = m
        second[i] = v
        p[i] -= decay * p[i] + rate * m / (math.sqrt(v) * root_scale + eps)


@_elements
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
        p[i] -= decay * p[i] + rate * m / (math.sqrt(largest[i]) * root_scale + eps)


@_sum
def _squares(p):
    total = p.dtype.type(0)
    for i in range(p.size):
        total += p[i] * p[i]
    return np.float64(total)


class Launch(NamedTuple):
    """Tables of a launch (:class:`~nnunet_cpr.fused._tables.Tables`) and its output.

    Attributes:
        first_partials: index of each matrix's first chunk among the chunks of all matrices, and their
            number, int32.
        partials: sum of squares of each chunk of all matrices, float64.
    """

    addresses: np.ndarray
    numels: np.ndarray
    matrices: np.ndarray
    first_chunks: np.ndarray
    first_partials: np.ndarray
    partials: np.ndarray


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


@_plain
def step_chunks(begin, end, size, like, launch, settings, coefficients, updated):
    """Correct and update the chunks from ``begin`` to ``end``, and compute their sums of squares.

    ``like`` is a 0 of the parameters' dtype, in which everything but Adam's bias corrections and the
    sums over chunks is computed. ``updated`` is set for the matrices with new sums.
    """
    kind = type(like)
    sign, lr, eps = kind(settings.sign), kind(settings.lr), kind(settings.eps)
    beta1, beta1_rest = kind(settings.beta1), kind(1 - settings.beta1)
    beta2, beta2_rest = kind(settings.beta2), kind(1 - settings.beta2)
    for chunk in range(begin, end):
        tensor, index, start, count = _chunk_position(launch, chunk, size)
        p = _elements_at(launch.addresses, tensor, PARAM, start, count, like)
        g = _elements_at(launch.addresses, tensor, GRAD, start, count, like)
        first = _elements_at(launch.addresses, tensor, FIRST, start, count, like)
        j = launch.matrices[tensor]
        decay = kind(coefficients[j]) if j >= 0 else kind(0)
        if settings.unscale != 1:
            _unscale(g, kind(settings.unscale))  # stored, as torch's fused steps do
        if settings.adam:
            step = _elements_at(launch.addresses, tensor, STEP, 0, 1, np.float32(0))[0]
            rate = kind(settings.lr / (1 - settings.beta1**step))
            scale = kind(1 / math.sqrt(1 - settings.beta2**step))
            second = _elements_at(launch.addresses, tensor, SECOND, start, count, like)
            largest = _elements_at(launch.addresses, tensor, LARGEST, start, count, like)
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
            launch.partials[launch.first_partials[j] + index] = _squares(p)
            updated[j] = True


@_plain
def sum_chunks(begin, end, size, like, launch):
    """Compute the sums of squares of the chunks, bitwise equal to those of :func:`step_chunks`."""
    for chunk in range(begin, end):
        tensor, index, start, count = _chunk_position(launch, chunk, size)
        p = _elements_at(launch.addresses, tensor, PARAM, start, count, like)
        launch.partials[launch.first_partials[launch.matrices[tensor]] + index] = _squares(p)


@_plain
def _chunk_position(launch, chunk, size):
    """Return the tensor index, chunk index, start offset and length of a chunk."""
    tensor = np.searchsorted(launch.first_chunks, chunk, side="right") - 1
    index = chunk - launch.first_chunks[tensor]
    start = index * np.int64(size)
    return tensor, index, start, min(size, launch.numels[tensor] - start)


# Parallel versions, in which a thread takes tasks of some chunks.


@_threads
def step_chunks_parallel(task, chunks, size, like, launch, settings, coefficients, updated):
    """Run :func:`step_chunks` on all chunks, ``task`` chunks at a time."""
    for i in numba.prange(-(-chunks // task)):
        end = min(chunks, (i + 1) * task)
        step_chunks(i * task, end, size, like, launch, settings, coefficients, updated)


@_threads
def sum_chunks_parallel(task, chunks, size, like, launch):
    """Run :func:`sum_chunks` on all chunks, ``task`` chunks at a time."""
    for i in numba.prange(-(-chunks // task)):
        sum_chunks(i * task, min(chunks, (i + 1) * task), size, like, launch)


@_plain
def sum_partials(first_partials, partials):
    """Return the sum over the chunks of each matrix, added up in order."""
    sums = np.zeros(first_partials.size - 1)
    for j in range(sums.size):
        for i in range(first_partials[j], first_partials[j + 1]):
            sums[j] += partials[i]
    return sums
