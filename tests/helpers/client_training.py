"""Comparison of the states of trainings that clients of the package run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def assert_same(found: Any, expected: Any, where: str = "state", **tolerance: float) -> None:
    """Compare nested states: bit for bit, or within ``rtol`` and ``atol``."""
    if isinstance(expected, Tensor):
        tolerance = tolerance or {"rtol": 0, "atol": 0}
        torch.testing.assert_close(
            found, expected, equal_nan=True, **tolerance, msg=lambda m: f"{where}: {m}"
        )
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]", **tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected)):
            assert_same(a, b, f"{where}[{i}]", **tolerance)
    else:
        assert found == expected, where


def assert_regularized(optimizer_state: dict[str, Any], steps: int) -> None:
    """Check that CPR has taken so many steps, found bounds and corrected something."""
    state = optimizer_state["cpr"]["state"]
    assert int(state["step"]) == steps
    assert bool(state["kappa"].isfinite().any())
    assert float(state["lagrange_multiplier"].max()) > 0
