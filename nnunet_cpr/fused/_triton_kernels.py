"""Triton kernel of :class:`~nnunet_cpr.fused.triton.TritonBackend`.

Arguments in capitals are compile-time constants.
"""

import triton
import triton.language as tl

from nnunet_cpr.fused import backend

_PARAM = tl.constexpr(backend.PARAM)
_GRAD = tl.constexpr(backend.GRAD)
_FIRST = tl.constexpr(backend.FIRST)
_SECOND = tl.constexpr(backend.SECOND)
_STEP = tl.constexpr(backend.STEP)
_NUMEL = tl.constexpr(backend.NUMEL)
_MATRIX = tl.constexpr(backend.MATRIX)


@triton.jit
def _pointer(table, count, row, tensor, dtype: tl.constexpr, aligned: tl.constexpr):
    pointer = tl.load(table + row * count + tensor).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if aligned else pointer


@triton.jit
def _step_block(
    p, g, first, second, at, mask, decay, rate, beta1, beta1_rest, beta2, beta2_rest, bias2_root, eps,
    ADAM: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Update one block of elements."""
    theta = tl.load(p + at, mask=mask).to(tl.float32)
    gradient = tl.load(g + at, mask=mask).to(tl.float32)
    m = tl.load(first + at, mask=mask).to(tl.float32)
    if ADAM:
        v = tl.load(second + at, mask=mask).to(tl.float32)
        m = beta1 * m + beta1_rest * gradient
        v = beta2 * v + beta2_rest * gradient * gradient
        tl.store(second + at, v.to(second.dtype.element_ty), mask=mask)
        move = rate * m / (tl.sqrt(v) / bias2_root + eps)
    else:
        m = beta1 * m + gradient
        move = rate * (gradient + beta1 * m if NESTEROV else m)
    tl.store(first + at, m.to(first.dtype.element_ty), mask=mask)
    decayed = tl.where(decay != 0, decay * theta, 0.0)  # 0 * inf is NaN
    tl.store(p + at, (theta - decayed - move).to(p.dtype.element_ty), mask=mask)


@triton.jit
def step_kernel(
    table, of_chunks, decays, count, chunks,
    lr, beta1, beta1_rest, log_beta1, beta2, beta2_rest, log_beta2, eps,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, ADAM: tl.constexpr, NESTEROV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor = tl.load(of_chunks + tl.program_id(0))
    start = tl.load(of_chunks + chunks + tl.program_id(0)).to(tl.int64) * CHUNK
    size = tl.minimum(tl.load(table + _NUMEL * count + tensor) - start, CHUNK).to(tl.int32)
    matrix = tl.load(table + _MATRIX * count + tensor)
    decay = tl.load(decays + matrix, mask=matrix >= 0, other=0.0)

    p = _pointer(table, count, _PARAM, tensor, DTYPE, ALIGNED) + start
    g = _pointer(table, count, _GRAD, tensor, DTYPE, ALIGNED) + start
    first = _pointer(table, count, _FIRST, tensor, DTYPE, ALIGNED) + start
    second = _pointer(table, count, _SECOND, tensor, DTYPE, ALIGNED) + start

    rate = lr
    bias2_root = 1.0
    if ADAM:
        # In float64, since 1 - beta^t cancels in float32 at the first steps.
        step = tl.load(_pointer(table, count, _STEP, tensor, tl.float32, False)).to(tl.float64)
        rate = (lr / (1.0 - tl.exp(step * log_beta1))).to(tl.float32)
        bias2_root = tl.sqrt(1.0 - tl.exp(step * log_beta2)).to(tl.float32)

    lanes = tl.arange(0, BLOCK)
    full_blocks = size // BLOCK
    for block in range(full_blocks):  # without a mask, for the widest loads
        _step_block(
            p, g, first, second, block * BLOCK + lanes, None,
            decay, rate, beta1, beta1_rest, beta2, beta2_rest, bias2_root, eps, ADAM, NESTEROV,
        )  # fmt: skip
    if full_blocks * BLOCK < size:
        at = full_blocks * BLOCK + lanes
        _step_block(
            p, g, first, second, at, at < size,
            decay, rate, beta1, beta1_rest, beta2, beta2_rest, bias2_root, eps, ADAM, NESTEROV,
        )  # fmt: skip
