"""CPR's correction and the optimizer's step in one pass over the memory.

:class:`~nnunet_cpr.kernels.one_pass.OnePass` says what a backend does; :func:`one_pass_for` is the one
place that chooses. What no backend covers goes the plain way: the regularizer corrects, then torch
steps. The plain way is also what the backends are tested against.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from nnunet_cpr.kernels.one_pass import OnePass

if TYPE_CHECKING:
    from nnunet_cpr.optim import CPROptimizer

__all__ = ["OnePass", "one_pass_for"]


def one_pass_for(optimizer: CPROptimizer) -> OnePass | None:
    """The backend for this optimizer's parameters, None where there is none."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    devices = {p.device for p in params}
    given_twice = len({id(p) for p in params}) < len(params)  # torch steps such a one twice
    if optimizer.cpr.regularizer.name != "l2" or len(devices) != 1 or given_twice:
        return None
    device = devices.pop()
    if device.type == "cpu":
        from nnunet_cpr.kernels.cpu import CPUPass

        return CPUPass(optimizer)
    if device.type == "cuda" and find_spec("triton") is not None:
        from nnunet_cpr.kernels.triton import DTYPES, TritonPass, is_available

        if all(p.dtype in DTYPES for p in params) and is_available():
            return TritonPass(optimizer)
    return None
