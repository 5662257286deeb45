"""timm's optimizers by the names of its registry, for trainers of nnU-Net and for vision runs.

timm is imported when one of them is named. Its learning rate is set by the trainer's schedule, and its
weight decay is that of the name for all parameters, as in nnU-Net's own optimizer.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # names are read without torch
    from torch import Tensor
    from torch.optim import Optimizer

_FALLBACK_LR = 1e-3
"""Learning rate for optimizers whose class has no default."""
_REASONS = {
    "bnb": "it needs the package bitsandbytes",
    "fused": "it needs the package apex",
    "muon": "its rule for vectors keeps its first learning rate; use nnUNetTrainerMuon",
}
"""Reasons against optimizers of timm, by a part of their names."""


def list_names() -> list[str]:
    """Return the names of all optimizers of the installed timm.

    Example:
        >>> "lion" in list_names()
        True
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timm uses torch.jit
        from timm.optim import list_optimizers
    ours = ("adamcpr", "muoncpr", "sgdcpr")  # of nnunet_cpr.integrations.timm
    return [str(name) for name in list_optimizers() if name not in ours]


def describe(name: str) -> str:
    """Return timm's description of an optimizer.

    Example:
        >>> describe("adamw")
        'torch.optim.AdamW, Adam with decoupled weight decay'
    """
    return str(_info(name).description)


def refusal(name: str) -> str:
    """Return the reason why an optimizer of timm cannot train here, "" if it can.

    Example:
        >>> refusal("lion"), refusal("adahessian")
        ('', 'it needs second derivatives')
    """
    if _info(name).second_order:
        return "it needs second derivatives"
    return next((reason for part, reason in _REASONS.items() if part in name), "")


def check(name: str, has_momentum: bool = False) -> None:
    """Check that timm has an optimizer of this name, and that it can train here.

    Args:
        name: name in timm's registry.
        has_momentum: True if a momentum is to be set.

    Raises:
        ValueError: there is none, it cannot train here, or it takes no momentum.

    Example:
        >>> check("lion")
    """
    if name not in (known := list_names()):
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        advice = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"timm has no optimizer {name!r}; {advice}nnunet-cpr trainers nnUNetTrainerTimm lists them"
        )
    if reason := refusal(name):
        raise ValueError(f"{name} of timm cannot train here: {reason}")
    if has_momentum and not _info(name).has_momentum:
        raise ValueError(f"{name} of timm takes no momentum")


def default_lr(name: str) -> float:
    """Return the default learning rate of an optimizer's class.

    Example:
        >>> default_lr("lion")
        0.0001
    """
    default = inspect.signature(_info(name).opt_class).parameters["lr"].default
    return default if isinstance(default, float) else _FALLBACK_LR


def build(
    parameters: Iterable[Tensor],
    name: str,
    lr: float,
    weight_decay: float = 0.0,
    momentum: float | None = None,
    fused: bool | None = None,
) -> Optimizer:
    """Return an optimizer of timm, whose state dict says which optimizer and which timm wrote it.

    Args:
        parameters: the parameters, in one group.
        name: name in timm's registry.
        lr: learning rate.
        weight_decay: weight decay of all parameters, as the optimizer applies it.
        momentum: momentum, or None for timm's default.
        fused: True lets a step skip the overflows of ``GradScaler`` itself, where the optimizer is Adam
            or AdamW of torch; others have no such step.

    Example:
        >>> import torch
        >>> optimizer = build(torch.nn.Linear(2, 2).parameters(), "lion", lr=1e-4)
        >>> type(optimizer).__name__, optimizer.param_groups[0]["timm"].partition(",")[0]
        ('Lion', 'lion')
    """
    import torch
    from timm.optim import create_optimizer_v2

    from nnunet_cpr.optimizers.groups import keep_fused

    given: dict[str, Any] = {} if momentum is None else {"momentum": momentum}
    groups: Any = [{"params": list(parameters)}]
    is_fused = bool(fused) and _info(name).opt_class in (torch.optim.Adam, torch.optim.AdamW)
    if is_fused:
        given["fused"] = True
    optimizer = create_optimizer_v2(groups, name, lr, weight_decay, **given)
    if is_fused:
        keep_fused(optimizer)
    optimizer.param_groups[0]["timm"] = f"{name}, timm {version('timm')}"
    optimizer.register_load_state_dict_pre_hook(_check_state)
    return optimizer


def _check_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise ValueError for the state dict of another optimizer."""
    ours = optimizer.param_groups[0]["timm"]
    theirs = state_dict["param_groups"][0].get("timm", "another optimizer")
    if ours.partition(",")[0] != theirs.partition(",")[0]:
        raise ValueError(f"state_dict: expected that of {ours}, got that of {theirs}")


def _info(name: str) -> Any:
    from timm.optim import get_optimizer_info

    return get_optimizer_info(name)
