"""Fused steps: decay of each matrix and optimizer update in one kernel.

The interface of the backends is :class:`~nnunet_cpr.fused.backend.Backend`; :func:`find_backend` chooses
one. A :class:`~nnunet_cpr.fused.backend.Plan` lists the tensors of a step. If they allow no plan, or no
kernel has the settings, the unfused step is taken: the regularization method corrects, then torch's
optimizer updates. The backends are tested against it.

There is none for GPUs. There the time of the host counts, which waits for the gradients in mixed
precision and then lets the GPU wait: listing all tensors in Python takes longer than the separate
correction, and torch's own fused step lists them in C++.

To add a backend: write a subclass of ``Backend`` and return it from :func:`find_backend`.
"""

from __future__ import annotations

import os
import warnings
from functools import lru_cache

import torch

from nnunet_cpr.fused.backend import Backend, Plan, Rule, are_alike, share_memory

__all__ = ["Backend", "Plan", "Rule", "are_alike", "find_backend", "is_enabled", "share_memory"]

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


def find_backend(device: torch.device) -> Backend | None:
    """Return the backend for tensors on a device, None if there is none.

    Example:
        >>> print(find_backend(torch.device("meta")))
        None
    """
    return _cpu_backend() if device.type == "cpu" else None


@lru_cache
def _cpu_backend() -> Backend | None:
    """Return the backend if Numba compiles a trial kernel and has a cache; if not, warn."""
    try:
        from nnunet_cpr.fused import _cpu_kernels, cpu

        _cpu_kernels.add_one(1)
        return cpu.CPUBackend()
    except Exception as error:  # its compiler raises errors of many classes
        # If neither the folder of this package nor the user's cache can be written.
        is_cache = "cannot cache function" in str(error)
        advice = "; set NUMBA_CACHE_DIR=<folder that can be written>" if is_cache else ""
        warnings.warn(
            "CPR's fused step on the CPU is disabled: Numba cannot compile a kernel "
            f"({type(error).__name__}: {error}); the slower unfused step is taken instead{advice}",
            stacklevel=2,
        )
        return None
