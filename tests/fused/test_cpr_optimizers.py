"""Behaviour of optimizer steps, fused and unfused."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaK, KappaKI0, KappaWS, MuonCPR
from nnunet_cpr import fused as fused_package
from nnunet_cpr.optimizers import FusedAdam, FusedSGD
from tests.helpers.stepping import (
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


@pytest.mark.parametrize(
    ("build", "dtype"),
    [(SGDCPR, torch.int8), (AdamCPR, torch.int8), (AdamCPR, torch.bfloat16)],
)
def test_frozen_parameters_allow_fused_steps_of_others(build: type, dtype: torch.dtype) -> None:
    """Test quantized parameters, which are never trained, and others, which may be later."""
    results = []
    for with_frozen in (False, True):
        params = parameters(shapes=[(60, 50), (5, 4)])
        frozen = torch.nn.Parameter(torch.ones(7, 3).to(dtype), requires_grad=False)
        optimizer = build(
            [*params, frozen] if with_frozen else params, lr=0.02, kappa=KappaKI0(1.0), mu=0.1
        )
        for t in range(10, 14):
            set_gradients(params, t)
            optimizer.step()
        assert optimizer._backend.reused_measures == 3
        results.append(params)
    assert all(torch.equal(p, q) for p, q in zip(*results))


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


def test_weight_decay_on_biases_is_still_torchs() -> None:
    results = []
    for decay in (0.0, 0.5):
        matrix, bias = parameters(shapes=[(5, 4), (4,)])
        optimizer = SGDCPR([{"params": [matrix]}, {"params": [bias]}], lr=0.1, kappa=KappaK(0.1))
        optimizer.param_groups[1]["weight_decay"] = decay
        set_gradients([matrix, bias], 10)
        optimizer.step()
        results.append((matrix, bias))
    (one, bias), (other, decayed) = results
    torch.testing.assert_close(one, other)  # only the first went in one pass
    assert not torch.allclose(bias, decayed)


def test_step_runs_every_hook_once() -> None:
    """Also if torch has wrapped the step of the base class."""
    torch.optim.SGD(parameters(), lr=0.1)  # wraps SGD.step
    calls: list[str] = []
    for fused in (False, True):
        params = parameters()
        optimizer = SGDCPR(params, lr=0.1, fused=fused)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        set_gradients(params, 0)
        assert optimizer.step(lambda: 3.0) == 3.0
        assert optimizer.cpr.step_count == 1
    assert calls == ["before", "after"] * 2


def test_a_step_of_cpr_by_hand_corrects_at_once() -> None:
    p = parameters(shapes=[(5, 4)])[0]
    optimizer = SGDCPR([p], lr=0.0, kappa=KappaKI0(0.5))
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.cpr.step()
    assert p.norm() < before.norm()


def test_a_parameter_given_twice_is_stepped_as_torch_does() -> None:
    p = parameters(shapes=[(5, 4)])[0]
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = SGDCPR([p, p], lr=0.0, kappa=KappaKI0(0.9), mu=0.1)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    lam = optimizer.cpr.lagrange_multiplier.item()
    torch.testing.assert_close(p.detach(), before * (1 - 2 * lam))


@pytest.mark.parametrize("regularizer", ["l2", "l1"])
def test_gradients_that_come_late_or_broken_at_first(regularizer: str) -> None:
    """PyTorch's fused SGD fails at the first and reads stale memory at the second."""
    params = parameters(shapes=[(5, 4), (3, 3)])
    optimizer = SGDCPR(params, lr=0.1, kappa=KappaK(100.0), regularizer=regularizer)
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


def test_hooks_run_before_the_update() -> None:
    for fused in (False, True):
        p = parameters(shapes=[(5, 4)])[0]
        optimizer = SGDCPR([p], lr=0.1, kappa=KappaKI0(0.9), mu=0.1, fused=fused)
        failing = [True]

        def hook(optimizer, *_: Any, failing=failing) -> None:
            if failing.pop() if failing else False:
                raise RuntimeError("once")
            optimizer.param_groups[0]["params"][0].grad = None

        optimizer.register_step_pre_hook(hook)
        before = p.detach().clone()
        p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match="once"):
            optimizer.step()
        assert optimizer.cpr.step_count == 0
        optimizer.step()
        assert torch.equal(p, before) and optimizer.cpr.lagrange_multiplier.item() == 0


def test_a_subclass_that_calls_our_step_updates_once() -> None:
    SGDCPR(parameters(), lr=0.1)  # torch wraps the step of each class it builds

    class Mine(SGDCPR):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    params = parameters()
    optimizer = Mine(params, lr=0.1)
    set_gradients(params, 0)
    optimizer.step()
    assert optimizer.cpr.step_count == 1


def test_parameters_may_change_layout_between_steps() -> None:
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 3))
        optimizer = AdamCPR(model, lr=0.01, kappa=KappaKI0(0.9), mu=0.1, fused=fused)
        for t in range(6):
            if t == 3:
                model.to(memory_format=torch.channels_last)
            set_gradients(list(model.parameters()), t + 10)
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*results):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_detached_cpr_works_on_another_optimizer() -> None:
    p = parameters(shapes=[(5, 4)])[0]
    first = SGDCPR([p], lr=0.0, kappa=KappaKI0(0.5))
    cpr = first.cpr
    cpr.detach()
    second = torch.optim.SGD([p], lr=0.0)
    cpr.attach(second)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    second.step()
    assert p.norm() < before.norm()
    first.step()
    assert cpr.step_count == 1


def test_steps_while_cpr_was_detached_are_seen() -> None:
    p = parameters(shapes=[(60, 50)])[0]
    optimizer = SGDCPR([p], lr=1.0, kappa=KappaKI0(1.0))
    for t in range(4):
        p.grad = -p.detach()  # doubles it and more
        if t == 2:
            optimizer.cpr.detach()
        if t == 3:
            optimizer.cpr.attach(optimizer)
            before, bound = optimizer.cpr.lagrange_multiplier, optimizer.cpr.kappa
            measure = optimizer.cpr.measure
        optimizer.step()
    assert optimizer.cpr.step_count == 3
    torch.testing.assert_close(optimizer.cpr.lagrange_multiplier, before + measure - bound)


def test_nothing_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the meta device, on which reading a value raises."""
    monkeypatch.setattr(CPR, "_device", lambda self: torch.device("meta"))
    for build in (SGDCPR, AdamCPR):
        for regularizer in ("l2", "l1", "std", "huber"):
            for bound in (KappaK(1.0), KappaKI0(1.0), KappaWS(1), KappaIP(1, ema=0.5)):
                params = [torch.nn.Parameter(torch.empty(4, 3, device="meta")) for _ in range(3)]
                cpr = CPR(params, kappa=bound, regularizer=regularizer, adaptive=True)
                for p in params:
                    p.grad = torch.empty_like(p)
                with torch.no_grad():
                    cpr.update_and_correct(found_inf=torch.zeros((), device="meta"))
                optimizer = build(params, lr=0.1, kappa=bound, regularizer=regularizer)
                assert not optimizer.defaults["fused"]


def test_memory_shared_across_groups_is_measured() -> None:
    multipliers = []
    for fused in (None, False):
        matrix = torch.nn.Parameter(torch.full((500, 2000), 0.01))
        row = torch.nn.Parameter(torch.zeros(2000))
        row.data = matrix.data[1]
        groups = [{"params": [matrix]}, {"params": [row]}]
        optimizer = SGDCPR(groups, lr=0.1, kappa=KappaK(0.1), mu=1e-3, fused=fused)
        for _ in range(4):
            matrix.grad, row.grad = torch.zeros_like(matrix), torch.full_like(row, -1000.0)
            optimizer.step()
        multipliers.append(optimizer.cpr.lagrange_multiplier.item())
    assert multipliers[0] == pytest.approx(multipliers[1], rel=1e-5) and multipliers[0] > 0.1


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_lazily_negated_gradients_are_stepped(build: type) -> None:
    p = torch.nn.Parameter(torch.ones(4, 3))
    p.grad = torch._neg_view(torch.ones(4, 3))
    build([p], lr=0.1).step()
    assert (p > 1).all()


@pytest.mark.parametrize("option", ["foreach", "differentiable"])
@pytest.mark.parametrize("build", [FusedSGD, FusedAdam])
def test_options_against_fused_steps_are_taken(build: type, option: str) -> None:
    p = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = build([p], lr=0.1, **{option: True})
    assert not optimizer.param_groups[0]["fused"]
    if option == "foreach":
        set_gradients([p], 0)
        optimizer.step()


def test_a_copied_optimizer_can_get_cpr_attached() -> None:
    p = torch.nn.Parameter(torch.full((4, 3), 2.0))
    copied, optimizer = copy.deepcopy((p, FusedSGD([p], lr=0.1, momentum=0.9)))
    CPR([copied], kappa=KappaK(0.1)).attach(optimizer)
    copied.grad = torch.zeros_like(copied)
    optimizer.step()
    assert (copied < 2).all()


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
