"""What :class:`~nnunet_cpr.fused.cpu.CPUPass` runs, compiled by Numba.

Each loop over elements is a function of its own, on slices of one chunk: so Numba sees that indices
neither wrap around nor leave the array, and makes vector instructions of it.
"""

import math
from typing import NamedTuple

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from nnunet_cpr.fused._tables import FIRST, GRAD, LARGEST, PARAM, SECOND, STEP

# Rounding, infinities and NaN are IEEE's; a product and a sum may become one operation. Only the sum of
# squares may also be added up in another order, which is always the same.
_plain = numba.njit(nogil=True, cache=True, error_model="numpy")
_elements = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
_sum = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
_threads = numba.njit(parallel=True, cache=True, error_model="numpy")


@intrinsic
def _pointer(typing_context, address, start, like):
    """To element ``start`` of what begins at ``address``; the elements are of the type of ``like``."""
    pointer = types.CPointer(like)

    def generate(context, builder, signature, values):
        return builder.gep(builder.inttoptr(values[0], context.get_value_type(pointer)), [values[1]])

    return pointer(types.int64, types.int64, like), generate


@_plain
def _elements_at(addresses, tensor, column, start, count, like):
    """Some elements of a tensor; none where it has no such state."""
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
        if not v <= largest[i]:  # a NaN too
            largest[i] = v
        p[i] -= decay * p[i] + rate * m / (math.sqrt(largest[i]) * root_scale + eps)


@_sum
def _squares(p):
    total = p.dtype.type(0)
    for i in range(p.size):
        total += p[i] * p[i]
    return np.float64(total)


class Where(NamedTuple):
    """The tables of a launch, and where the sums of squares go."""

    addresses: np.ndarray
    numels: np.ndarray
    matrices: np.ndarray
    first_chunks: np.ndarray
    first_partials: np.ndarray
    """For each matrix, the place of its first chunk; at the end how many there are, int32."""
    partials: np.ndarray
    """The sum of squares of each chunk of all matrices, float64."""


class Settings(NamedTuple):
    """What a step is told of its parameter group."""

    adam: bool
    nesterov: bool
    sign: float
    """-1 maximizes."""
    unscale: float
    """What gradients are multiplied by first."""
    lr: float
    beta1: float
    beta2: float
    eps: float


@_plain
def step_chunks(begin, end, size, like, where, settings, coefficients, stepped):
    """Correct and step the chunks from ``begin`` to ``end``, and take their sums of squares.

    ``like`` is a 0 of the parameters' dtype, in which everything is calculated but Adam's bias
    corrections and the sums over chunks. ``stepped`` is set for the matrices that have been measured.
    """
    kind = type(like)
    sign, lr, eps = kind(settings.sign), kind(settings.lr), kind(settings.eps)
    beta1, beta1_rest = kind(settings.beta1), kind(1 - settings.beta1)
    beta2, beta2_rest = kind(settings.beta2), kind(1 - settings.beta2)
    for chunk in range(begin, end):
        tensor, place, start, count = _part_of_tensor(where, chunk, size)
        p = _elements_at(where.addresses, tensor, PARAM, start, count, like)
        g = _elements_at(where.addresses, tensor, GRAD, start, count, like)
        first = _elements_at(where.addresses, tensor, FIRST, start, count, like)
        j = where.matrices[tensor]
        decay = kind(coefficients[j]) if j >= 0 else kind(0)
        if settings.unscale != 1:
            _unscale(g, kind(settings.unscale))  # and leaves it so, as torch's fused steps do
        if settings.adam:
            step = _elements_at(where.addresses, tensor, STEP, 0, 1, np.float32(0))[0]
            rate = kind(settings.lr / (1 - settings.beta1**step))
            scale = kind(1 / math.sqrt(1 - settings.beta2**step))
            second = _elements_at(where.addresses, tensor, SECOND, start, count, like)
            largest = _elements_at(where.addresses, tensor, LARGEST, start, count, like)
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
            where.partials[where.first_partials[j] + place] = _squares(p)
            stepped[j] = True


@_plain
def measure_chunks(begin, end, size, like, where):
    """The sums of squares of these chunks, to the same bits as :func:`step_chunks`."""
    for chunk in range(begin, end):
        tensor, place, start, count = _part_of_tensor(where, chunk, size)
        p = _elements_at(where.addresses, tensor, PARAM, start, count, like)
        where.partials[where.first_partials[where.matrices[tensor]] + place] = _squares(p)


@_plain
def _part_of_tensor(where, chunk, size):
    """Whose the chunk is, the how-manieth of its, and from where how many elements."""
    tensor = np.searchsorted(where.first_chunks, chunk, side="right") - 1
    place = chunk - where.first_chunks[tensor]
    start = place * np.int64(size)
    return tensor, place, start, min(size, where.numels[tensor] - start)


# The same with Numba's threads, each of which takes shares of some chunks.


@_threads
def step_in_threads(share, chunks, size, like, where, settings, coefficients, stepped):
    """:func:`step_chunks` for all chunks."""
    for i in numba.prange(-(-chunks // share)):
        end = min(chunks, (i + 1) * share)
        step_chunks(i * share, end, size, like, where, settings, coefficients, stepped)


@_threads
def measure_in_threads(share, chunks, size, like, where):
    """:func:`measure_chunks` for all chunks."""
    for i in numba.prange(-(-chunks // share)):
        measure_chunks(i * share, min(chunks, (i + 1) * share), size, like, where)


@_plain
def sum_partials(first_partials, partials):
    """The sums of each matrix's chunks, in their order."""
    sums = np.zeros(first_partials.size - 1)
    for j in range(sums.size):
        for i in range(first_partials[j], first_partials[j + 1]):
            sums[j] += partials[i]
    return sums
