"""CPR's optimizers in timm: ``adamcpr``, ``muoncpr``, ``sgdcpr``, registered by importing this module.

timm passes parameter groups to an optimizer, but not the model. CPR needs the model for the names of the
parameters in its state dict, and to leave out embeddings when timm has built no group without weight
decay. The factory is therefore wrapped to provide the model.

Example:
    >>> import nnunet_cpr.integrations.timm
    >>> from timm.optim import create_optimizer_v2
    >>> optimizer = create_optimizer_v2(nn.Linear(3, 2), "adamcpr", lr=1e-3, kappa="ws1000")
    >>> optimizer.cpr.names
    ['weight']
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from timm.optim import OptimInfo, list_optimizers

# timm does not export its registry.
from timm.optim._optim_factory import default_registry
from torch import nn

from nnunet_cpr.cpr.regularized_parameters import ParamGroups, Params, param_groups, regularized
from nnunet_cpr.optimizers import SGDCPR, AdamCPR, MuonCPR
from nnunet_cpr.optimizers.muon import DEFAULT_LR

_TEXT_OPTIONS = ("kappa", "regularizer", "adjust_lr", "ns_coefficients", "ns_dtype", "adamw_for")
"""Options that may be strings."""

_model: ContextVar[nn.Module | None] = ContextVar("model", default=None)


class _TimmOptimizer(torch.optim.Optimizer):
    """Optimizer that accepts the arguments of timm's factory."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        *args: Any,
        weight_decay: float = 0.0,
        foreach: bool | None = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__.removeprefix("Timm")
        if foreach is not None:
            raise TypeError(f"{name} has no foreach; it selects the fastest step itself")
        known = inspect.signature(super().__init__).parameters
        for option, value in options.items():
            # The string "false" from a command line would count as true.
            if isinstance(value, str) and option in known and option not in _TEXT_OPTIONS:
                raise ValueError(f"{option}: expected a number, True or False, got {value!r}")
        named: Any = _add_names(params, weight_decay, _model.get())
        super().__init__(named, lr, *args, **options)  # type: ignore[arg-type]


class TimmAdamCPR(_TimmOptimizer, AdamCPR):
    """:class:`~nnunet_cpr.optimizers.AdamCPR` for timm's factory, under the name ``adamcpr``.

    Args:
        params: parameters, parameter groups or a module. The parameter matrices are selected by
            :mod:`nnunet_cpr.param_groups`, where a group with weight decay 0 beside groups with a
            positive one is not regularized.
        options: options of the base class. ``weight_decay`` is the default of the groups and only
            selects parameters.

    Raises:
        TypeError: the class has no such option, as ``foreach``.
        ValueError: an option has a wrong value.

    Example:
        >>> TimmAdamCPR(nn.Linear(2, 2), lr=1e-3, kappa="ws1000").cpr.bound
        KappaWS(steps=1000)
    """


class TimmSGDCPR(_TimmOptimizer, SGDCPR):
    """:class:`~nnunet_cpr.optimizers.SGDCPR` for timm's factory, under the name ``sgdcpr``.

    See :class:`TimmAdamCPR`.
    """


class TimmMuonCPR(_TimmOptimizer, MuonCPR):
    """:class:`~nnunet_cpr.optimizers.MuonCPR` for timm's factory, under the name ``muoncpr``.

    The model, if the factory knows it, tells the kinds of the parameter matrices. See
    :class:`TimmAdamCPR`.
    """

    def __init__(self, params: Params, lr: float = DEFAULT_LR, *args: Any, **options: Any) -> None:
        super().__init__(params, lr, *args, **{"model": _model.get(), **options})


def _add_names(params: Params, weight_decay: float, model: nn.Module | None) -> Params:
    """Return timm's groups with the names of the parameters and without regularized embeddings."""
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
        return model  # gives the state dict of an optimizer that is built without timm

    names = {id(p): name for group in param_groups(model) for name, p in group["params"]}
    wanted = {id(p) for p in regularized(model).values()}
    left_out = {id(p) for p in regularized(groups).values() if id(p) in names} - wanted
    for group in groups:
        group["params"] = [(names.get(id(p), name), p) for name, p in group["params"]]
    return [part for group in groups for part in _split(group, left_out)]


def _split(group: dict[str, Any], left_out: set[int]) -> list[dict[str, Any]]:
    """Return the group without the parameters to leave out, and a group of these if there are any."""
    rest = [item for item in group["params"] if id(item[1]) in left_out]
    kept = [item for item in group["params"] if id(item[1]) not in left_out]
    parts = [{**group, "params": kept}, {**group, "params": rest, "regularize": False}]
    return [part for part in parts if part["params"]]


def _provide_model(create_optimizer: Callable[..., Any]) -> Callable[..., Any]:
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
    """Register the optimizers in timm; importing this module calls this function."""
    if {"adamcpr", "muoncpr", "sgdcpr"} <= set(list_optimizers()):
        return
    registry: Any = default_registry
    traits: dict[Any, dict[str, Any]] = {
        TimmAdamCPR: {"has_betas": True},
        TimmSGDCPR: {"has_eps": False, "has_momentum": True},
        TimmMuonCPR: {"has_momentum": True, "has_betas": True},
    }
    for opt_class, own in traits.items():
        title = opt_class.__name__.removeprefix("Timm").removesuffix("CPR")
        description = f"{title} with Constrained Parameter Regularization in place of weight decay"
        registry.register(OptimInfo(f"{title.lower()}cpr", opt_class, description, **own))
    # If a later timm does not call this method, the optimizers are built without the model.
    registry.create_optimizer = _provide_model(registry.create_optimizer)


register()
