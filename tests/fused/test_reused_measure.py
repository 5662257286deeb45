"""Reuse of the sums of squares of a step in the next one."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nnunet_cpr import SGDCPR, AdamCPR, KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.bounds import Bound
from nnunet_cpr.fused import Plan
from tests.helpers.examples import examples
from tests.helpers.stepping import (
    BOUNDED,
    DEVICE,
    assert_same,
    parameters,
    run,
    set_gradients,
    use,
)


def grow_in_place(p: torch.nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(2)


def grow_through_a_view(p: torch.nn.Parameter) -> None:
    p.detach()[0].mul_(2)


def replace_the_memory(p: torch.nn.Parameter) -> None:
    p.data = p.data * 2


def load_another(p: torch.nn.Parameter) -> None:
    holder = torch.nn.ParameterList([p])
    holder.load_state_dict({"0": 2 * p.detach()})


@pytest.mark.parametrize(
    "change", [grow_in_place, grow_through_a_view, replace_the_memory, load_another, None]
)
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


def clip(p: torch.Tensor) -> None:
    p.data.clamp_(-0.5, 0.5)


def clip_through_numpy(p: torch.Tensor) -> None:
    values = p.data.cpu().numpy()  # shares the memory of a tensor on the CPU
    np.clip(values, -0.5, 0.5, out=values)
    if p.device.type != "cpu":
        p.data.copy_(torch.from_numpy(values))


def average(p: torch.Tensor) -> None:
    p.data.copy_(0.9 * p.detach())


def scale_in_a_list(p: torch.Tensor) -> None:
    torch._foreach_mul_([p.data], 0.9)


def zero_a_row(p: torch.Tensor) -> None:
    p.data[0].zero_()


def prune_5_percent(p: torch.Tensor) -> None:
    p.data.view(-1)[::20].zero_()


def flatten_and_restore(p: torch.Tensor) -> None:
    torch.nn.utils.vector_to_parameters(0.9 * torch.nn.utils.parameters_to_vector([p]), [p])


WRITES = [
    *(clip, clip_through_numpy, average, scale_in_a_list, zero_a_row),
    *(prune_5_percent, flatten_and_restore),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_writes_that_raise_no_version_give_the_unfused_result(
    build: type, write: Callable[[torch.Tensor], None], backend: str
) -> None:
    results = []
    for way in (backend, "plain"):
        params = parameters(device=DEVICE.get(way, "cpu"), shapes=[(4, 4), (60, 70), (40, 300)])
        optimizer = build(params, lr=0.05, kappa=KappaKI0(0.5))
        use(optimizer, way)
        for t in range(4):
            set_gradients(params, t + 10)
            optimizer.step()
            for p in params:
                write(p)
        results.append(optimizer)
    assert_same(results[0], results[1], rtol=2e-5)


@pytest.mark.parametrize("shape", [(32, 4, 3, 3, 3), (192, 2, 3, 3, 3), (128, 3, 3, 3), (64, 128)])
def test_writes_to_a_part_of_each_kernel_and_by_powers_of_2_are_noticed(
    shape: tuple[int, ...],
) -> None:
    for write in (lambda p: p.data[..., 1:].mul_(0), lambda p: p.data.mul_(0.5)):
        results = []
        for way in ("cpu", "plain"):
            (p,) = parameters(shapes=[shape])
            optimizer = SGDCPR([p], lr=0.05, kappa=KappaKI0(0.5))
            use(optimizer, way)
            for t in range(3):
                set_gradients([p], t + 10)
                optimizer.step()
                write(p)
            results.append(optimizer)
        assert_same(results[0], results[1], rtol=2e-5)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_clipping_to_the_bound_leaves_the_multiplier_at_0(build: type, backend: str) -> None:
    p = torch.nn.Parameter(torch.ones(4, 4, device=DEVICE[backend]))
    optimizer = build([p], lr=0.1, kappa="k1")
    use(optimizer, backend)
    for _ in range(8):
        p.grad = torch.full_like(p, -1.0)
        optimizer.step()
        p.data.clamp_(-1, 1)
        assert optimizer.cpr.lagrange_multiplier.item() == 0 and bool((p == 1).all())


def test_one_element_written_through_data_is_seen_a_step_later(backend: str) -> None:
    """Test the statement of docs/concepts/fused-steps.md about single elements of large matrices."""
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


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
@examples(4, search=30)
@given(stop=st.integers(0, 7), bound=st.sampled_from([KappaWS(3), KappaK(0.5), KappaIP(1, ema=0.5)]))
def test_a_resumed_run_is_bit_identical(build: type, stop: int, bound: Bound) -> None:
    """Reused sums and sums computed after loading are the same numbers.

    On the CPU with large tensors; test_reused_sums_equal_new_sums has the other backend.
    """
    shapes = [(1100, 1000), (4097, 3), (9, 9)]

    def start() -> tuple[list[torch.nn.Parameter], Any]:
        params = parameters(shapes=shapes)
        return params, build(params, lr=0.02, kappa=bound, mu=0.1)

    params, optimizer = start()
    saved = io.BytesIO()
    for t in range(8):
        if t == stop:
            torch.save(([p.detach() for p in params], optimizer.state_dict()), saved)
        set_gradients(params, t)
        optimizer.step()
    resumed, other = start()
    saved.seek(0)
    loaded, state = torch.load(saved, weights_only=True)
    with torch.no_grad():
        for p, value in zip(resumed, loaded):
            p.copy_(value)
    other.load_state_dict(state)
    for t in range(stop, 8):
        set_gradients(resumed, t)
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(params, resumed))
    assert torch.equal(optimizer.cpr.lagrange_multiplier, other.cpr.lagrange_multiplier)


def test_reused_sums_equal_new_sums(backend: str) -> None:
    for build in (SGDCPR, AdamCPR):
        optimizer = run(build, backend, lr=0.02, **BOUNDED)
        matrices = optimizer.cpr.parameters
        plan = Plan.of([matrices], range(len(matrices)))
        assert plan is not None
        reused = optimizer._backend.sums_of_squares(plan).clone()
        assert torch.equal(type(optimizer._backend)().sums_of_squares(plan), reused)
        expected = torch.stack([p.detach().double().square().sum() for p in matrices])
        torch.testing.assert_close(reused.cpu().double(), expected.cpu(), rtol=1e-6, atol=0)
