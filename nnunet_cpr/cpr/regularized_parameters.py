"""Selection of the regularized parameters: weights of linear, convolutional and similar layers.

Regularized are trainable parameters with two or more dimensions, except for:

- the weights of normalization layers and embeddings, and what PEFT trains in place of an embedding; of
  named parameters without their module the names tell (``norm``, ``ln_1``, ``embed_tokens``, ``wte``),
- parameters named ``bias``,
- parameters that the model lists in ``no_weight_decay()``,
- parameter groups with ``regularize=False``, or with ``weight_decay=0`` if another group has a positive
  weight decay, or none of its own.

timm and the authors' code use the same rule; the paper names biases and normalization weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from nnunet_cpr.cpr.shards import check_not_flattened, local_tensors
from nnunet_cpr.refusals import positive_number, short_repr

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Mapping[str, Any]]
"""Module, parameters, named parameters, or parameter groups."""

# The first is every batch and instance normalization.
NORMALIZATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Normalization layers of torch."""

_NEVER_REGULARIZED = (nn.Embedding, nn.EmbeddingBag, *NORMALIZATIONS)
_NORMALIZATION_NAME = re.compile(
    r"(\w*_)?(norm|(layer|batch|group|instance|rms)_?norm|ln|bn)(_?\d+|_f)?", re.IGNORECASE
)
_EMBEDDING_NAME = re.compile(
    r"wte|wpe|embed_(tokens|positions)|tok_emb|((word|tok|token|token_type|position|segment)_)?embeddings?"
    r"(_\d+)?"
)
_PERHAPS_EMBEDDING = re.compile(r"(\w*_)?emb(ed|edder|eddings?)?(_\w+)?", re.IGNORECASE)
_PEFT_EMBEDDING = re.compile(r"(^|\.)(trainable_tokens_delta|lora_embedding_[AB])(\.|$)")


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups of named parameters: ``{"params": [(name, tensor), ...], ...}``.

    Attributes:
        has_names: True if the names were given, False if they are positions.
        is_module: True if they are the parameters of a module.
    """

    has_names: bool = False
    is_module: bool = False


def param_groups(params: Params) -> ParamGroups:
    """Return ``params`` as parameter groups of named parameters.

    A parameter without a name is named after its position: ``"3"`` in a list, ``"1.3"`` in parameter
    groups.

    Raises:
        TypeError: ``params`` is none of the four kinds, a group contains a set, or its ``regularize`` is
            not a bool.
        ValueError: ``params`` is empty, only some of the parameters have names, or the ``weight_decay``
            of a group is not a number of 0 or above.

    Example:
        >>> (group,) = param_groups(nn.Linear(3, 2))
        >>> [name for name, _ in group["params"]]
        ['weight', 'bias']
    """
    if isinstance(params, ParamGroups):
        return params
    if isinstance(params, nn.Module):
        return _module_groups(params)
    if isinstance(params, Tensor):
        raise TypeError("params: expected a module, parameters or groups, got a tensor; use a list")
    if not isinstance(params, Iterable):
        raise TypeError(f"params: expected a module, parameters or groups, got {short_repr(params)}")
    items: list[Any] = list(params)
    if not items:
        raise ValueError("optimizer got an empty parameter list")
    prefixes = [f"{i}." for i in range(len(items))]
    if not isinstance(items[0], Mapping):
        items, prefixes = [{"params": items}], [""]
    members = [_members(group) for group in items]
    for group in items:
        decay = group.get("weight_decay", 0)
        if isinstance(decay, Tensor) and decay.numel() == 1:
            decay = decay.item()
        positive_number("weight_decay of a parameter group", decay, allow_zero=True)
        if not isinstance(group.get("regularize", True), bool):
            raise TypeError(
                "regularize of a parameter group: expected True or False, got "
                f"{short_repr(group['regularize'])}"
            )
    are_named = {isinstance(member, tuple) for group in members for member in group}
    if len(are_named) > 1:
        raise ValueError("params: expected names for all parameters or none; some names are missing")
    groups = ParamGroups(
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": list(_name(own, prefix)),
        }
        for group, own, prefix in zip(items, members, prefixes)
    )
    groups.has_names = True in are_named
    return groups


def _members(group: Any) -> list[Any]:
    """Return the parameters of a group, or (name, parameter) pairs if the group names them."""
    if not isinstance(group, Mapping):
        raise TypeError("params: expected parameter groups only, got groups and parameters mixed")
    members = group["params"]
    if isinstance(members, nn.Module):
        raise TypeError("a parameter group: expected parameters, got a module; take named_parameters()")
    if isinstance(members, (set, frozenset)):
        raise TypeError("a parameter group: expected an ordered collection, got a set; use a list")
    members = [members] if isinstance(members, Tensor) else list(members)
    names = group.get("param_names")
    return members if names is None else list(zip(names, members, strict=True))


def select(groups: ParamGroups) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """Return name, parameter and group of each regularized parameter; tied parameters once.

    Raises:
        ValueError: two parameters have the same name.
    """
    chosen: dict[int, tuple[str, Tensor, dict[str, Any]]] = {}
    for group in groups:
        if not _is_selected(group, groups):
            continue
        is_known = group.get("regularize") is True  # the module or the user says more than a name
        for name, p in group["params"]:
            if _is_matrix(name, p) and (is_known or not _is_excluded_by_name(name, p)):
                chosen.setdefault(id(p), (name, p, group))
    names = [name for name, _, _ in chosen.values()]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"params: expected unique names, got {twice[0]!r} for two parameters; take those of "
            "the whole model's named_parameters()"
        )
    return list(chosen.values())


def regularized(params: Params) -> dict[str, Tensor]:
    """Return the regularized parameters by name, in their order; tied parameters once.

    Raises:
        ValueError: two parameters have the same name.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        >>> list(regularized(model))
        ['0.weight', '2.weight']
    """
    return {name: p for name, p, _ in select(param_groups(params))}


def find_doubtful(groups: ParamGroups) -> list[str]:
    """Return the regularized parameters that may be embeddings or normalization weights.

    A name such as ``decoder_embed`` is that of an embedding or a linear layer. A matrix of ones may be
    the weights of normalization layers that ``torch.func`` has stacked. Nothing is in doubt about groups
    with ``regularize=True``; matrices of ones that are all there is have rather been set by hand.
    """
    chosen = [
        (name, p)
        for name, p, group in select(groups)
        if groups.is_module or group.get("regularize") is not True
    ]
    embeddings = [
        name
        for name, p in chosen
        if p.ndim == 2 and not groups.is_module and _PERHAPS_EMBEDDING.fullmatch(_owner(name))
    ]
    ones = [name for name, p in chosen if _has_only_ones(p)]
    if not groups.has_names and len(ones) == len(chosen):
        ones = []
    return list(dict.fromkeys(embeddings + ones))


def _has_only_ones(p: Tensor) -> bool:
    (local,) = local_tensors([p.detach()])
    if local.is_meta or local.numel() == 0:
        return False
    return bool(local[(0,) * local.ndim] == 1) and bool((local == 1).all())  # mostly the first tells


def _is_selected(group: Mapping[str, Any], groups: ParamGroups) -> bool:
    if "regularize" in group:
        return bool(group["regularize"])
    # Groups made for AdamW: the argument weight_decay, which CPR replaces, was that of the others.
    others_decay = any("weight_decay" not in g or g["weight_decay"] > 0 for g in groups)
    return not (others_decay and group.get("weight_decay") == 0)


def _is_matrix(name: str, p: Tensor) -> bool:
    is_bias = name.rpartition(".")[2] == "bias"
    return p.requires_grad and p.ndim >= 2 and p.numel() > 0 and not is_bias


def _is_excluded_by_name(name: str, p: Tensor) -> bool:
    """Return True if the name is that of an embedding or a normalization weight."""
    owner = _owner(name)
    is_embedding = p.ndim == 2 and _EMBEDDING_NAME.fullmatch(owner)
    return bool(is_embedding or _NORMALIZATION_NAME.fullmatch(owner) or _PEFT_EMBEDDING.search(name))


def _owner(name: str) -> str:
    """Return the name of the module of a parameter, without wrappers of PEFT and parametrizations."""
    *_, owner, _ = ["", *re.sub(r"\.(modules_to_save|parametrizations)\.\w+", "", name).split(".")]
    return owner


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside ``DistributedDataParallel``, ``DataParallel`` or ``torch.compile``."""
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return unwrap(module.module)
    compiled = getattr(module, "_orig_mod", None)
    return module if compiled is None else unwrap(compiled)


def _module_groups(module: nn.Module) -> ParamGroups:
    """Return a group of regularized parameters and, if there are any, one of excluded parameters.

    The names are those of the unwrapped module, so that the checkpoint of a compiled model fits others.
    """
    module = unwrap(module)
    excluded = _excluded(module)
    named = list(_name(module.named_parameters()))
    parts: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in named if id(p) not in excluded], "regularize": True},
        {"params": [(name, p) for name, p in named if id(p) in excluded], "regularize": False},
    ]
    groups = ParamGroups(group for group in parts if group["params"])
    groups.has_names = groups.is_module = True
    return groups


def _excluded(root: nn.Module) -> set[int]:
    """Return the ids of parameters excluded by their layer type or by ``no_weight_decay()``."""
    ids: set[int] = set()
    for module in root.modules():
        if isinstance(module, _NEVER_REGULARIZED):
            ids.update(id(p) for p in module.parameters(recurse=is_parametrized(module)))
        # PEFT's layers hold the layer that they adapt.
        if isinstance(getattr(module, "base_layer", None), _NEVER_REGULARIZED):
            ids.update(id(p) for p in module.parameters())
        listing = getattr(module, "no_weight_decay", None)
        if callable(listing):
            listed = set(listing())
            named = module.named_parameters(remove_duplicate=False)  # a tied one has two names
            ids.update(id(p) for name, p in named if name.replace("_orig_mod.", "") in listed)
    return ids


def _name(items: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for i, item in enumerate(items):
        name, p = item if isinstance(item, tuple) else (f"{prefix}{i}", item)
        if not isinstance(p, Tensor) or not isinstance(name, str):
            raise TypeError(f"params: expected a module, parameters or groups, got a {type(p).__name__}")
        check_not_flattened(name, p)
        if torch.is_complex(p):
            raise TypeError(f"parameter {name!r}: expected a real dtype, got {p.dtype}")
        yield name.replace("_orig_mod.", ""), p  # added by torch.compile
