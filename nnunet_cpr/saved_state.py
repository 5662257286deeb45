"""What the saved state of a regularizer has to look like before anything of it is taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

VERSION = 1


def checked(title: str, saved: Any, own: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a saved state, in the order of the names of one's own.

    Args:
        title: what error messages call the regularizer.
        saved: what its ``state_dict()`` gave once.
        own: what it gives now.

    Raises:
        ValueError: it is damaged, or its version, configuration, names or shapes differ.
    """
    problem = f"cannot load the {title} state"
    _check_kinds(problem, saved)
    different = [
        f"{key} was {saved['config'].get(key)!r} and is {value!r} now"
        for key, value in own["config"].items()
        if saved["config"].get(key) != value
    ]
    if different:
        raise ValueError(f"{problem}: {'; '.join(different)}")
    order = _places(problem, saved["names"], own["names"])
    for name, place, shape in zip(own["names"], order, own["shapes"]):
        before = saved["shapes"][place]
        if before != shape:
            raise ValueError(f"{problem}: {name!r} had shape {before} and has {shape} now")
    return {
        key: _checked_tensor(problem, key, saved["state"].get(key), value, order)
        for key, value in own["state"].items()
    }


def some(names: list[str]) -> str:
    """The first few names, quoted."""
    shown = ", ".join(repr(n) for n in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _check_kinds(problem: str, saved: Any) -> None:
    version = saved.get("version") if isinstance(saved, Mapping) else None
    if version != VERSION:
        raise ValueError(f"{problem}: it has version {version!r}, this is {VERSION}")
    kinds = {"config": Mapping, "names": list, "shapes": list, "state": Mapping}
    damaged = [key for key, kind in kinds.items() if not isinstance(saved.get(key), kind)]
    if not damaged and not all(isinstance(name, str) for name in saved["names"]):
        damaged = ["names"]
    if damaged or len(saved["names"]) != len(saved["shapes"]):
        raise ValueError(f"{problem}: {some(damaged or ['shapes'])} is damaged")


def _places(problem: str, saved: list[str], own: list[str]) -> list[int]:
    """Where each of one's own names stands in the saved state."""
    place = {name: i for i, name in enumerate(saved)}
    known = set(own)
    missing = [name for name in own if name not in place]
    unknown = [name for name in saved if name not in known]
    if missing or unknown:
        parts = [f"it lacks {some(missing)}"] if missing else []
        parts += [f"it has {some(unknown)}, which is not regularized here"] if unknown else []
        raise ValueError(f"{problem}: {' and '.join(parts)}")
    return [place[name] for name in own]


def _checked_tensor(problem: str, key: str, value: Any, own: Tensor, order: list[int]) -> Tensor:
    is_good = isinstance(value, Tensor) and value.shape == own.shape
    if is_good and key in ("kappa", "lagrange_multiplier"):
        is_good = bool((value >= 0).all())  # NaN is not
    if not is_good:
        raise ValueError(f"{problem}: {key!r} is damaged")
    value = value.to(own.device, own.dtype)
    return value[torch.tensor(order, device=own.device)] if value.ndim else value.clone()
