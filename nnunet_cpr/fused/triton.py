"""Fused step on a GPU: one Triton kernel for all tensors of a parameter group.

A program handles one chunk of one tensor, found by the plan's table. It reads each element of the
parameter, its gradient and its moments once, decays and updates it in float32, and writes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from nnunet_cpr._device import to_device
from nnunet_cpr.fused._triton_kernels import step_kernel
from nnunet_cpr.fused.backend import NUMEL, STEP, Backend, Plan, Rule

CHUNK = 16384
"""Number of elements of a chunk, which one program handles."""
BLOCK = 1024
"""Number of elements that a program handles at once."""

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class TritonBackend(Backend):
    """Fused step on a GPU, in float32, bfloat16 or float16."""

    dtypes = tuple(_DTYPES)
    is_proven = False  # no test of this package has run on a GPU

    def sums_of_squares(self, matrices: Plan) -> Tensor:
        return torch.stack(torch._foreach_norm(matrices.params, dtype=torch.float64)).square_()

    def step(self, groups: Sequence[tuple[Plan, Rule]], matrices: Plan, decay: Tensor) -> None:
        for plan, rule in groups:
            if plan.table[NUMEL].any():  # not all tensors are empty
                _launch(plan, rule, decay)
        # Kernels do not raise the version counters.
        torch.autograd.graph.increment_version([p for plan, _ in groups for p in plan.params])


def _launch(plan: Plan, rule: Rule, decay: Tensor) -> None:
    device = plan.params[0].device
    chunks = -(-plan.table[NUMEL] // CHUNK)
    owners = np.repeat(np.arange(len(chunks)), chunks)
    indices = np.arange(len(owners)) - (chunks.cumsum() - chunks)[owners]
    table = to_device(plan.table.ravel().tolist(), torch.int64, device)
    of_chunks = to_device([*owners.tolist(), *indices.tolist()], torch.int32, device)
    with torch.cuda.device_of(plan.params[0]):  # where Triton launches
        step_kernel[(len(owners),)](
            table, of_chunks, decay, len(chunks), len(owners),
            rule.lr, rule.beta1, 1.0 - rule.beta1, _log(rule.beta1),
            rule.beta2, 1.0 - rule.beta2, _log(rule.beta2), rule.eps,
            DTYPE=_DTYPES[plan.params[0].dtype],
            ALIGNED=not (plan.table[:STEP] % 16).any(),  # bytes of the widest load
            ADAM=rule.adam,
            NESTEROV=rule.nesterov,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
        )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
