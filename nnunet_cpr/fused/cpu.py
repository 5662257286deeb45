"""Fused step on the CPU: loops compiled by Numba over chunks that fit into the cache.

A step is limited by memory bandwidth. Each chunk is decayed, updated and its squares summed before the
next one is loaded.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numba.core.config
import numpy as np
import torch
from torch import Tensor

from nnunet_cpr.fused import _cpu_kernels
from nnunet_cpr.fused.backend import MATRIX, NUMEL, PARAM, Backend, Plan, Rule

CHUNK = 16384
"""Number of elements of a chunk."""
_LITTLE = 8
"""Number of chunks that one thread handles as soon as several do."""

_NO_STEP = Rule(adam=False, lr=0.0, beta1=0.0)
_launch_lock = threading.Lock()


class CPUBackend(Backend):
    """Fused step on the CPU, in float32.

    The kernel also sums the squares of the new values, for the next step. They are summed again if a
    matrix was changed in between, according to its address, its version counter or a sample of its
    elements, since writes through ``.data`` do not raise the version.

    Attributes:
        reused_measures: number of steps that used the sums of squares of the previous step.
    """

    dtypes = (torch.float32,)

    def __init__(self) -> None:
        self._sums_of: Any = None  # fingerprint of the matrices that the sums belong to
        self._sums = np.empty(0)
        self._samples = np.empty(0, np.float32)
        self.reused_measures = 0

    def sums_of_squares(self, matrices: Plan) -> Tensor:
        strides, first_samples, _ = _sampling(tuple(matrices.table[NUMEL].tolist()))
        is_same = self._sums_of == _fingerprint(matrices)
        samples = matrices.table, strides, first_samples, self._samples
        if is_same and _launch(_cpu_kernels.count_changes, len(strides), *samples) == 0:
            self.reused_measures += 1
        else:
            no_decay = np.zeros(len(strides), np.float32)
            self._run(_cpu_kernels.SUM, matrices, _NO_STEP, matrices, no_decay)
            self._sums_of = _fingerprint(matrices)
        return torch.from_numpy(self._sums)

    def step(self, groups: Sequence[tuple[Plan, Rule]], matrices: Plan, decay: Tensor) -> None:
        are_known, self._sums_of = self._sums_of is not None, None  # until the step has succeeded
        for plan, rule in groups:
            sgd = _cpu_kernels.NESTEROV if rule.nesterov else _cpu_kernels.MOMENTUM
            action = _cpu_kernels.ADAM if rule.adam else sgd
            self._run(action, plan, rule, matrices, decay.numpy())
        # Kernels do not raise the version counters.
        torch.autograd.graph.increment_version([p for plan, _ in groups for p in plan.params])
        if are_known:
            self._sums_of = _fingerprint(matrices)

    def _run(self, action: int, plan: Plan, rule: Rule, matrices: Plan, decays: np.ndarray) -> None:
        strides, first_samples, count = _sampling(tuple(matrices.table[NUMEL].tolist()))
        if len(self._samples) != count or len(self._sums) != len(strides):
            self._sums, self._samples = np.zeros(len(strides)), np.zeros(count, np.float32)
        chunks = -(-plan.table[NUMEL] // CHUNK)
        first_chunks = chunks.cumsum() - chunks
        sums = np.zeros(chunks.sum())
        settings = rule.lr, rule.beta1, rule.beta2, rule.eps
        tables = plan.table, first_chunks, decays, strides, first_samples
        _launch(_cpu_kernels.run, len(sums), action, *settings, CHUNK, *tables, sums, self._samples)
        totals = np.zeros(len(chunks))
        if len(sums):
            totals[chunks > 0] = np.add.reduceat(sums, first_chunks[chunks > 0])
        owners = plan.table[MATRIX]
        self._sums[owners[owners >= 0]] = totals[owners >= 0]


def _fingerprint(matrices: Plan) -> Any:
    return [p._version for p in matrices.params], matrices.table[[PARAM, NUMEL]].tolist()


@lru_cache
def _sampling(numels: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the stride and the first index of the samples of each matrix, and their number.

    Sampled are all elements of a matrix of up to 767, and mostly 300 to 400 of a larger one. A stride
    without common divisors with the size, and so with any dimension, spreads the samples over rows,
    columns and the elements of a convolution's kernels.
    """
    strides = [max(numel // 384, 1) for numel in numels]
    for j, numel in enumerate(numels):
        while math.gcd(strides[j], numel) > 1:
            strides[j] += 1
    ends = [0, *accumulate(-(-numel // stride) for numel, stride in zip(numels, strides))]
    return np.array(strides, np.int64), np.array(ends[:-1], np.int64), ends[-1]


def _launch(kernel: Any, tasks: int, *arguments: Any) -> Any:
    """Run a kernel on as many of Numba's threads as torch uses, on one if there is little to do."""
    most = numba.core.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    with _launch_lock:  # without OpenMP, Numba aborts on concurrent launches
        of_torch = torch.get_num_threads()
        before = numba.get_num_threads()
        numba.set_num_threads(min(of_torch, most) if tasks > _LITTLE else 1)
        try:
            return kernel(*arguments)
        finally:
            numba.set_num_threads(before)
            # Numba's first call sets the number of OpenMP's threads, which torch uses, to its own.
            if torch.get_num_threads() != of_torch:
                torch.set_num_threads(of_torch)
