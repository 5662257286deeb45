"""Tensors that change between steps: fused steps must not access memory outside them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from nnunet_cpr import SGDCPR, AdamCPR
from tests.helpers import ROOT
from tests.helpers.memory_changes import Change, check

PROGRAM = ROOT / "tests" / "helpers" / "memory_changes.py"


def search(examples: int, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(examples), str(seed)], capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}"


def test_changed_tensors_give_torchs_step_or_an_error() -> None:
    search(250, -1)


@pytest.mark.release
def test_changed_tensors_survive_a_random_search() -> None:
    search(3000, torch.seed() % 2**32)


def test_casting_the_model_after_steps_is_safe() -> None:
    """Run in a separate process: this crashed, or set all weights to NaN."""
    code = """
import torch
from nnunet_cpr import AdamCPR, SGDCPR

def step(model, optimizer):
    x = torch.randn(8, 512, dtype=model.weight.dtype)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

for build in (AdamCPR, SGDCPR):
    for first, then in (("float", "double"), ("double", "float"), ("float", "bfloat16")):
        model = getattr(torch.nn.Linear(512, 512), first)()
        optimizer = build(model, lr=1e-2)
        for _ in range(3):
            step(model, optimizer)
        getattr(model, then)()
        try:
            step(model, optimizer)
        except RuntimeError:
            assert build is AdamCPR, "torch's SGD takes a state of another dtype"
            optimizer.load_state_dict(optimizer.state_dict())
        for _ in range(3):
            step(model, optimizer)
        assert model.weight.isfinite().all()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "case",
    [
        ("sgd", "float64", [Change(0, "gradient", 0, "to int32"), Change(1, "parameter", 2, "to meta")]),
        ("adam", "bfloat16", [Change(2, "exp_avg", 0, "expanded")]),
        ("sgd", "float32", [Change(0, "gradient", 0, "first row")]),
        ("sgd", "float64", [Change(2, "momentum_buffer", 1, "transposed in memory")]),
    ],
)
def test_changes_that_a_search_found(case: Any) -> None:
    check(*case)


def test_parameters_that_share_memory_are_stepped_in_turn() -> None:
    """Threads of a fused step would write to the same elements at once."""
    results = []
    for build in (AdamCPR, torch.optim.Adam):
        torch.manual_seed(0)
        p, q = (torch.nn.Parameter(torch.randn(300, 200)) for _ in range(2))
        q.data = p.data
        optimizer = build([p, q], lr=0.01)
        for _ in range(3):
            p.grad, q.grad = torch.ones_like(p), 2 * torch.ones_like(q)
            optimizer.step()
        results.append(p.detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_another_view_at_the_same_address_is_noticed(build: type) -> None:
    """The view has the address, strides and number of elements of the dense parameter before."""
    storage = torch.zeros(9)
    p = torch.nn.Parameter(storage[:6].view(2, 3))
    optimizer = build([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = storage.clone()
    p.data = storage.as_strided((3, 2), (3, 1))
    p.grad = torch.ones_like(p)
    optimizer.state.clear()
    optimizer.step()
    assert torch.equal(storage != before, torch.tensor([True, True, False] * 3))


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_an_optimizer_of_a_meta_model_refuses_to_step(build: type) -> None:
    """``to_empty`` makes new parameters, so such an optimizer would train nothing."""
    model = torch.nn.Linear(4, 3, device="meta")
    optimizer = build(model, lr=0.1, kappa="ws1")
    model.to_empty(device="cpu")
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="meta"):
        optimizer.step()
    assert optimizer.cpr.step_count == 0
