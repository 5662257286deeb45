"""CPR's correction and the optimizer's step in one pass over the memory.

:class:`~nnunet_cpr.kernels.one_pass.OnePass` says what a backend does; :func:`one_pass_for` is the one
place that chooses. What no backend covers goes the plain way: the regularizer corrects, then torch
steps. The plain way is also what the backends are tested against.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from nnunet_cpr.kernels.one_pass import OnePass
from nnunet_cpr.kernels.trial import works

if TYPE_CHECKING:
    from nnunet_cpr.optim import CPROptimizer

__all__ = ["OnePass", "one_pass_for"]


def one_pass_for(optimizer: CPROptimizer) -> OnePass | None:
    """The backend for this optimizer's parameters, None where there is none."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    given_twice = len({id(p) for p in held}) < len(held)  # torch steps such a one twice
    # Should a frozen parameter get a gradient later, the pass looks at it then.
    params = [*optimizer.cpr.parameters, *(p for p in held if p.requires_grad)]
    devices = {p.device for p in params}
    if optimizer.cpr.regularizer.name != "l2" or len(devices) != 1 or given_twice:
        return None
    device = devices.pop()
    if device.type == "cpu":
        if _numba_compiles():
            from nnunet_cpr.kernels import cpu

            if all(p.dtype in cpu.DTYPES for p in params):
                return cpu.CPUPass(optimizer)
        return None
    if device.type == "cuda" and find_spec("triton") is not None:
        from nnunet_cpr.kernels import triton

        if all(p.dtype in triton.DTYPES for p in params) and triton.is_available():
            return triton.TritonPass(optimizer)
    return None


@lru_cache
def _numba_compiles() -> bool:
    """Whether the CPU's kernels can be had; if not, a warning says why."""

    def trial() -> bool:
        from nnunet_cpr.kernels import cpu_kernels

        return len(cpu_kernels.sum_partials(np.zeros(1, np.int32), np.zeros(0))) == 0

    return works("Numba", "CPU", trial)
