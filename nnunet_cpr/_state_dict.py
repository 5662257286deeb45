"""Validation of the saved state of a regularization method before it is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._validation import list_names, short_repr

VERSION = 1


def validated_tensors(
    title: str, saved: Any, own: Mapping[str, Any], may_be_nan: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the tensors of a saved state, in the order of the present names.

    Args:
        title: name of the regularization method, for error messages.
        saved: the ``state_dict()`` to load.
        own: the present ``state_dict()``.
        may_be_nan: keys of tensors that may be NaN or negative. All others are damaged then.

    Raises:
        ValueError: the state is damaged, or its version, configuration, names or shapes differ.
    """
    problem = f"cannot load the {title} state"
    _check_structure(problem, saved, own)
    _check_keys(problem, saved["names"], own["names"], "regularized")
    index = {name: i for i, name in enumerate(saved["names"])}
    order = [index[name] for name in own["names"]]
    _check_settings(problem, saved, own, order)
    _check_keys(problem, saved["config"], own["config"], "a setting")
    _check_keys(problem, saved["state"], own["state"], "a tensor")
    return {
        key: _validated_tensor(problem, key, saved["state"][key], value, order, key in may_be_nan)
        for key, value in own["state"].items()
    }


def _check_structure(problem: str, saved: Any, own: Mapping[str, Any]) -> None:
    version = saved.get("version") if isinstance(saved, Mapping) else None
    if not _is_equal(version, VERSION):
        raise ValueError(f"{problem}: expected version {VERSION}, got {short_repr(version)}")
    _check_keys(problem, saved, own, "an entry")
    damaged = [key for key, value in own.items() if not isinstance(saved[key], type(value))]
    names = [] if damaged else saved["names"]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        damaged = ["names"]
    if damaged:
        raise ValueError(f"{problem}: {list_names(damaged)} is damaged")


def _check_keys(problem: str, saved: Collection[Any], own: Collection[str], kind: str) -> None:
    """Check that the saved keys or names are the present ones, in any order."""
    missing = [key for key in own if key not in saved]
    unknown = [key for key in saved if key not in own]
    if missing or unknown:
        parts = [f"it lacks {list_names(missing)}"] if missing else []
        parts += [f"it has {list_names(unknown)}, which is not {kind} here"] if unknown else []
        raise ValueError(f"{problem}: {' and '.join(parts)}")


def _check_settings(
    problem: str, saved: Mapping[str, Any], own: Mapping[str, Any], order: list[int]
) -> None:
    """Check that the configuration and shapes of each parameter matrix are the present ones."""
    differences = []
    for key, value in {**own["config"], "shape": own["shapes"]}.items():
        old = saved["shapes"] if key == "shape" else saved["config"].get(key)
        before, now = _per_matrix(old, len(order)), _per_matrix(value, len(order))
        for name, index, setting in zip(own["names"], order, now):
            if not _is_equal(before[index], setting):
                is_list = isinstance(old, list) or isinstance(value, list)
                where = f"{key} of {name!r}" if is_list else key
                got = short_repr(before[index])
                differences.append(f"{where}: expected {short_repr(setting)}, got {got}")
                break
    if differences:
        raise ValueError(f"{problem}: {'; '.join(differences)}")


def _per_matrix(value: Any, count: int) -> list[Any]:
    """Return a setting, one value or a list of a value for each, for ``count`` parameter matrices."""
    return value if isinstance(value, list) and len(value) == count else [value] * count


def _is_equal(value: Any, own: Any) -> bool:
    """Return True if two plain values are equal; by ``repr``, since the saved one may be anything."""
    return type(value) is type(own) and repr(value) == repr(own)


def _validated_tensor(
    problem: str, key: str, value: Any, own: Tensor, order: list[int], may_be_nan: bool
) -> Tensor:
    is_valid = isinstance(value, Tensor) and value.layout is own.layout and not value.is_meta
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
