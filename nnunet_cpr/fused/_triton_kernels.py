"""Triton kernels of :class:`~nnunet_cpr.fused.triton.TritonBackend`.

Arguments in capitals are compile-time constants.
"""

import triton
import triton.language as tl

from nnunet_cpr.fused import backend

_P: tl.constexpr = tl.constexpr(backend.PARAM)
_GRAD: tl.constexpr = tl.constexpr(backend.GRAD)
_FIRST: tl.constexpr = tl.constexpr(backend.FIRST)
_SECOND: tl.constexpr = tl.constexpr(backend.SECOND)
_LARGEST: tl.constexpr = tl.constexpr(backend.LARGEST)
_STEP: tl.constexpr = tl.constexpr(backend.STEP)
_COLUMNS: tl.constexpr = tl.constexpr(backend.COLUMNS)


@triton.jit
def _pointer(addresses, tensor, column, dtype: tl.constexpr, aligned: tl.constexpr):
    address = tl.load(addresses + tensor * _COLUMNS + column)
    pointer = address.to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if aligned else pointer


@triton.jit
def _sample(p, count, stride, SAMPLES: tl.constexpr):
    """Return a checksum of the magnitudes of every ``stride``-th of ``count`` elements.

    It is a sum of integers, which no kernel rounds in another way than the next.
    """
    lanes = tl.arange(0, SAMPLES)
    theta = tl.load(p + lanes * stride, mask=lanes * stride < count, other=0.0).to(tl.float32)
    magnitudes = theta.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.sum(magnitudes.to(tl.int64) * (lanes + 1))


@triton.jit
def _step_block(
    p, g, first, second, largest, at, mask, other,
    decay, rate, first_rate, momentum, beta1_rest, beta2, beta2_rest, bias2_root, eps, unscale,
    ADAM: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Update one block of elements; return the squares of the new parameters."""
    theta = tl.load(p + at, mask=mask, other=other).to(tl.float32)
    gradient = tl.load(g + at, mask=mask, other=other).to(tl.float32)
    if SCALED:
        gradient = gradient * unscale
        tl.store(g + at, gradient.to(g.dtype.element_ty), mask=mask)  # as torch's fused steps do
    if MAXIMIZE:
        gradient = -gradient

    if ADAM:
        m = tl.load(first + at, mask=mask, other=other).to(tl.float32)
        v = tl.load(second + at, mask=mask, other=other).to(tl.float32)
        m = momentum * m + beta1_rest * gradient
        v = beta2 * v + beta2_rest * gradient * gradient
        tl.store(first + at, m.to(first.dtype.element_ty), mask=mask)
        tl.store(second + at, v.to(second.dtype.element_ty), mask=mask)
        if AMSGRAD:
            v = tl.maximum(v, tl.load(largest + at, mask=mask, other=other).to(tl.float32))
            tl.store(largest + at, v.to(largest.dtype.element_ty), mask=mask)
        move = first_rate * m / (tl.sqrt(v) / bias2_root + eps)
    elif MOMENTUM:
        m = tl.load(first + at, mask=mask, other=other).to(tl.float32)
        m = momentum * m + gradient
        tl.store(first + at, m.to(first.dtype.element_ty), mask=mask)
        move = rate * (gradient + momentum * m if NESTEROV else m)
    else:
        move = rate * gradient

    decayed = tl.where(decay != 0, decay * theta, 0.0)  # 0 * inf is NaN
    new = (theta - decayed - move).to(p.dtype.element_ty)
    tl.store(p + at, new, mask=mask)
    written = new.to(tl.float32)
    return written * written


@triton.jit
def step_kernel(
    addresses, numels, matrices, first_chunks, chunk_tensors,  # tensors of this launch
    coefficients, first_partials, partials, strides, samples,  # all matrices
    lr, grad_scale, found_inf,
    momentum, beta1_rest, log_beta1, beta2, beta2_rest, log_beta2, eps,
    PARAM: tl.constexpr, MOMENT: tl.constexpr, ALIGNED: tl.constexpr, LR_IS_TENSOR: tl.constexpr,
    ADAM: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr, SCALED: tl.constexpr, MAY_SKIP: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    if MAY_SKIP:
        if tl.load(found_inf) != 0:
            return

    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensors + chunk)
    index = chunk - tl.load(first_chunks + tensor)
    start = index.to(tl.int64) * CHUNK
    count = tl.minimum(tl.load(numels + tensor) - start, CHUNK).to(tl.int32)
    matrix = tl.load(matrices + tensor)
    decay = tl.load(coefficients + matrix, mask=matrix >= 0, other=0.0)

    p = _pointer(addresses, tensor, _P, PARAM, ALIGNED) + start
    g = _pointer(addresses, tensor, _GRAD, PARAM, ALIGNED) + start
    first = _pointer(addresses, tensor, _FIRST, MOMENT, ALIGNED) + start
    second = _pointer(addresses, tensor, _SECOND, MOMENT, ALIGNED) + start
    largest = _pointer(addresses, tensor, _LARGEST, MOMENT, ALIGNED) + start

    rate = tl.load(lr).to(tl.float32) if LR_IS_TENSOR else lr
    unscale = 1.0 / tl.load(grad_scale).to(tl.float32) if SCALED else 1.0
    first_rate = rate
    bias2_root = 1.0
    if ADAM:
        # In float64, since 1 - beta^t cancels in float32 at the first steps.
        step = tl.load(_pointer(addresses, tensor, _STEP, tl.float32, False)).to(tl.float64)
        bias1 = 1.0 - tl.exp(step * log_beta1)
        bias2 = 1.0 - tl.exp(step * log_beta2)
        first_rate = (rate / bias1).to(tl.float32)
        bias2_root = tl.sqrt(bias2).to(tl.float32)

    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    full_blocks = count // BLOCK
    for block in range(full_blocks):  # without a mask, for the widest loads
        squares += _step_block(
            p, g, first, second, largest, block * BLOCK + lanes, None, None,
            decay, rate, first_rate, momentum, beta1_rest, beta2, beta2_rest, bias2_root, eps, unscale,
            ADAM, MOMENTUM, NESTEROV, MAXIMIZE, AMSGRAD, SCALED,
        )  # fmt: skip
    if full_blocks * BLOCK < count:
        at = full_blocks * BLOCK + lanes
        mask = at < count
        last = _step_block(
            p, g, first, second, largest, at, mask, 0.0,
            decay, rate, first_rate, momentum, beta1_rest, beta2, beta2_rest, bias2_root, eps, unscale,
            ADAM, MOMENTUM, NESTEROV, MAXIMIZE, AMSGRAD, SCALED,
        )  # fmt: skip
        squares += tl.where(mask, last, 0.0)

    if matrix >= 0:
        partial = tl.load(first_partials + matrix) + index
        tl.store(partials + partial, tl.sum(squares))
        tl.debug_barrier()  # the sampled elements may have been written by other threads
        tl.store(samples + partial, _sample(p, count, tl.load(strides + matrix), SAMPLES))


@triton.jit
def changed_kernel(
    addresses, numels, matrices, first_chunks, chunk_tensors, first_partials, strides, samples, changed,
    PARAM: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Set ``changed`` to 1 for matrices whose sampled elements are not those of the last sums."""
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensors + chunk)
    index = chunk - tl.load(first_chunks + tensor)
    start = index.to(tl.int64) * CHUNK
    count = tl.minimum(tl.load(numels + tensor) - start, CHUNK).to(tl.int32)
    matrix = tl.load(matrices + tensor)
    p = _pointer(addresses, tensor, _P, PARAM, ALIGNED) + start
    sample = _sample(p, count, tl.load(strides + matrix), SAMPLES)
    if sample != tl.load(samples + tl.load(first_partials + matrix) + index):
        tl.store(changed + matrix, 1)


@triton.jit
def partials_kernel(
    addresses, numels, matrices, first_chunks, chunk_tensors, first_partials, partials,
    strides, samples, changed,
    PARAM: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    SAMPLES: tl.constexpr,
):  # fmt: skip
    """Compute the sum of squares of each chunk of the changed matrices as :func:`step_kernel` does."""
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensors + chunk)
    matrix = tl.load(matrices + tensor)
    if tl.load(changed + matrix) == 0:
        return
    index = chunk - tl.load(first_chunks + tensor)
    start = index.to(tl.int64) * CHUNK
    count = tl.minimum(tl.load(numels + tensor) - start, CHUNK).to(tl.int32)
    p = _pointer(addresses, tensor, _P, PARAM, ALIGNED) + start

    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    full_blocks = count // BLOCK
    for block in range(full_blocks):
        theta = tl.load(p + block * BLOCK + lanes).to(tl.float32)
        squares += theta * theta
    if full_blocks * BLOCK < count:
        at = full_blocks * BLOCK + lanes
        theta = tl.load(p + at, mask=at < count, other=0.0).to(tl.float32)
        squares += theta * theta
    partial = tl.load(first_partials + matrix) + index
    tl.store(partials + partial, tl.sum(squares))
    tl.store(samples + partial, _sample(p, count, tl.load(strides + matrix), SAMPLES))


@triton.jit
def sum_kernel(partials, first_partials, sums, BLOCK: tl.constexpr):
    """Add up the sums of the chunks of each matrix in order, one program for each matrix."""
    matrix = tl.program_id(0)
    first = tl.load(first_partials + matrix)
    end = tl.load(first_partials + matrix + 1)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partials + at, mask=at < end, other=0.0).to(tl.float64)
    tl.store(sums + matrix, tl.sum(total))
