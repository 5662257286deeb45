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

RECIPES = Path(__file__).resolve().parents[3] / "docs" / "recipes"
sys.path.append(str(RECIPES))  # as for a script there


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
