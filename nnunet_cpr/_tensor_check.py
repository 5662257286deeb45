"""Check of the tensors of a step, before anything is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_TAKE_SPARSE = (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.LBFGS)
_STATE_OF_OTHER_SHAPES = (torch.optim.Adafactor, torch.optim.LBFGS)
_OURS_AND_TORCHS = ("nnunet_cpr.", "torch.optim.")


def layouts(optimizer: Optimizer) -> dict[int, Any]:
    """Return shape, dtype and device of each parameter, by its id."""
    return {id(p): (p.shape, p.dtype, p.device) for g in optimizer.param_groups for p in g["params"]}


def check_tensors(optimizer: Optimizer, before: dict[int, Any]) -> None:
    """Check that gradients and state are like their parameters, as optimizers expect.

    Otherwise an optimizer of torch raises amid its step, when CPR and the optimizer have moved some
    parameters. Torch's and ours make all tensors of the state like the parameter. Other optimizers may
    have their own dtypes, so that only the state of parameters that have changed is checked.

    Args:
        optimizer: optimizer about to take a step.
        before: :func:`layouts` at an earlier step.

    Raises:
        RuntimeError: a gradient or a tensor of the state has another shape, dtype or device than its
            parameter, or a gradient is sparse and the optimizer takes none.
    """
    takes_sparse = _takes_sparse_gradients(optimizer)
    classes = type(optimizer).__mro__
    is_ours = any(c.__module__.startswith("nnunet_cpr.") for c in classes)  # or derived from ours
    is_known = is_ours or classes[0].__module__.startswith("torch.optim.")
    checks_all = is_known and not isinstance(optimizer, _STATE_OF_OTHER_SHAPES)
    for group in optimizer.param_groups:
        for k, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            if p.grad.is_sparse and not takes_sparse:
                raise RuntimeError(
                    f"{type(optimizer).__name__} does not support sparse gradients; build embeddings "
                    "with sparse=False"
                )
            own = p.shape, p.dtype, p.device
            tensors = {"gradient": p.grad}
            if checks_all or before.get(id(p), own) != own:
                tensors |= optimizer.state.get(p, {})
            for key, t in tensors.items():
                is_like = not isinstance(t, Tensor) or (t.shape, t.dtype, t.device) == own
                # The number of steps is a scalar.
                if not is_like and (t.ndim or key == "gradient"):
                    raise RuntimeError(
                        f"{key} of {_name(optimizer, group, k)}: expected {_layout(p)} like the "
                        f"parameter, got {_layout(t)}; cast, move or resize a model before building its "
                        "optimizer"
                    )


def _takes_sparse_gradients(optimizer: Optimizer) -> bool:
    """Return True if the optimizer takes sparse gradients, or may do so."""
    classes = type(optimizer).__mro__
    is_known = any(c.__module__.startswith(_OURS_AND_TORCHS) and c is not Optimizer for c in classes)
    return isinstance(optimizer, _TAKE_SPARSE) or not is_known


def _name(optimizer: Optimizer, group: dict[str, Any], k: int) -> str:
    if "param_names" in group:
        return f"parameter {group['param_names'][k]!r}"
    return f"parameter {k} of group {[own is group for own in optimizer.param_groups].index(True)}"


def _layout(t: Tensor) -> str:
    return f"{t.dtype} of shape {list(t.shape)} on {t.device}"
