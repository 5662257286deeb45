"""Compilation of the CPU kernels in several processes at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from filelock import FileLock, Timeout

from nnunet_cpr.fused import _cpu_kernels, cpu
from tests.helpers import ROOT

LOCK = ".compiling.lock"


class Kernel:
    """Kernel that records whether another process could compile while it runs."""

    def __init__(self, folder: Path) -> None:
        self.stats = SimpleNamespace(cache_path=str(folder))
        self.alone: list[bool] = []

    def __call__(self, *args: Any) -> None:
        try:
            with FileLock(Path(self.stats.cache_path) / LOCK, timeout=0, is_singleton=False):
                self.alone.append(False)
        except Timeout:
            self.alone.append(True)


def test_first_call_with_each_dtype_locks_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(_cpu_kernels, "kernel", kernel, raising=False)
    monkeypatch.setattr(cpu, "_called", set())
    for dtype in ("f4", "f4", "f8", "f8"):
        cpu._call("kernel", np.dtype(dtype), ())
    assert kernel.alone == [True, False, True, False]


def test_cache_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(tmp_path)
    monkeypatch.setattr(_cpu_kernels, "kernel", kernel, raising=False)
    monkeypatch.setattr(cpu, "_called", set())

    def refuse(path: Path) -> None:
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(cpu, "FileLock", refuse)
    cpu._call("kernel", np.dtype("f4"), ())
    assert kernel.alone == [False]


STEPS = """
import hashlib, sys, torch
from nnunet_cpr import AdamCPR, SGDCPR
torch.set_num_threads(1)
kinds = {
    "sgd": (SGDCPR, {"momentum": 0.0, "nesterov": False}),
    "momentum": (SGDCPR, {"momentum": 0.9, "nesterov": False}),
    "nesterov": (SGDCPR, {"momentum": 0.9, "nesterov": True}),
    "adam": (AdamCPR, {}),
    "amsgrad": (AdamCPR, {"amsgrad": True}),
}
for dtype in sys.argv[1:]:
    for kind, (optimizer_class, options) in kinds.items():
        torch.manual_seed(0)
        model = torch.nn.Linear(50, 60).to(getattr(torch, dtype))
        optimizer = optimizer_class(model, lr=0.1, kappa="k1en3", fused=True, **options)
        for _ in range(5):
            model.weight.grad, model.bias.grad = map(torch.randn_like, (model.weight, model.bias))
            optimizer.step()
        state = [p.detach().double().numpy().tobytes() for p in model.parameters()]
        print(dtype, kind, hashlib.sha256(b"".join(state)).hexdigest())
"""


def start(cache: Path, *dtypes: str) -> subprocess.Popen[str]:
    """Start a process that steps in these dtypes, with Numba's cache in a folder."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STEPS, *dtypes]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def lines(process: subprocess.Popen[str]) -> set[str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "fused step" not in err  # no warning that it is not used
    return set(out.splitlines())


@pytest.mark.slow
def test_code_from_the_cache_gives_the_bits_of_the_process_that_compiled_it(tmp_path: Path) -> None:
    compiled, loaded = (lines(start(tmp_path, "float32", "float64")) for _ in range(2))
    assert len(compiled) == 10
    assert loaded == compiled


@pytest.mark.slow
def test_processes_that_compile_at_once_leave_a_valid_cache(tmp_path: Path) -> None:
    at_once = [
        start(tmp_path, "float32"),
        start(tmp_path, "float64"),
        start(tmp_path, "float64", "float32"),
    ]
    compiled = set().union(*map(lines, at_once))
    assert len(compiled) == 10
    assert lines(start(tmp_path, "float32", "float64")) == compiled
