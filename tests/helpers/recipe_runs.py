"""Run a recipe in this or another process, and compare the files of two runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "recipes"


class Stopped(Exception):
    """Interruption of a run."""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_in_process(name: str, argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, RECIPES / f"{name}.py", *argv], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


def stop_in_call(patch: pytest.MonkeyPatch, owner: type, method: str, calls: int) -> None:
    """Patch a method to raise :class:`Stopped` from this number of calls on."""
    original = getattr(owner, method)
    count = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count >= calls:
            raise Stopped
        return original(*args, **kwargs)

    patch.setattr(owner, method, counted)


def assert_same(a: Any, b: Any, where: str = "state") -> None:
    """Assert that two nested states are equal bit for bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


def load_trainer_checkpoint(folder: Path, step: int) -> dict[str, Any]:
    """Return weights, optimizer and schedule of a checkpoint of Hugging Face's Trainer."""
    from safetensors.torch import load_file

    checkpoint = folder / f"checkpoint-{step}"
    (weights,) = checkpoint.glob("*model.safetensors")
    return {
        "weights": load_file(weights),
        "optimizer": torch.load(checkpoint / "optimizer.pt", weights_only=True),
        "schedule": torch.load(checkpoint / "scheduler.pt", weights_only=True),
    }


def assert_cpr_is_active(optimizer_state: dict[str, Any], steps: int) -> None:
    """Assert that bounds are set and multipliers are positive after this number of steps."""
    state = optimizer_state["cpr"]["state"]
    assert int(state["step"]) == steps
    assert bool(state["kappa"].isfinite().any())
    assert float(state["lagrange_multiplier"].max()) > 0
