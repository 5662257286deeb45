"""Fused steps: decay of each matrix, optimizer update and the next sums of squares in one kernel.

:class:`~nnunet_cpr.fused.backend.FusedBackend` is the interface of the backends; :func:`find_backend`
chooses one. Where no backend applies, the unfused step is taken: the regularization method corrects,
then torch's optimizer updates. The backends are tested against it.

To add a backend: write a subclass of ``FusedBackend``, return it from :func:`find_backend`, and add its
device to ``choose_fused`` in ``nnunet_cpr/optimizers/_groups.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

from torch import Tensor

from nnunet_cpr.fused._self_check import compiler_works
from nnunet_cpr.fused.backend import FusedBackend, GroupStep, Rule

__all__ = ["FusedBackend", "GroupStep", "Rule", "find_backend", "is_enabled"]

SWITCH = "NNUNET_CPR_FUSED"
"""Environment variable; 0 disables all fused steps."""


def is_enabled() -> bool:
    """Return True unless the environment variable ``NNUNET_CPR_FUSED`` disables fused steps.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"environment variable {SWITCH}: expected 0 or 1, got {value!r}")
    return value == "1"


def find_backend(matrices: Sequence[Tensor], params: Sequence[Tensor]) -> FusedBackend | None:
    """Return a backend for the parameters, None if there is none.

    Args:
        matrices: regularized parameters; of DTensors the local tensors.
        params: all parameters that the optimizer may update, including the matrices.

    Example:
        >>> import torch
        >>> print(find_backend([], [torch.zeros(2, 2, device="meta")]))
        None
    """
    devices = {p.device for p in params}
    if len(devices) != 1:
        return None
    device = devices.pop()
    if device.type == "cpu":
        if _numba_works():
            from nnunet_cpr.fused import cpu

            if all(p.dtype in cpu.DTYPES for p in params):
                return cpu.CPUBackend(matrices, device)
        return None
    if device.type == "cuda" and find_spec("triton") is not None:
        from nnunet_cpr.fused import triton

        if all(p.dtype in triton.DTYPES for p in params) and triton.is_available():
            return triton.TritonBackend(matrices, device)
    return None


@lru_cache
def _numba_works() -> bool:
    """Return True if Numba compiles the CPU kernels; if not, warn with the reason."""

    def trial() -> bool:
        from nnunet_cpr.fused import _cpu_kernels

        return _cpu_kernels.add_one(1) == 2

    return compiler_works("Numba", "CPU", trial)
