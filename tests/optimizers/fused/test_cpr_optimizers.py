"""Behaviour of optimizer steps, fused and unfused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaWS
from tests.optimizers.fused.stepping import (
    BOUNDED,
    parameters,
    set_gradients,
    use,
)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_parameter_unfrozen_later_is_stepped(build: type) -> None:
    results = []
    for fused in (False, True):
        params = parameters(shapes=[(60, 50), (5, 4)])
        late = torch.nn.Parameter(torch.ones(7, 3, dtype=torch.bfloat16), requires_grad=False)
        optimizer = build([*params, late], lr=0.02, **{**BOUNDED, "fused": fused})
        if fused:
            use(optimizer, "cpu")
        for t in range(10, 16):
            set_gradients(params, t)
            if t == 12:
                late.requires_grad_(True)
            if t >= 12:
                late.grad = torch.full_like(late, 0.5)
            optimizer.step()
        if fused:
            assert optimizer._find_kernel(None).steps == 2
        results.append([*params, late])
    for p, q in zip(*results):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert not torch.equal(results[0][2], torch.ones(7, 3))


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


@pytest.mark.slow  # starts a process
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
        optimizer._take_torchs_step = None
        optimizer.step()
        assert torch.get_num_threads() == threads
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "NUMBA_NUM_THREADS": "4"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, env=environment, check=True, timeout=600)
