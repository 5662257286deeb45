"""Behaviour of optimizer steps, fused and unfused."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaK, KappaKI0, KappaWS, MuonCPR
from nnunet_cpr import fused as fused_package
from tests.fused.stepping import (
    BOUNDED,
    parameters,
    set_gradients,
)


def test_unsupported_settings_take_unfused_steps() -> None:
    def fused_steps(params: list[Any], build: type, change: Any = None, **o: Any):
        optimizer = build(params, lr=0.01, **{"kappa": KappaKI0(0.9), "mu": 0.01, **o})
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for t in range(10, 13):
            set_gradients(held, t)
            if change is not None:
                change(optimizer)
            optimizer.step()
        assert optimizer.cpr.step_count == 3 and optimizer.cpr.lagrange_multiplier.max() > 0
        return None if optimizer._backend is None else optimizer._backend.reused_measures

    def dampen(optimizer: Any) -> None:
        optimizer.param_groups[0]["dampening"] = 0.1

    def decay(optimizer: Any) -> None:
        optimizer.param_groups[1]["weight_decay"] = 0.1

    assert fused_steps(parameters(), SGDCPR) == 2
    assert fused_steps(parameters(), SGDCPR, regularizer="huber") is None
    for dtype in (torch.bfloat16, torch.float16):
        assert fused_steps(parameters(dtype), AdamCPR, eps=1e-4) is None
        assert not SGDCPR(parameters(dtype), lr=0.1).defaults["fused"]  # torch 2.6's is wrong on a CPU
    assert fused_steps(parameters(), SGDCPR, fused=False) is None
    options = {"momentum": 0.9, "nesterov": False}
    assert fused_steps(parameters(), SGDCPR, dampen, **options) == 0
    matrix, bias = parameters(shapes=[(5, 4), (4,)])
    assert fused_steps([{"params": [matrix]}, {"params": [bias]}], AdamCPR, decay) == 0


def test_parameter_unfrozen_later_is_stepped() -> None:
    results = []
    for fused in (False, True):
        params = parameters(shapes=[(60, 50), (5, 4)])
        late = torch.nn.Parameter(torch.ones(7, 3, dtype=torch.bfloat16), requires_grad=False)
        optimizer = AdamCPR([*params, late], lr=0.02, **{**BOUNDED, "fused": fused})
        for t in range(10, 16):
            set_gradients(params, t)
            if t == 12:
                late.requires_grad_(True)
            if t >= 12:
                late.grad = torch.full_like(late, 0.5)
            optimizer.step()
        if fused:
            assert optimizer._backend.reused_measures == 1
        results.append([*params, late])
    for p, q in zip(*results):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert not torch.equal(results[0][2], torch.ones(7, 3))


def test_missing_compiler_gives_unfused_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nnunet_cpr.fused._cpu_kernels", None)
    monkeypatch.delattr(fused_package, "_cpu_kernels", raising=False)
    fused_package._numba_works.cache_clear()
    try:
        params = parameters(shapes=[(5, 4)])
        optimizer = SGDCPR(params, lr=0.1)
        set_gradients(params, 10)
        with pytest.warns(UserWarning, match="Numba cannot compile a kernel"):
            optimizer.step()
        assert optimizer._backend is None
    finally:
        fused_package._numba_works.cache_clear()


def test_a_state_of_another_size_stops_the_step() -> None:
    """Without the check, a kernel would write beyond the end."""
    p = parameters(shapes=[(5, 4)])[0]
    for build in (SGDCPR, AdamCPR, MuonCPR):
        fused = {} if build is MuonCPR else {"fused": True}
        optimizer = build([p], lr=0.1, **fused)
        set_gradients([p], 10)
        optimizer.step()
        p.data = torch.ones(50, 40)
        set_gradients([p], 10)
        with pytest.raises(RuntimeError, match=r"must match the size|shape"):
            optimizer.step()
        p.data = torch.ones(5, 4)


def test_gradients_that_come_late_or_broken_at_first() -> None:
    """PyTorch's fused SGD fails at the first and reads stale memory at the second."""
    params = parameters(shapes=[(5, 4), (3, 3)])
    optimizer = SGDCPR(params, lr=0.1, kappa=KappaK(100.0))
    assert optimizer.defaults["fused"]
    params[0].grad = torch.full_like(params[0], math.inf)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(1.0)
    optimizer.step()
    optimizer.found_inf = torch.tensor(0.0)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in params:
        assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.ones_like(p))


def test_nothing_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the meta device, on which reading a value raises."""
    monkeypatch.setattr(CPR, "_device", lambda self: torch.device("meta"))
    for build in (SGDCPR, AdamCPR):
        for regularizer in ("l2", "l1", "std", "huber"):
            for bound in (KappaWS(1), KappaIP(1, ema=0.5)):
                params = [torch.nn.Parameter(torch.empty(4, 3, device="meta")) for _ in range(3)]
                cpr = CPR(params, kappa=bound, regularizer=regularizer, adaptive=True)
                for p in params:
                    p.grad = torch.empty_like(p)
                with torch.no_grad():
                    cpr.update_and_correct(found_inf=torch.zeros((), device="meta"))
                optimizer = build(params, lr=0.1, kappa=bound, regularizer=regularizer)
                assert not optimizer.defaults["fused"]


def test_grad_scaler_and_a_group_that_is_not_fused() -> None:
    p = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = SGDCPR([p], lr=0.1, momentum=0.0, nesterov=False, fused=True)
    optimizer.param_groups[0]["fused"] = False
    p.grad = torch.tensor(8.0).expand(4, 3)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    optimizer.step()
    torch.testing.assert_close(p, torch.full((4, 3), 0.9))


def test_kernels_leave_torchs_number_of_threads() -> None:
    """Numba's first call in a process sets OpenMP's, on which the rounding of gradients depends."""
    code = """
import torch
from nnunet_cpr import SGDCPR
for threads in (1, 3):
    torch.set_num_threads(threads)
    for size in (4, 2000):
        p = torch.nn.Parameter(torch.randn(size, 1000))
        p.grad = torch.ones_like(p)
        optimizer = SGDCPR([p], lr=0.1)
        optimizer.step()
        assert optimizer._backend is not None and torch.get_num_threads() == threads
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "NUMBA_NUM_THREADS": "4"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, env=environment, check=True, timeout=600)
