"""Fused step on the CPU: a kernel compiled by Numba."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numba.core.config
import torch

from nnunet_cpr.cpr.multipliers import Decays
from nnunet_cpr.fused import _cpu_kernels
from nnunet_cpr.fused.backend import NUMEL, Backend, Plan, Rule

CHUNK = 65536
"""Number of elements of a chunk, which one thread handles."""
BATCH = 16
"""Number of chunks that are summed before they are stepped, so that they stay in the cache."""
_LITTLE = 131_072
"""Number of elements that one thread steps as soon as several do."""

_launch_lock = threading.Lock()


class CPUBackend(Backend):
    """Fused step on the CPU, in float32."""

    dtypes = (torch.float32,)

    def step(self, groups: Sequence[tuple[Plan, Rule]], decays: Decays) -> None:
        for plan, rule in groups:
            sgd = _cpu_kernels.NESTEROV if rule.nesterov else _cpu_kernels.MOMENTUM
            _launch(_cpu_kernels.ADAM if rule.adam else sgd, rule, plan, decays)
        # Kernels do not raise the version counters.
        torch.autograd.graph.increment_version([p for plan, _ in groups for p in plan.params])


def _launch(kernels_rule: int, rule: Rule, plan: Plan, decays: Decays) -> None:
    """Run the kernel on as many of Numba's threads as torch uses, on one if there is little to do."""
    most = numba.core.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    with _launch_lock:  # without OpenMP, Numba aborts on concurrent launches
        of_torch = torch.get_num_threads()
        before = numba.get_num_threads()
        threads = min(of_torch, most) if plan.table[NUMEL].sum() > _LITTLE else 1
        numba.set_num_threads(threads)
        try:
            _cpu_kernels.step(
                kernels_rule,
                (rule.lr, rule.beta1, rule.beta2, rule.eps),
                plan.table,
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
