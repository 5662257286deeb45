"""Validation of the saved state of a regularization method before it is loaded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._validation import list_names, short_repr

VERSION = 1

_POSITION = re.compile(r"[0-9]+(\.[0-9]+)?")  # name of an unnamed parameter, see param_groups


@dataclass(frozen=True)
class Positions:
    """Names by position, one for each regularized parameter.

    Attributes:
        are_named: True if the parameters have names of their own.
        in_all: positions among all parameters, such as ``"3"``.
        in_group: group and position in the group, such as ``"1.3"``.
    """

    are_named: bool
    in_all: list[str]
    in_group: list[str]


def validated_tensors(
    title: str,
    saved: Any,
    own: Mapping[str, Any],
    positions: Positions,
    held: list[str] | None = None,
    may_be_nan: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the tensors of a saved state, in the order of the present names.

    Args:
        title: name of the regularization method, for error messages.
        saved: the ``state_dict()`` to load.
        own: the present ``state_dict()``.
        positions, held: as in :func:`renamed`.
        may_be_nan: keys of tensors that may be NaN or negative. All others are damaged then.

    Raises:
        ValueError: the state is damaged, or its version, configuration, names or shapes differ.
    """
    problem = f"cannot load the {title} state"
    _check_structure(problem, saved)
    saved = renamed(saved, own["names"], positions, held)
    config = saved["config"]
    different = [
        f"{key}: expected {short_repr(value)}, got {short_repr(config.get(key))}"
        for key, value in own["config"].items()
        if not (_is_per_matrix(value, own) or _is_per_matrix(config.get(key), saved))
        and not _is_equal(config.get(key), value)
    ]
    if different:
        raise ValueError(f"{problem}: {'; '.join(different)}")
    _check_keys(problem, "setting", config, own["config"])
    missing = [key for key in own["config"] if key not in config]
    if missing:
        raise ValueError(f"{problem}: expected the settings {list_names(missing)}, got a state without")
    order = _indices(problem, saved["names"], own["names"])
    for key, value in own["config"].items():
        before = _per_matrix(config[key], saved)
        now = _per_matrix(value, own)
        for name, index, setting in zip(own["names"], order, now):
            if not _is_equal(before[index], setting):
                raise ValueError(
                    f"{problem}: {key} of {name!r}: expected {short_repr(setting)}, got "
                    f"{short_repr(before[index])}"
                )
    for name, index, shape in zip(own["names"], order, own["shapes"]):
        before = saved["shapes"][index]
        if not _is_equal(before, shape):
            raise ValueError(f"{problem}: {name!r}: expected shape {shape}, got {short_repr(before)}")
    _check_keys(problem, "tensor", saved["state"], own["state"])
    return {
        key: _validated_tensor(problem, key, saved["state"].get(key), value, order, key in may_be_nan)
        for key, value in own["state"].items()
    }


def renamed(
    saved: Mapping[str, Any], own: list[str], positions: Positions, held: list[str] | None
) -> Mapping[str, Any]:
    """Return a saved state with the present names if it was saved, or is loaded, without names.

    As in torch, such parameters are matched by their order.

    Args:
        saved: the state.
        own: the present names.
        positions: the present names by position.
        held: names of all parameters of the saved optimizer, None if unknown.
    """
    names = saved["names"]
    if set(names) == set(own) or len(names) != len(own):
        return saved
    was_unnamed = held is None and all(map(_POSITION.fullmatch, names))
    if was_unnamed:
        for by_position in (positions.in_all, positions.in_group):
            if set(names) == set(by_position):
                name_at = dict(zip(by_position, own))
                return {**saved, "names": [name_at[name] for name in names]}
        return saved
    if positions.are_named:
        return saved
    if held is None or not set(names) <= set(held):
        return {**saved, "names": list(own)}
    indices = [str(held.index(name)) for name in names]
    if set(indices) != set(positions.in_all):
        return saved
    name_at = dict(zip(positions.in_all, own))
    return {**saved, "names": [name_at[index] for index in indices]}


def _is_per_matrix(value: Any, state: Mapping[str, Any]) -> bool:
    """Return True if a setting is a list with one value for each parameter matrix."""
    return isinstance(value, list) and len(value) == len(state["names"])


def _per_matrix(value: Any, state: Mapping[str, Any]) -> list[Any]:
    """Return the value of a setting for each parameter matrix."""
    return value if _is_per_matrix(value, state) else [value] * len(state["names"])


def _is_equal(value: Any, own: Any) -> bool:
    """Return True if two plain values are equal; by ``repr``, since the saved one may be anything."""
    return type(value) is type(own) and repr(value) == repr(own)


def _check_keys(problem: str, kind: str, saved: Mapping[Any, Any], own: Iterable[str]) -> None:
    unknown = [key for key in saved if key not in set(own)]
    if unknown:
        raise ValueError(f"{problem}: unknown {kind} {short_repr(unknown[0])}")


def _check_structure(problem: str, saved: Any) -> None:
    version = saved.get("version") if isinstance(saved, Mapping) else None
    if not _is_equal(version, VERSION):
        raise ValueError(f"{problem}: expected version {VERSION}, got {short_repr(version)}")
    kinds = {"config": Mapping, "names": list, "shapes": list, "state": Mapping}
    damaged = [key for key, kind in kinds.items() if not isinstance(saved.get(key), kind)]
    names = saved.get("names")
    if not damaged and not (all(isinstance(n, str) for n in names) and len(set(names)) == len(names)):
        damaged = ["names"]
    if not damaged and len(names) != len(saved["shapes"]):
        damaged = ["shapes"]
    if damaged:
        raise ValueError(f"{problem}: {list_names(damaged)} is damaged")
    _check_keys(problem, "entry", saved, ["version", *kinds])


def _indices(problem: str, saved: list[str], own: list[str]) -> list[int]:
    """Return the index in the saved state of each present name."""
    index = {name: i for i, name in enumerate(saved)}
    known = set(own)
    missing = [name for name in own if name not in index]
    unknown = [name for name in saved if name not in known]
    if missing or unknown:
        parts = [f"it lacks {list_names(missing)}"] if missing else []
        parts += [f"it has {list_names(unknown)}, which is not regularized here"] if unknown else []
        raise ValueError(f"{problem}: {' and '.join(parts)}")
    return [index[name] for name in own]


def _validated_tensor(
    problem: str, key: str, value: Any, own: Tensor, order: list[int], may_be_nan: bool
) -> Tensor:
    is_valid = isinstance(value, Tensor) and value.layout is own.layout
    is_valid = is_valid and not (value.is_meta or value.is_nested)
    # A conversion to another dtype has lost precision.
    is_valid = is_valid and value.shape == own.shape and value.dtype == own.dtype
    if is_valid and not may_be_nan:
        is_valid = bool((value >= 0).all())  # False for NaN
    if is_valid and key != "kappa":
        is_valid = not value.isinf().any()
    if not is_valid:
        raise ValueError(f"{problem}: {key!r} is damaged")
    value = value.to(own.device)
    return (
        value[torch.tensor(order, dtype=torch.int64, device=own.device)] if value.ndim else value.clone()
    )
