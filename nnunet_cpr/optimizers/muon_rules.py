"""Rule of each parameter: Muon for parameter matrices, and AdamW's rule for the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nnunet_cpr.cpr.regularized_parameters import Params, param_groups, regularized, unwrap
from nnunet_cpr.cpr.shards import is_sharded
from nnunet_cpr.optimizers.groups import torch_groups

KINDS = ("first", "head", "transposed", "depthwise")
"""Kinds of parameter matrices that can be left to AdamW's rule; see :func:`kinds`."""
ADAMW_KINDS = ("first", "head", "depthwise")
"""Kinds that are left to AdamW's rule by default."""

ADAMW = "adamw"
MUON = "muon"
MUON_TRANSPOSED = "muon_transposed"
"""Muon for a weight with the output channels in the second dimension, after the input channels."""


def kinds(model: nn.Module) -> dict[int, set[str]]:
    """Return the kinds of each regularized parameter of a model, by the id of the parameter.

    - ``first``: the weight of the first convolutional or linear layer, unless an embedding is before it.
    - ``head``: the segmentation heads of nnU-Net's networks (``seg_layers``), the classifier of timm's
      models, or else the weight of the last convolutional or linear layer.
    - ``transposed``: weights of transposed convolutions.
    - ``depthwise``: weights of convolutions with one group for each channel.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 2), nn.Conv2d(8, 2, 1))
        >>> [sorted(found) for found in kinds(model).values()]
        [['first'], ['transposed'], ['head']]
    """
    model = unwrap(model)
    matrices = regularized(model)
    found: dict[int, set[str]] = {id(p): set() for p in matrices.values()}
    if not found:
        return found
    # Of all layers, as no other layer takes the place of one that is not regularized.
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    inputs = [m for m in model.modules() if isinstance(m, nn.Embedding) or m in layers[:1]]
    first: list[Tensor] = [p for m in inputs[:1] if m in layers for p in m.parameters(recurse=False)]
    for p in first:
        found.get(id(p), set()).add("first")
    for p in _head(model, matrices, layers):
        found.get(id(p), set()).add("head")
    for layer in layers:
        of_layer = found.get(id(layer.weight), set())
        if isinstance(layer, nn.modules.conv._ConvNd):
            if layer.transposed:
                of_layer.add("transposed")
            if layer.groups > 1 and layer.groups == layer.in_channels:
                of_layer.add("depthwise")
    return found


def _head(model: nn.Module, matrices: dict[str, Tensor], layers: Sequence[nn.Module]) -> list[Tensor]:
    """Return the parameters of the segmentation heads, of timm's classifier, or of the last layer."""
    heads = [p for name, p in matrices.items() if "seg_layers" in name.split(".")]
    if heads:
        return heads
    classifier = getattr(model, "get_classifier", None)
    if callable(classifier):
        found = classifier()
        last = [m for m in (found if isinstance(found, tuple) else (found,)) if isinstance(m, nn.Module)]
        return [p for module in last for p in module.parameters()]
    return [p for layer in layers[-1:] for p in layer.parameters(recurse=False)]


def check_kinds(adamw_for: Sequence[str]) -> tuple[str, ...]:
    """Return ``adamw_for`` as a tuple in the order of :data:`KINDS`.

    Raises:
        ValueError: unknown kind.
    """
    given = [adamw_for] if isinstance(adamw_for, str) else list(adamw_for)
    for kind in given:
        if kind not in KINDS:
            raise ValueError(f"adamw_for: unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in given)


def assign_rules(
    groups: Sequence[dict[str, Any]],
    matrices: Iterable[Tensor],
    model: nn.Module | None,
    adamw_for: Sequence[str],
) -> None:
    """Set ``rules`` of each parameter group: the rule of each of its parameters.

    Args:
        groups: parameter groups, with or without names. ``use_muon`` of a group decides for all of its
            parameters with at least two rows and columns, and its ``adamw_for`` replaces the argument.
        matrices: parameter matrices that CPR would regularize.
        model: module of the parameters, None if it is not known. Other parameters are of no kind.
        adamw_for: kinds of matrices that follow AdamW's rule.

    Raises:
        TypeError: a parameter is a DTensor.
        ValueError: a group has an unknown kind.
    """
    known = {} if model is None else kinds(model)
    in_model = set() if model is None else {id(p) for p in model.parameters()}
    # The model says more than names do, but nothing about parameters that it does not have.
    regularized_ids = {id(p) for p in matrices if id(p) in known or id(p) not in in_model}
    for group in groups:
        left_out = check_kinds(group.get("adamw_for", adamw_for))
        for_muon = {key for key in regularized_ids if known.get(key, set()).isdisjoint(left_out)}
        members = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
        for p in members:
            if is_sharded(p):
                raise TypeError(
                    f"parameter of shape {tuple(p.shape)}: expected a plain tensor, got a DTensor, "
                    "which Muon does not support; use AdamCPR"
                )
        use = group.get("use_muon")
        group["rules"] = [
            _rule(p, id(p) in for_muon if use is None else use, known.get(id(p), set())) for p in members
        ]


def _rule(p: Tensor, use_muon: bool, found: set[str]) -> str:
    if not use_muon or p.ndim < 2:
        return ADAMW
    rows = p.shape[1 if "transposed" in found else 0]
    if min(rows, p.numel() // max(rows, 1)) < 2:  # orthogonalizing a vector only normalizes it
        return ADAMW
    return MUON_TRANSPOSED if "transposed" in found else MUON


def with_rules(
    params: Params, model: nn.Module | None, adamw_for: Sequence[str]
) -> list[dict[str, Any]]:
    """Return parameter groups with the rule of each parameter, unchanged if they have rules."""
    if isinstance(params, nn.Module):
        groups = torch_groups(params)
    else:
        items: list[Any] = list(params)
        if items and all(isinstance(group, Mapping) and "rules" in group for group in items):
            return items
        params = param_groups(items)
        groups = torch_groups(params)
    assign_rules(groups, regularized(params).values(), model, adamw_for)
    return groups
