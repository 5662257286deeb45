from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

# Two processes of several threads each on few cores wait for each other; let them sleep meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A shell's background jobs ignore Ctrl-C, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported


@pytest.fixture
def model() -> torch.nn.Module:
    """Two convolutions, a normalization, an output matrix: four kinds of parameters in float64."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Conv2d(4, 3, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 5),
    ).double()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The Decathlon's Task04_Hippocampus, where the project has it."""
    root = Path(__file__).resolve().parents[1]
    for folder in (root / "shared" / "data", root.parent / "shared" / "data"):
        if (folder / "Task04_Hippocampus" / "dataset.json").exists():
            return folder / "Task04_Hippocampus"
    pytest.skip("the Hippocampus data is not here")
