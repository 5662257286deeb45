"""CPR's correction and the optimizer's step in one pass over the memory.

:class:`~nnunet_cpr.fused.backend.OnePass` is the interface of the backends; :func:`one_pass_for`
chooses one. What no backend covers takes the unfused way: the regularizer corrects, then torch steps.
The backends are tested against it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
from torch import Tensor

from nnunet_cpr.fused._trial import works
from nnunet_cpr.fused.backend import GroupStep, OnePass, Rule

__all__ = ["GroupStep", "OnePass", "Rule", "fused_steps_are_on", "one_pass_for"]

SWITCH = "NNUNET_CPR_FUSED"
"""Environment variable; 0 turns all fused steps off."""


def fused_steps_are_on() -> bool:
    """Return True unless the environment variable ``NNUNET_CPR_FUSED`` turns fused steps off.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"environment variable {SWITCH}: expected 0 or 1, got {value!r}")
    return value == "1"


def one_pass_for(matrices: Sequence[Tensor], params: Sequence[Tensor]) -> OnePass | None:
    """Return the backend for these parameters, None if there is none.

    Args:
        matrices: the regularized parameters; of DTensors the parts that this process has.
        params: what the optimizer may step, the matrices among it.
    """
    devices = {p.device for p in params}
    if len(devices) != 1:
        return None
    device = devices.pop()
    if device.type == "cpu":
        if _numba_compiles():
            from nnunet_cpr.fused import cpu

            if all(p.dtype in cpu.DTYPES for p in params):
                return cpu.CPUPass(matrices, device)
        return None
    if device.type == "cuda" and find_spec("triton") is not None:
        from nnunet_cpr.fused import triton

        if all(p.dtype in triton.DTYPES for p in params) and triton.is_available():
            return triton.TritonPass(matrices, device)
    return None


@lru_cache
def _numba_compiles() -> bool:
    """Return True if Numba compiles the CPU's kernels; if not, a warning says why."""

    def trial() -> bool:
        from nnunet_cpr.fused import _cpu_kernels

        return len(_cpu_kernels.sum_partials(np.zeros(1, np.int32), np.zeros(0))) == 0

    return works("Numba", "CPU", trial)
