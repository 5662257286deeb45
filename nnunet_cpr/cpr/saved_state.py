"""Checks of saved states: their parameter groups by name, and the state of a regularization method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr.refusals import list_names, short_repr

VERSION = 1

_OF_EACH_PARAMETER = ("params", "param_names", "rules")
"""Entries of a saved parameter group that are lists with one value for each parameter."""


def order_by_names(
    own: Sequence[Mapping[str, Any]], saved: Sequence[dict[str, Any]]
) -> Sequence[dict[str, Any]]:
    """Return saved parameter groups in the order of the present ones, by which torch matches them.

    Args:
        own: parameter groups of the optimizer.
        saved: parameter groups of a state dict. Without names they stay in their order.

    Raises:
        ValueError: the saved groups distribute the parameters in another way.
    """
    if not all("param_names" in group for group in (*own, *saved)):
        return saved
    by_names = {frozenset(group["param_names"]): group for group in saved}
    if all(frozenset(group["param_names"]) in by_names for group in own):
        return [
            _reordered(by_names[frozenset(group["param_names"])], group["param_names"]) for group in own
        ]
    before = [name for group in saved for name in group["param_names"]]
    now = [name for group in own for name in group["param_names"]]
    for old, new in zip(before, now):
        if old != new and new in before:  # others have a new name
            raise ValueError(
                f"state_dict: expected the parameters in their saved groups, got {new!r} in place of "
                f"{old!r}; build the optimizer with the saved groups"
            )
    return saved


def _reordered(group: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    place = {name: j for j, name in enumerate(group["param_names"])}
    order = [place[name] for name in names]
    # torch refuses lists of another length, in a damaged state.
    lists = {key: group[key] for key in _OF_EACH_PARAMETER if len(group.get(key, ())) == len(order)}
    return {**group, **{key: [values[j] for j in order] for key, values in lists.items()}}


def check_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Check that saved parameter groups are those of an optimizer of the same kind.

    Args:
        optimizer: the optimizer that loads them.
        saved: parameter groups of a state dict.

    Raises:
        ValueError: a group lacks a setting of the optimizer.
    """
    # Only numbers: torch adds flags, which older states lack.
    required = [
        key
        for key, value in optimizer.defaults.items()
        if isinstance(value, int | float | tuple) and not isinstance(value, bool)
    ]
    for group in saved:
        if missing := [key for key in required if key not in group]:
            raise ValueError(
                f"state_dict: expected a state of {type(optimizer).__name__}, got one of another "
                f"optimizer, without {list_names(missing)}"
            )


def check_order(title: str, saved: Sequence[str], own: Sequence[str]) -> None:
    """Check that the parameters of groups without names are in the saved order.

    Args:
        title: name of the regularization method, for error messages.
        saved: names of the regularized parameters in the saved state.
        own: their present names.

    Raises:
        ValueError: the order differs.
    """
    for before, now in zip(saved, own):
        if before != now:
            raise ValueError(
                f"cannot load the {title} state: expected the parameters in the saved order, by which "
                f"torch matches momenta, got {now!r} in place of {before!r}; build the optimizer with "
                "the parameters in the saved order"
            )


def validated_tensors(title: str, saved: Any, own: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return copies of the tensors of a saved state, in the order of the present names.

    Args:
        title: name of the regularization method, for error messages.
        saved: the ``state_dict()`` to load.
        own: the present ``state_dict()``.

    Raises:
        ValueError: the version, names, shapes or settings of the saved state differ, or it is damaged.
    """
    problem = f"cannot load the {title} state"
    try:
        return _validated_tensors(problem, saved, own)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        reason = short_repr(f"{type(error).__name__}: {error}")
        raise ValueError(f"{problem}: it is damaged ({reason}); load another checkpoint") from error


def _validated_tensors(
    problem: str, saved: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Tensor]:
    if saved["version"] != VERSION:
        raise ValueError(f"{problem}: expected version {VERSION}, got {short_repr(saved['version'])}")
    before, now = _by_name(saved), _by_name(own)
    missing = [name for name in now if name not in before]
    unknown = [name for name in before if name not in now]
    if missing or unknown:
        parts = [f"it lacks {list_names(missing)}"] if missing else []
        parts += [f"it has {list_names(unknown)}, which is not regularized here"] if unknown else []
        raise ValueError(f"{problem}: {' and '.join(parts)}")
    for name, settings in now.items():
        for key, value in settings.items():
            found = before[name].get(key)
            if found != value:
                difference = f"expected {short_repr(value)}, got {short_repr(found)}"
                raise ValueError(f"{problem}: {key}: {difference} for {name!r}")
    for key, value in own["state"].items():
        found = saved["state"][key]
        if (found.dtype, found.shape) != (value.dtype, value.shape):
            raise ValueError(
                f"{problem}: {key}: expected {value.dtype} of shape {list(value.shape)}, got "
                f"{found.dtype} of shape {list(found.shape)}; load the state as it was saved"
            )
    order = [saved["names"].index(name) for name in own["names"]]
    tensors = {key: saved["state"][key].to(value.device) for key, value in own["state"].items()}
    return {key: value[order] if value.ndim else value.clone() for key, value in tensors.items()}


def _by_name(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings and the shape of each parameter matrix, by its name."""
    columns = {**state["config"], "shape": state["shapes"]}
    return {
        name: {key: own[j] if isinstance(own, list) else own for key, own in columns.items()}
        for j, name in enumerate(state["names"])
    }
