"""What the saved state of a regularizer has to look like before anything of it is taken over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VERSION = 1

_POSITION = re.compile(r"[0-9]+(\.[0-9]+)?")  # what nnunet_cpr.param_groups names an unnamed parameter

_MAY_BE_NAN = ("last_sample", "last_difference")  # KappaIP's, before it has any


def checked(
    title: str,
    saved: Any,
    own: Mapping[str, Any],
    positions: Positions,
    held: list[str] | None = None,
) -> dict[str, Tensor]:
    """The tensors of a saved state, in the order of the names of one's own.

    Args:
        title: what error messages call the regularizer.
        saved: what its ``state_dict()`` gave once.
        own: what it gives now.
        positions, held: as in :func:`under_names`.

    Raises:
        ValueError: it is damaged, or its version, configuration, names or shapes differ.
    """
    problem = f"cannot load the {title} state"
    _check_kinds(problem, saved)
    saved = under_names(saved, own["names"], positions, held)
    config = saved["config"]
    different = [
        f"{key} was {short(config.get(key))} and is {short(value)} now"
        for key, value in own["config"].items()
        if not (_is_of_matrices(value, own) or _is_of_matrices(config.get(key), saved))
        and not _is(config.get(key), value)
    ]
    if different:
        raise ValueError(f"{problem}: {'; '.join(different)}")
    _refuse_unknown(problem, "setting", config, own["config"])
    order = _places(problem, saved["names"], own["names"])
    for key, value in own["config"].items():
        before = _for_matrices(config.get(key), saved)
        now = _for_matrices(value, own)
        for name, place, setting in zip(own["names"], order, now):
            if not _is(before[place], setting):
                raise ValueError(
                    f"{problem}: {key} of {name!r} was {short(before[place])} and is "
                    f"{short(setting)} now"
                )
    for name, place, shape in zip(own["names"], order, own["shapes"]):
        before = saved["shapes"][place]
        if not _is(before, shape):
            raise ValueError(f"{problem}: {name!r} had shape {short(before)} and has {shape} now")
    _refuse_unknown(problem, "tensor", saved["state"], own["state"])
    return {
        key: _checked_tensor(problem, key, saved["state"].get(key), value, order)
        for key, value in own["state"].items()
    }


@dataclass(frozen=True)
class Positions:
    """Names that parameters have if nobody names them, one for each regularized parameter.

    Attributes:
        are_named: True if they have been named.
        in_all: their positions among all parameters, such as ``"3"``.
        in_group: their group and their position in it, such as ``"1.3"``.
    """

    are_named: bool
    in_all: list[str]
    in_group: list[str]


def under_names(
    saved: Mapping[str, Any], own: list[str], positions: Positions, held: list[str] | None
) -> Mapping[str, Any]:
    """Return a saved state under one's own names if one of the sides was built without names.

    As torch does, such a state is matched by the order of the parameters.

    Args:
        saved: the state.
        own: one's own names.
        positions: what they would be without names.
        held: the names of all parameters of the saved optimizer, None if they are not known.
    """
    names = saved["names"]
    if set(names) == set(own) or len(names) != len(own):
        return saved
    was_unnamed = held is None and all(map(_POSITION.fullmatch, names))
    if was_unnamed:
        for places in (positions.in_all, positions.in_group):
            if set(names) == set(places):
                name_at = dict(zip(places, own))
                return {**saved, "names": [name_at[name] for name in names]}
        return saved
    if positions.are_named:
        return saved
    if held is None or not set(names) <= set(held):
        return {**saved, "names": list(own)}
    places = [str(held.index(name)) for name in names]
    if set(places) != set(positions.in_all):
        return saved
    name_at = dict(zip(positions.in_all, own))
    return {**saved, "names": [name_at[place] for place in places]}


def some(names: list[str]) -> str:
    """The first few names, quoted."""
    shown = ", ".join(short(n) for n in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _is_of_matrices(value: Any, state: Mapping[str, Any]) -> bool:
    """Return True for a setting that has one value for each matrix."""
    return isinstance(value, list) and len(value) == len(state["names"])


def _for_matrices(value: Any, state: Mapping[str, Any]) -> list[Any]:
    """Return the value of a setting for each matrix."""
    return value if _is_of_matrices(value, state) else [value] * len(state["names"])


def _is(value: Any, own: Any) -> bool:
    """Whether a saved plain value is one's own; by what it prints, since tensors are hard to compare."""
    return type(value) is type(own) and repr(value) == repr(own)


def short(value: Any) -> str:
    """Return what a value prints, on one line of at most 100 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def _refuse_unknown(problem: str, what: str, saved: Mapping[Any, Any], own: Iterable[str]) -> None:
    unknown = [key for key in saved if key not in set(own)]
    if unknown:
        raise ValueError(f"{problem}: it has a {what} that is not known here, {short(unknown[0])}")


def _check_kinds(problem: str, saved: Any) -> None:
    version = saved.get("version") if isinstance(saved, Mapping) else None
    if not _is(version, VERSION):
        raise ValueError(f"{problem}: it has version {short(version)}, this is {VERSION}")
    kinds = {"config": Mapping, "names": list, "shapes": list, "state": Mapping}
    damaged = [key for key, kind in kinds.items() if not isinstance(saved.get(key), kind)]
    names = saved.get("names")
    if not damaged and not (all(isinstance(n, str) for n in names) and len(set(names)) == len(names)):
        damaged = ["names"]
    if not damaged and len(names) != len(saved["shapes"]):
        damaged = ["shapes"]
    if damaged:
        raise ValueError(f"{problem}: {some(damaged)} is damaged")
    _refuse_unknown(problem, "part", saved, ["version", *kinds])


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
    is_good = isinstance(value, Tensor) and value.layout is own.layout
    is_good = is_good and not (value.is_meta or value.is_nested)
    # Another dtype has lost digits.
    is_good = is_good and value.shape == own.shape and value.dtype == own.dtype
    if is_good and key not in _MAY_BE_NAN:
        is_good = bool((value >= 0).all())  # NaN is not
    if is_good and key != "kappa":
        is_good = not value.isinf().any()
    if not is_good:
        raise ValueError(f"{problem}: {key!r} is damaged")
    value = value.to(own.device)
    return (
        value[torch.tensor(order, dtype=torch.int64, device=own.device)] if value.ndim else value.clone()
    )
