"""Construction of parameter groups, and their CPR, for the optimizers."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from nnunet_cpr.cpr.algorithm import CPR, CPRSettings
from nnunet_cpr.cpr.regularized_parameters import Params, param_groups, unwrap
from nnunet_cpr.cpr.saved_state import order_by_names
from nnunet_cpr.refusals import short_repr

_SCHEDULER_KEYS = {"initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"}
_LAYER_KEYS = {"lr_scale", "group_name", "layer_id", "layer_name"}
_FOREIGN_KEYS = {"name"} | _SCHEDULER_KEYS | _LAYER_KEYS
"""Keys of parameter groups for schedulers, timm, layer-wise learning rates, and Lightning's monitor of
learning rates (``name``). Any other unknown key is a mistake."""


def cpr_and_groups(
    optimizer: str, params: Params, given: dict[str, Any], weight_decay: Any, keys: set[str]
) -> tuple[CPR, list[dict[str, Any]]]:
    """Return CPR, and the parameter groups for torch with CPR's settings and without weight decay.

    Args:
        optimizer: name of the optimizer, for error messages.
        params: as in :class:`~nnunet_cpr.CPR`.
        given: values of :data:`CPRSettings.KEYS <nnunet_cpr.cpr.algorithm.CPRSettings>`.
        weight_decay: argument of the optimizer, which must be 0.
        keys: keys of the groups that the optimizer uses, in addition to those of CPR.

    Raises:
        TypeError: a weight decay, or a group with an unknown key.
    """
    if isinstance(weight_decay, Tensor) or weight_decay != 0:
        raise TypeError(
            f"weight_decay of {optimizer}: expected 0, since CPR replaces it, got "
            f"{short_repr(weight_decay)}; choose kappa instead"
        )
    if not isinstance(params, nn.Module):
        params = param_groups(params)
        known = keys | {"params", "lr", "weight_decay", "regularize", *CPRSettings.KEYS}
        for i, group in enumerate(params):
            for key in sorted(map(str, group.keys() - known - _FOREIGN_KEYS)):
                close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)  # layer_decay: 0.61
                advice = f"; did you mean {close[0]!r}?" if close else ""
                if key == "rho":  # SAM builds its base optimizer with its own parameter groups
                    advice = (
                        "; for SAM build its base optimizer without CPR and attach CPR to it: "
                        "CPR(params).attach(sam.base_optimizer)"
                    )
                raise TypeError(f"parameter group {i}: unknown key {key!r}{advice}")
    cpr = CPR(params, **given)
    groups = [
        {**group, **CPRSettings.parse({**given, **group}).plain(), "weight_decay": 0}
        for group in torch_groups(params)
    ]
    return cpr, groups


def torch_groups(params: Params) -> list[dict[str, Any]]:
    """Return parameter groups for torch.

    Of a module it is one group in the order of its parameters, as in
    ``torch.optim.SGD(module.parameters())``, so that state dicts are interchangeable.
    """
    groups = param_groups(params)
    if isinstance(params, nn.Module):
        names = {id(p): name for group in groups for name, p in group["params"]}
        return [{"params": [(names[id(p)], p) for p in unwrap(params).parameters()]}]
    return [
        {
            **{key: value for key, value in group.items() if key != "regularize"},
            "params": group["params"] if groups.has_names else [p for _, p in group["params"]],
        }
        for group in groups
    ]


class LoadsByName:
    """Loading of a state dict by the names of the parameters, beside an optimizer's class in torch."""

    loads_by_name = True
    param_groups: list[dict[str, Any]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Parameters with names may be in another order; torch goes by order.

        How this optimizer takes its steps is not part of it, see :func:`keep_fused`.

        Raises:
            ValueError: the saved groups have other parameters; nothing is changed then.
        """
        groups = order_by_names(self.param_groups, state_dict["param_groups"])
        groups = _with_own_fused(self.param_groups, groups)
        super().load_state_dict({**state_dict, "param_groups": groups})  # type: ignore[misc]
        _copy_loaded_state(cast(torch.optim.Optimizer, self))


def keep_fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let an optimizer of torch keep ``fused`` when it loads a state, and return it.

    Torch takes ``fused`` from the state. One of another machine or version would switch the fused steps
    off, which ``GradScaler`` goes on to tell of overflows, so that the next step would raise.

    Example:
        >>> parameters = [torch.nn.Parameter(torch.ones(2))]
        >>> optimizer = keep_fused(torch.optim.AdamW(parameters, fused=True))
        >>> optimizer.load_state_dict(torch.optim.AdamW(parameters).state_dict())
        >>> optimizer.param_groups[0]["fused"]
        True
    """

    def replace(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = _with_own_fused(optimizer.param_groups, state_dict["param_groups"])
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(replace)
    return optimizer


def _with_own_fused(
    own: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return saved parameter groups with ``fused`` of an optimizer's, as many as were saved."""
    fused = [{"fused": group["fused"]} if "fused" in group else {} for group in own]
    fused += [{}] * (len(saved) - len(own))  # torch refuses another number
    return [{**group, **mine} for group, mine in zip(saved, fused)]


def _copy_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """Copy a loaded state, for fused steps in the memory order of the parameters.

    torch keeps the tensors of the loaded dict: steps would change them, and a checkpoint read with
    ``mmap`` could not be overwritten.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                state[key] = value.clone()
                if group.get("fused") and value.shape == p.shape and value.layout is torch.strided:
                    state[key] = torch.empty_like(p, dtype=value.dtype).copy_(value)
