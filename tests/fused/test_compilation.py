"""Compilation of the CPU kernels in several processes at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

STEPS = """
import hashlib, torch
from nnunet_cpr import AdamCPR, SGDCPR
torch.set_num_threads(1)
kinds = {
    "momentum": (SGDCPR, {"momentum": 0.9, "nesterov": False}),
    "nesterov": (SGDCPR, {"momentum": 0.9, "nesterov": True}),
    "adam": (AdamCPR, {}),
}
for kind, (optimizer_class, options) in kinds.items():
    torch.manual_seed(0)
    model = torch.nn.Linear(50, 60)
    optimizer = optimizer_class(model, lr=0.1, kappa="k1en3", **options)
    for _ in range(5):
        model.weight.grad, model.bias.grad = map(torch.randn_like, (model.weight, model.bias))
        optimizer.step()
    state = [p.detach().numpy().tobytes() for p in model.parameters()]
    print(kind, hashlib.sha256(b"".join(state)).hexdigest())
"""


def start(cache: Path) -> subprocess.Popen[str]:
    """Start a process that steps with Numba's cache in a folder."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STEPS]
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
    at_once = [start(tmp_path), start(tmp_path)]
    compiled = [lines(process) for process in at_once]
    assert len(compiled[0]) == 3 and compiled[0] == compiled[1]
    assert lines(start(tmp_path)) == compiled[0]
