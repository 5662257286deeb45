"""Reuse of the sums of squares of a step in the next one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nnunet_cpr import SGDCPR, AdamCPR, KappaKI0, KappaWS
from tests.fused.stepping import (
    BOUNDED,
    DEVICE,
    assert_same,
    parameters,
    set_gradients,
    use,
)


def grow_in_place(p: torch.nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(2)


def replace_the_memory(p: torch.nn.Parameter) -> None:
    p.data = p.data * 2


@pytest.mark.parametrize("change", [grow_in_place, replace_the_memory, None])
def test_changed_parameter_gets_new_sums(
    change: Callable[[torch.nn.Parameter], None] | None, backend: str
) -> None:
    device = DEVICE[backend]
    p, q = parameters(device=device, shapes=[(60, 50), (5, 4)])
    optimizer = SGDCPR([p, q], lr=0.0, kappa=KappaKI0(1.0))
    use(optimizer, backend)
    for t in range(3):
        set_gradients([p, q], t + 10)
        optimizer.step()
        if t == 1 and change is not None:
            change(p)
    measure = p.detach().double().square().mean().item()
    if backend == "cpu":
        assert optimizer._backend.reused_measures == (2 if change is None else 1)
    bound = optimizer.cpr.kappa[0].item()
    assert optimizer.cpr.lagrange_multiplier[0].item() > 0.02 * bound or change is None
    assert optimizer.cpr.measure[0].item() == pytest.approx(measure, rel=1e-6)


def test_steps_outside_the_backend_discard_sums(backend: str) -> None:
    """Take unfused steps in between, and steps of another optimizer on the same parameters."""
    for other in (False, True):
        results = []
        for way in (backend, "plain"):
            params = parameters(device=DEVICE.get(way, "cpu"), shapes=[(64, 100), (5, 7)])
            optimizer = SGDCPR(params, lr=0.02, **BOUNDED)
            second = AdamCPR(params, lr=0.01, kappa=KappaWS(100))
            for each in (optimizer, second):
                use(each, way)
            for t in range(8):
                set_gradients(params, t + 10)
                optimizer.param_groups[0]["dampening"] = 0.0 if other or t % 3 else 1e-9
                optimizer.param_groups[0]["nesterov"] = bool(other or t % 3)
                optimizer.step()
                if other:
                    second.step()
            results.append(optimizer)
        assert_same(results[0], results[1], rtol=2e-5)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_writes_that_raise_no_version_give_the_unfused_result(build: type, backend: str) -> None:
    results = []
    for way in (backend, "plain"):
        params = parameters(device=DEVICE.get(way, "cpu"), shapes=[(4, 4), (60, 70), (40, 300)])
        optimizer = build(params, lr=0.05, kappa=KappaKI0(0.5))
        use(optimizer, way)
        for t in range(4):
            set_gradients(params, t + 10)
            optimizer.step()
            for p in params:
                p.data.clamp_(-0.5, 0.5)
        results.append(optimizer)
    assert_same(results[0], results[1], rtol=2e-5)


def test_one_element_written_through_data_is_seen_a_step_later(backend: str) -> None:
    """Test the statement of docs/developers/index.md about single elements of large matrices."""
    for announce in (False, True):
        p = parameters(device=DEVICE[backend], shapes=[(60, 50)])[0]
        optimizer = SGDCPR([p], lr=0.0, kappa=KappaKI0(1.0))
        use(optimizer, backend)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        p.data[0, 1] = 100
        if announce:
            torch.autograd.graph.increment_version(p)
        optimizer.step()
        assert (optimizer.cpr.lagrange_multiplier.item() > 0) == (announce or backend == "triton")
        optimizer.step()
        assert optimizer.cpr.lagrange_multiplier.item() > 0
