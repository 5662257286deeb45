"""``adamcpr`` and ``sgdcpr`` for timm's optimizer factory; importing this module registers them.

    import nnunet_cpr.integrations.timm
    optimizer = timm.optim.create_optimizer_v2(model, "adamcpr", lr=1e-3, kappa="ws1000")

timm hands an optimizer the groups that it made of a model's parameters, without the model. CPR wants the
model: for the names under which it saves its state, and to leave out embeddings where timm was given no
weight decay and so made no group without. So the factory is also made to tell which model it works on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from timm.optim import OptimInfo, list_optimizers

# timm exports no way to its registry.
from timm.optim._optim_factory import default_registry
from torch import nn

from nnunet_cpr.optimizers import SGDCPR, AdamCPR, CPROptimizer
from nnunet_cpr.param_groups import ParamGroups, Params, param_groups, regularized

_model: ContextVar[nn.Module | None] = ContextVar("the model at hand", default=None)


class _ForTimm(CPROptimizer):
    """An optimizer built from what timm passes: groups of a model's parameters and strings."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        *args: Any,
        weight_decay: float = 0.0,
        foreach: bool | None = None,
        **options: Any,
    ) -> None:
        kind = self._torch_class.__name__ + "CPR"
        if foreach is not None:
            raise TypeError(f"{kind} has no foreach; it chooses the fastest step by itself")
        known = inspect.signature(super().__init__).parameters
        for option, value in options.items():
            # From a command line: "false" would count as true.
            if isinstance(value, str) and option in known and option not in ("regularizer", "kappa"):
                raise ValueError(f"{option} must be a number, True or False, got {value!r}")
        named: Any = _with_names(params, weight_decay, _model.get())
        super().__init__(named, lr, *args, **options)  # type: ignore[arg-type]


class TimmAdamCPR(_ForTimm, AdamCPR):
    """:class:`~nnunet_cpr.optimizers.AdamCPR` as timm's factory builds it, under the name ``adamcpr``.

    Args:
        params: parameters or groups, or a module. CPR takes the matrices that are neither in a group
            with weight decay 0 beside others with more, nor left out by the model's own rule
            (:mod:`nnunet_cpr.param_groups`).
        options: those of the class. ``weight_decay`` is that of groups without one, and does nothing
            but select.

    Raises:
        TypeError: an option that the class does not have, ``foreach`` too.
        ValueError: a value that its option cannot have.
    """


class TimmSGDCPR(_ForTimm, SGDCPR):
    """:class:`~nnunet_cpr.optimizers.SGDCPR` in the same way, under the name ``sgdcpr``."""


def _with_names(params: Params, weight_decay: float, model: nn.Module | None) -> Params:
    """What an optimizer of ours takes in place of timm's groups: the names in, embeddings out."""
    if isinstance(params, nn.Module):
        return params
    given = param_groups(params)
    groups = ParamGroups({"weight_decay": weight_decay, **group} for group in given)
    groups.has_names = given.has_names
    if model is None:
        return groups
    held = [id(p) for group in groups for _, p in group["params"]]
    is_whole = len(groups) == 1 and groups[0].keys() == {"params", "weight_decay"}
    if is_whole and held == [id(p) for p in model.parameters()]:
        return model  # so that its state fits an optimizer built without timm

    names = {id(p): name for group in param_groups(model) for name, p in group["params"]}
    wanted = {id(p) for p in regularized(model).values()}
    left_out = {id(p) for p in regularized(groups).values() if id(p) in names} - wanted
    for group in groups:
        group["params"] = [(names.get(id(p), name), p) for name, p in group["params"]]
    return [part for group in groups for part in _split(group, left_out)]


def _split(group: dict[str, Any], left_out: set[int]) -> list[dict[str, Any]]:
    """The group and, where there are any, one of its parameters that are left out."""
    rest = [item for item in group["params"] if id(item[1]) in left_out]
    kept = [item for item in group["params"] if id(item[1]) not in left_out]
    parts = [{**group, "params": kept}, {**group, "params": rest, "regularize": False}]
    return [part for part in parts if part["params"]]


def _telling_model(create_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create_optimizer)
    def create(model_or_params: Any, *args: Any, **kwargs: Any) -> Any:
        model = model_or_params if isinstance(model_or_params, nn.Module) else None
        token = _model.set(model)
        try:
            return create_optimizer(model_or_params, *args, **kwargs)
        finally:
            _model.reset(token)

    return create


def register() -> None:
    """Make timm know ``adamcpr`` and ``sgdcpr``; the import of this module has done it already."""
    if {"adamcpr", "sgdcpr"} <= set(list_optimizers()):
        return
    registry: Any = default_registry
    registry.register(
        OptimInfo(
            name="adamcpr",
            opt_class=TimmAdamCPR,
            description="Adam with Constrained Parameter Regularization in place of weight decay",
            has_betas=True,
        )
    )
    registry.register(
        OptimInfo(
            name="sgdcpr",
            opt_class=TimmSGDCPR,
            description="SGD with Constrained Parameter Regularization in place of weight decay",
            has_eps=False,
            has_momentum=True,
        )
    )
    # Should timm come to build its optimizers another way, then this only finds no model.
    registry.create_optimizer = _telling_model(registry.create_optimizer)


register()
