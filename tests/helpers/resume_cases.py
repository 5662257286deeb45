"""Checks of the states of trainings."""

from __future__ import annotations

from typing import Any

import torch


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths of entries in which two states differ in bits, dtype or presence."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape, one.layout, one.device) != (
            other.dtype, other.shape, other.layout, other.device,
        ):  # fmt: skip
            return [path]
        same = torch.equal(_bytes(one), _bytes(other))
        return [] if same else [path]
    if type(one) is not type(other):
        return [path]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{path}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [d for key in one for d in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [path]
        return [d for i, pair in enumerate(zip(one, other)) for d in differences(*pair, f"{path}/{i}")]
    return [] if one == other else [path]


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_regularized(optimizer_state: dict[str, Any], steps: int) -> None:
    """Check that CPR has taken so many steps, found bounds and corrected something."""
    state = optimizer_state["cpr"]["state"]
    assert int(state["step"]) == steps
    assert bool(state["kappa"].isfinite().any())
    assert float(state["lagrange_multiplier"].max()) > 0
