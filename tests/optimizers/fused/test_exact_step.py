"""Fused steps compute R from the parameters as they are, and keep nothing of them."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import pytest
import torch

import nnunet_cpr
from nnunet_cpr import SGDCPR, AdamCPR, KappaIP, KappaK, KappaWS
from tests.helpers.bounds import SHORT
from tests.optimizers.fused.stepping import BOUNDED, parameters, set_gradients, use

BUILDS = pytest.mark.parametrize("build", [SGDCPR, AdamCPR])


def multiplier_after(p: torch.nn.Parameter, optimizer: Any) -> float:
    """Take a step, and return what the only multiplier should be."""
    cpr = optimizer.cpr
    r = p.detach().double().square().mean().item()
    expected = cpr.lagrange_multiplier.item() + 1e-3 * (r - cpr.kappa.item())
    optimizer.step()
    return max(0.0, expected)


@BUILDS
@pytest.mark.parametrize("write", ["one row", "one element", "numpy", "new memory"])
def test_no_write_through_data_is_missed(build: type, write: str) -> None:
    """Version counters do not show these writes."""
    p = parameters(shapes=[(200, 300)])[0]
    optimizer = build([p], lr=0.0, kappa=KappaK(0.1), mu=1e-3)
    use(optimizer, "cpu")
    generator = torch.Generator().manual_seed(1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    for _ in range(20):
        row, column = (int(torch.randint(n, (), generator=generator)) for n in p.shape)
        if write == "one row":
            p.data[row] = torch.randn(300, generator=generator)
        elif write == "one element":
            p.data[row, column] = 30.0
        elif write == "numpy":
            p.detach().numpy()[row, column] = -30.0
        else:
            p.data = p.data * 1.01
        expected = multiplier_after(p, optimizer)
        assert optimizer.cpr.lagrange_multiplier.item() == pytest.approx(expected, rel=1e-5)
    assert optimizer._find_kernel(None).steps == 21


@BUILDS
def test_weights_averaged_through_data_are_those_of_the_unfused_step(build: type) -> None:
    results = []
    for backend in ("cpu", "none"):
        params = parameters(shapes=[(300, 200), (64, 50)])
        optimizer = build(params, lr=0.02, kappa=KappaK(2e-4))
        use(optimizer, backend)
        for t in range(25):
            before = [p.detach().clone() for p in params]
            set_gradients(params, 10 + t)
            optimizer.step()
            for p, old in zip(params, before):
                p.data.copy_(0.5 * (p.data + old))
        results.append(params)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@BUILDS
@pytest.mark.parametrize("kappa", SHORT)
def test_sums_precede_only_steps_that_may_set_bounds(
    build: type, kappa: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters(shapes=[(64, 100), (17,), (5, 7)])
    optimizer = build(params, lr=0.02, kappa=kappa)
    use(optimizer, "cpu")
    summed: list[int] = []
    update = optimizer.cpr._update

    def counted(*args: Any) -> Any:
        summed.append(t)
        return update(*args)

    monkeypatch.setattr(optimizer.cpr, "_update", counted)
    for t in range(6):
        set_gradients(params, 10 + t)
        optimizer.step()
    expected = {KappaWS(3): [3], KappaIP(2): [0, 2, 4], KappaIP(1, ema=0.5): [0, 1, 2, 3, 4, 5]}
    assert summed == expected.get(kappa, [0]) and optimizer.cpr.step_count == 6
    assert optimizer._find_kernel(None).steps == 6


def test_outcomes_in_a_kernel_are_those_of_algorithm_1() -> None:
    """A matrix that is not finite, one above the limit of its multiplier, and one below its bound."""
    metrics = []
    for backend in ("cpu", "none"):
        params = parameters(shapes=[(30, 40), (30, 40), (30, 40)])
        with torch.no_grad():
            params[1].mul_(30)
            params[2].mul_(0.01)
        optimizer = SGDCPR(params, lr=0.001, kappa=KappaK(1.0))
        use(optimizer, backend)
        for t in range(4):
            set_gradients(params, 10 + t)
            if t == 2:
                params[0].data[0, 0] = math.inf
            optimizer.step()
        own = optimizer.cpr.metrics()
        metrics.append((own["skipped_updates"], own["limited_corrections"], own["active"]))
        multipliers = optimizer.cpr.lagrange_multiplier
        assert multipliers[2] == 0
    assert metrics[0] == metrics[1] and metrics[0][0] == 2 and metrics[0][1] >= 1


@BUILDS
def test_a_step_visits_at_most_twelve_functions_in_six_files(build: type) -> None:
    params = parameters(shapes=[(64, 100), (17,), (5, 7)])
    optimizer = build(params, lr=0.02, **BOUNDED)
    for t in range(10, 12):
        set_gradients(params, t)
        optimizer.step()
    package = os.path.dirname(nnunet_cpr.__file__)
    visited = set()

    def record(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        is_comprehension = code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
        if event == "call" and code.co_filename.startswith(package) and not is_comprehension:
            visited.add((code.co_filename, code.co_qualname))

    sys.setprofile(record)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    assert len(visited) <= 12 and len({file for file, _ in visited}) <= 6, sorted(visited)
