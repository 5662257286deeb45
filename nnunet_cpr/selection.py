"""Which parameters are regularized: matrices, convolution kernels and their like.

Biases, normalization weights and embeddings are not (the rule of timm and of the authors' code; the
paper's text names the first two): a parameter with fewer than two dimensions is out, and so are the
weights of normalization layers and ``nn.Embedding``, parameters named ``bias``, what the model lists in
``no_weight_decay()``, and the parameter groups that ask for it with ``regularize=False``, or with
``weight_decay=0`` beside groups whose weight decay is positive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nnunet_cpr.sharding import refuse_flat_shards

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Mapping[str, Any]]
"""A module, parameters, named parameters, or parameter groups."""

_NEVER_REGULARIZED = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.modules.batchnorm._NormBase,  # every batch and instance normalization
    nn.LayerNorm,
    nn.GroupNorm,
    *([nn.RMSNorm] if hasattr(nn, "RMSNorm") else []),
)


def param_groups(params: Params) -> list[dict[str, Any]]:
    """``params`` as parameter groups of named parameters: ``{"params": [(name, tensor), ...], ...}``.

    A parameter that comes without a name is named after its place: ``"3"`` in a list, ``"1.3"`` in
    parameter groups.

    Raises:
        TypeError: ``params`` is none of the four kinds.
    """
    if isinstance(params, nn.Module):
        return _module_groups(params)
    if isinstance(params, Tensor):
        raise TypeError("params is one tensor; give a module, a list of parameters or groups")
    items = list(params)
    if not any(isinstance(item, Mapping) for item in items):
        return [{"params": list(_name(items))}]
    groups = []
    for i, group in enumerate(items):
        if not isinstance(group, Mapping):
            raise TypeError("params mixes parameter groups and parameters")
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        groups.append({**group, "params": list(_name(members, prefix=f"{i}."))})
    return groups


def regularized(params: Params) -> dict[str, Tensor]:
    """The parameters to regularize, by name, in their order; tied parameters once.

    Raises:
        ValueError: there is none, or two parameters share a name.
    """
    groups = param_groups(params)
    chosen: dict[str, Tensor] = {}
    seen: set[int] = set()
    for group in groups:
        if not _asks_for_it(group, groups):
            continue
        for name, p in group["params"]:
            if id(p) in seen or not _is_matrix(name, p):
                continue
            if name in chosen:
                raise ValueError(f"two different parameters are named {name!r}")
            seen.add(id(p))
            chosen[name] = p
    if not chosen:
        raise ValueError(
            "no parameter to regularize: CPR takes trainable parameters with two or more "
            "dimensions that are no embedding, bias or normalization weight"
        )
    return chosen


def _asks_for_it(group: Mapping[str, Any], groups: list[dict[str, Any]]) -> bool:
    decays = [g.get("weight_decay", 0) for g in groups]
    excluded_by_decay = group.get("weight_decay") == 0 and any(d > 0 for d in decays)
    return bool(group.get("regularize", not excluded_by_decay))


def _is_matrix(name: str, p: Tensor) -> bool:
    is_bias = name.rpartition(".")[2] == "bias"
    return p.requires_grad and p.ndim >= 2 and p.numel() > 0 and not is_bias


def _unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile``."""
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def _module_groups(module: nn.Module) -> list[dict[str, Any]]:
    """A group to regularize and, where there are any, one of what its layers or itself leave out.

    Names are those of the plain module, so that a compiled model's checkpoint fits any other.
    """
    module = _unwrap(module)
    left_out = _left_out(module)
    named = list(_name(module.named_parameters()))
    groups: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in named if id(p) not in left_out]},
        {"params": [(name, p) for name, p in named if id(p) in left_out], "regularize": False},
    ]
    return [group for group in groups if group["params"]]


def _left_out(root: nn.Module) -> set[int]:
    """The parameters, by ``id``, that the kind of their layer or the model itself leaves out."""
    ids: set[int] = set()
    for module in root.modules():
        if isinstance(module, _NEVER_REGULARIZED):
            ids.update(id(p) for p in module.parameters(recurse=False))
        listing = getattr(module, "no_weight_decay", None)
        if callable(listing):
            listed = set(listing())
            ids.update(id(p) for name, p in module.named_parameters() if name in listed)
    return ids


def _name(items: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for i, item in enumerate(items):
        name, p = item if isinstance(item, tuple) else (f"{prefix}{i}", item)
        if not isinstance(p, Tensor) or not isinstance(name, str):
            raise TypeError(
                "params must be a module, parameters, (name, parameter) pairs or parameter "
                f"groups; found a {type(p).__name__}"
            )
        refuse_flat_shards(name, p)
        if torch.is_complex(p):
            raise TypeError(f"parameter {name!r} is complex, which CPR does not support")
        yield name.replace("_orig_mod.", ""), p  # torch.compile puts it in
