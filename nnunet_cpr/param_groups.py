"""Which parameters are regularized: matrices, convolution kernels and their like.

Biases, normalization weights and embeddings are not (the rule of timm and of the authors' code; the
paper's text names the first two): a parameter with fewer than two dimensions is out, and so are the
weights of normalization layers and ``nn.Embedding``, parameters named ``bias``, what the model lists in
``no_weight_decay()``, and the parameter groups that ask for it with ``regularize=False``, or with
``weight_decay=0`` beside groups whose weight decay is positive.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nnunet_cpr._distributed import refuse_flat_shards
from nnunet_cpr._state_dict import Positions

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


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups of named parameters: ``{"params": [(name, tensor), ...], ...}``.

    Attributes:
        has_names: True if the names were given and not made from positions.
        order: the parameters as torch's optimizers hold them, if it is not the order of the groups.
    """

    has_names: bool = False
    order: Sequence[Tensor] | None = None

    def positions_of(self, params: Iterable[Tensor]) -> Positions:
        """Return under which names the parameters would be without names."""
        held = (
            [list(self.order)] if self.order is not None else [[p for _, p in g["params"]] for g in self]
        )
        in_group = {id(p): f"{i}.{n}" for i, group in enumerate(held) for n, p in enumerate(group)}
        in_all = {id(p): str(n) for n, p in enumerate(p for group in held for p in group)}
        wanted = list(params)
        return Positions(
            self.has_names, [in_all[id(p)] for p in wanted], [in_group[id(p)] for p in wanted]
        )


def param_groups(params: Params) -> ParamGroups:
    """Return ``params`` as parameter groups of named parameters.

    A parameter without a name is named after its position: ``"3"`` in a list, ``"1.3"`` in parameter
    groups.

    Raises:
        TypeError: ``params`` is none of the four kinds, or a group holds a set.
        ValueError: ``params`` is empty, a group's ``weight_decay`` is negative, or only some of the
            parameters have names.
    """
    if isinstance(params, ParamGroups):
        return params
    if isinstance(params, nn.Module):
        return _module_groups(params)
    if isinstance(params, Tensor):
        raise TypeError("params is one tensor; give a module, a list of parameters or groups")
    if isinstance(params, (set, frozenset)):
        warnings.warn(
            "params is a set, whose order changes between runs; give a list instead",
            FutureWarning,
            stacklevel=2,
        )
    items = list(params)
    if not items:
        raise ValueError("optimizer got an empty parameter list")
    groups = ParamGroups()
    named = 0
    if not any(isinstance(item, Mapping) for item in items):
        items = [{"params": items}]
        prefixes = [""]
    else:
        prefixes = [f"{i}." for i in range(len(items))]
    for group, prefix in zip(items, prefixes):
        if not isinstance(group, Mapping):
            raise TypeError("params mixes parameter groups and parameters")
        members = _members(group)
        named += sum(isinstance(member, tuple) for member in members)
        rest = {key: value for key, value in group.items() if key != "param_names"}
        if rest.get("weight_decay", 0) is None:
            raise TypeError("weight_decay of a parameter group must be a number, got None")
        if rest.get("weight_decay", 0) < 0:
            raise ValueError(f"Invalid weight_decay value: {rest['weight_decay']}")
        groups.append({**rest, "params": list(_name(members, prefix))})
    if 0 < named < sum(len(group["params"]) for group in groups):
        raise ValueError("all parameters must come with names or without; some names are missing")
    groups.has_names = named > 0
    return groups


def _members(group: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of a group, or (name, parameter) pairs if the group names them."""
    members = group["params"]
    if isinstance(members, (set, frozenset)):
        raise TypeError("a parameter group holds a set, whose order changes between runs; use a list")
    members = [members] if isinstance(members, Tensor) else list(members)
    names = group.get("param_names")
    if names is None or any(isinstance(member, tuple) for member in members):
        return members
    if len(names) != len(members):
        raise ValueError(f"a parameter group has {len(members)} parameters and {len(names)} param_names")
    return list(zip(names, members))


def select(groups: ParamGroups) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """Return name, parameter and group of each parameter to regularize; tied parameters once.

    Raises:
        ValueError: two parameters share a name.
    """
    chosen: list[tuple[str, Tensor, dict[str, Any]]] = []
    seen: set[int] = set()
    names: set[str] = set()
    for group in groups:
        if not _asks_for_it(group, groups):
            continue
        for name, p in group["params"]:
            if id(p) in seen or not _is_matrix(name, p):
                continue
            if name in names:
                raise ValueError(f"two different parameters are named {name!r}")
            seen.add(id(p))
            names.add(name)
            chosen.append((name, p, group))
    return chosen


def regularized(params: Params) -> dict[str, Tensor]:
    """Return the parameters to regularize, by name, in their order; tied parameters once.

    Raises:
        ValueError: two parameters share a name.
    """
    return {name: p for name, p, _ in select(param_groups(params))}


def _asks_for_it(group: Mapping[str, Any], groups: ParamGroups) -> bool:
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


def _module_groups(module: nn.Module) -> ParamGroups:
    """A group to regularize and, where there are any, one of what its layers or itself leave out.

    Names are those of the plain module, so that a compiled model's checkpoint fits any other.
    """
    module = _unwrap(module)
    left_out = _left_out(module)
    named = list(_name(module.named_parameters()))
    if not named:
        raise ValueError("optimizer got an empty parameter list: the module has no parameters")
    parts: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in named if id(p) not in left_out]},
        {"params": [(name, p) for name, p in named if id(p) in left_out], "regularize": False},
    ]
    groups = ParamGroups(group for group in parts if group["params"])
    groups.has_names = True
    groups.order = list(module.parameters())
    return groups


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
