"""Validation of the saved state of a regularization method before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nnunet_cpr._validation import list_names, short_repr

VERSION = 1


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
