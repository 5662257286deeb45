"""Construction of parameter groups, and their CPR, for the optimizers."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import Tensor, nn

from nnunet_cpr._distributed import is_sharded, local_tensors
from nnunet_cpr._row_norms import is_dense
from nnunet_cpr._validation import short_repr
from nnunet_cpr.cpr import CPR, CPRSettings
from nnunet_cpr.fused import is_enabled
from nnunet_cpr.param_groups import ParamGroups, Params, param_groups, unwrap

_TORCH_KEYS = {"lr", "maximize", "foreach", "differentiable", "fused", "params", "weight_decay"}
_FOREIGN_KEYS = {
    "name",  # Lightning's monitor of learning rates
    *("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"),  # schedulers
    *("lr_scale", "group_name", "layer_id", "layer_name"),  # timm and layer-wise learning rates
}
"""Keys of parameter groups that other libraries use; any other unknown key is a mistake."""


def build_groups(
    params: Params, given: dict[str, Any], torch_keys: set[str]
) -> tuple[CPR, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return CPR, the parameter groups for torch, and CPR's settings of each group as plain values.

    In the groups the weight decay is 0. A module gives one group in the order of its parameters, as in
    ``torch.optim.SGD(module.parameters())``, so that state dicts are interchangeable.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        given: values of :data:`CPRSettings.KEYS <nnunet_cpr.cpr.CPRSettings>`.
        torch_keys: keys of the groups of this optimizer in addition to those of every optimizer.

    Raises:
        TypeError: a group has an unknown key.
    """
    groups = param_groups(params)
    known = torch_keys | _TORCH_KEYS | {"regularize", *CPRSettings.KEYS}
    for i, group in enumerate(groups):
        for key in sorted(map(str, group.keys() - known - _FOREIGN_KEYS)):
            raise TypeError(f"parameter group {i}: unknown key {key!r}{_advice(key, known)}")
    cpr = CPR(groups, **given)
    settings = [CPRSettings.parse({**given, **group}).plain() for group in groups]
    for_torch = [
        {**group, **own, "weight_decay": 0}
        for group, own in zip(
            torch_groups(groups, params if isinstance(params, nn.Module) else None), settings
        )
    ]
    return cpr, for_torch, settings[: len(for_torch)]


def _advice(key: str, known: set[str]) -> str:
    if key == "rho":  # SAM builds its base optimizer with its own parameter groups
        return (
            "; for SAM build its base optimizer without CPR and attach CPR to it: "
            "CPR(params).attach(sam.base_optimizer)"
        )
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)  # layer_decay: 0.61
    return f"; did you mean {close[0]!r}?" if close else ""


def torch_groups(groups: ParamGroups, model: nn.Module | None) -> list[dict[str, Any]]:
    """Return the groups for torch, of a module one group in the order of its parameters."""
    if model is not None:
        names = {id(p): name for group in groups for name, p in group["params"]}
        return [{"params": [(names[id(p)], p) for p in unwrap(model).parameters()]}]
    return [
        {
            **{key: value for key, value in group.items() if key != "regularize"},
            "params": group["params"] if groups.has_names else [p for _, p in group["params"]],
        }
        for group in groups
    ]


def check_no_weight_decay(optimizer: str, weight_decay: Any) -> None:
    """Check that no weight decay is given.

    Raises:
        TypeError: it is.
    """
    if isinstance(weight_decay, Tensor) or weight_decay != 0:
        raise TypeError(
            f"weight_decay of {optimizer}: expected 0, since CPR replaces it, got "
            f"{short_repr(weight_decay)}; choose kappa instead"
        )


def choose_fused(fused: bool | None, groups: list[dict[str, Any]], *, is_sgd: bool) -> bool:
    """Return ``fused``, or if it is None, True if the parameters allow a fused step.

    Raises:
        ValueError: ``fused=True`` and a parameter has gaps in memory.
    """
    items = [item for group in groups for item in group["params"]]
    params = [item[1] if isinstance(item, tuple) else item for item in items]
    # Quantized parameters have integer dtypes and are never trained.
    params = [p for p in params if p.is_floating_point()]
    gaps = [p for p, local in zip(params, local_tensors(params)) if not is_dense(local)]
    if fused and gaps:
        raise ValueError(
            "fused=True: expected parameters without gaps in memory, got one of shape "
            f"{tuple(gaps[0].shape)} with strides {gaps[0].stride()}; make it contiguous or omit fused"
        )
    if fused is not None:
        return fused
    if gaps or not is_enabled() or not all(p.device.type in ("cpu", "cuda") for p in params):
        return False
    # torch has no fused SGD for DTensors; its fused SGD in half precision on the CPU is wrong in 2.6.
    return not is_sgd or not any(
        is_sharded(p) or (p.device.type == "cpu" and p.dtype.itemsize < 4) for p in params
    )


def copy_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """Copy a loaded state, for fused steps in the memory order of the parameters.

    torch keeps the tensors of the loaded dict: steps would change them, and a checkpoint read with
    ``mmap`` could not be overwritten.
    """
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    fused = {id(p) for group in groups for p in group["params"]}
    for p, state in optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():  # users may add other values
            if not isinstance(value, Tensor):
                continue
            state[key] = value.clone()
            if id(p) in fused and value.shape == p.shape and value.layout is torch.strided:
                state[key] = torch.empty_like(p, dtype=value.dtype).copy_(value)
