"""Steps in one pass, on the CPU and in Triton, against the plain way in float64.

The plain way is CPR's correction and then torch's own step; tests/test_oracle.py holds it, and the CPU's
pass, to an oracle that knows neither. Without a GPU the Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaK, KappaKI0, KappaWS, row_norms
from nnunet_cpr.bounds import Bound
from nnunet_cpr.kernels import cpu
from nnunet_cpr.kernels.one_pass import OnePass

HAS_GPU = torch.cuda.is_available()
DEVICE = {"cpu": "cpu", "triton": "cuda" if HAS_GPU else "cpu"}

# Pieces and chunks of these tests are 2048 elements: some tensors have several, with a rest or without,
# some share one; 4096 + 1 makes a last row of one element.
SHAPES = [(64, 100), (17,), (3, 1000, 3), (5, 7), (2, 2048), (4097, 1), (1, 1), (0, 4), (3, 4, 5, 2)]


@pytest.fixture(params=["cpu", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    row_norms.row_length.cache_clear()  # it remembers the lengths of other tests
    monkeypatch.setattr(cpu, "_PIECE", 2048)
    monkeypatch.setattr(row_norms, "_LONGEST_ROW", 1024)
    if request.param == "triton":
        pytest.importorskip("triton", minversion="3.3")
        triton = importlib.import_module("nnunet_cpr.kernels.triton")
        monkeypatch.setattr(triton, "CHUNK", 2048)
    yield request.param
    row_norms.row_length.cache_clear()


def use(optimizer: Any, backend: str) -> OnePass | None:
    """Make the optimizer take this way; without a GPU it would not choose Triton by itself."""
    if backend == "triton":
        from nnunet_cpr.kernels.triton import TritonPass

        optimizer._choose_one_pass = TritonPass
    if backend == "plain":
        optimizer._choose_one_pass = lambda optimizer: None
    optimizer._look_where_parameters_are()
    return optimizer.cpr.one_pass


def parameters(
    dtype: torch.dtype = torch.float32, device: str = "cpu", shapes: list[tuple[int, ...]] = SHAPES
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [torch.nn.Parameter(v.to(device, dtype)) for v in values]


def set_gradients(params: list[torch.nn.Parameter], t: int, scale: float = 1.0) -> None:
    """Outwards, so that bounds are reached, with noise; sometimes one is missing."""
    generator = torch.Generator().manual_seed(1000 + t)
    starts = parameters(torch.float64, shapes=[tuple(p.shape) for p in params])
    for i, (p, start) in enumerate(zip(params, starts)):
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        grad = (0.3 * noise - 0.5 * start.detach()).to(p.device, p.dtype)  # does not depend on rounding
        p.grad = None if (t, i) in {(2, 0), (4, 4)} else grad * scale


def run(
    build: Callable[..., Any],
    backend: str,
    dtype: torch.dtype = torch.float32,
    steps: int = 8,
    **options: Any,
) -> Any:
    params = parameters(dtype, DEVICE.get(backend, "cpu"))
    optimizer = build(params, **options)
    one_pass = use(optimizer, backend)
    for t in range(steps):
        set_gradients(params, t, -1.0 if options.get("maximize") else 1.0)
        optimizer.step()
    if one_pass is not None:
        assert one_pass.reused_measures == steps - 1
    return optimizer


def values(optimizer: Any) -> list[torch.Tensor]:
    return [p.detach().cpu().double() for group in optimizer.param_groups for p in group["params"]]


def assert_same(ours: Any, expected: Any, rtol: float) -> None:
    for p, q in zip(values(ours), values(expected)):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)
    assert ours.cpr.step_count == expected.cpr.step_count
    torch.testing.assert_close(ours.cpr.kappa.cpu(), expected.cpr.kappa.cpu(), rtol=10 * rtol, atol=0)
    torch.testing.assert_close(
        ours.cpr.lagrange_multiplier.cpu(),
        expected.cpr.lagrange_multiplier.cpu(),
        rtol=0,
        atol=10 * rtol,
    )


BOUNDED = {"kappa": KappaKI0(1.0), "mu": 0.1, "fused": True}
VARIANTS: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (SGDCPR, {"lr": 0.02}),
    "sgd-plain": (SGDCPR, {"lr": 0.02, "momentum": 0.0, "nesterov": False}),
    "sgd-heavy-ball": (SGDCPR, {"lr": 0.02, "momentum": 0.9, "nesterov": False, "maximize": True}),
    "sgd-lr-tensor": (SGDCPR, {"lr": torch.tensor(0.02)}),
    "sgd-lr-0": (SGDCPR, {"lr": 0.0}),
    "adam": (AdamCPR, {"lr": 0.02}),
    "adam-betas": (AdamCPR, {"lr": 0.02, "betas": (0.0, 0.9), "eps": 1e-3, "maximize": True}),
    "adam-amsgrad": (AdamCPR, {"lr": 0.02, "amsgrad": True}),
    "adam-lr-tensor": (AdamCPR, {"lr": torch.tensor(0.02)}),
    "adam-lr-0": (AdamCPR, {"lr": 0.0}),
    "adam-ada": (AdamCPR, {"lr": 0.02, "adaptive": True}),
    "adam-ip": (AdamCPR, {"lr": 0.02, "kappa": KappaIP(1)}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_pass_is_the_plain_way(variant: str, backend: str) -> None:
    build, options = VARIANTS[variant]
    options = {**BOUNDED, **options}
    expected = run(build, "plain", torch.float64, **options)
    assert_same(run(build, backend, **options), expected, rtol=2e-6)
    if "lr-0" not in variant:
        assert expected.cpr.lagrange_multiplier.max() > 1e-3
    if backend == "cpu":
        assert_same(run(build, backend, torch.float64, **options), expected, rtol=1e-7)


def test_sgd_on_the_cpu_is_the_plain_way_bit_for_bit() -> None:
    """In pieces of their real size: only where they are cut is different."""
    shapes = [(700, 1000), (30, 64, 3, 3, 3), (1500, 1000), (9,)]
    ours, plain = ([*parameters(shapes=shapes)] for _ in range(2))
    optimizers = [SGDCPR(params, lr=0.02, **BOUNDED) for params in (ours, plain)]
    use(optimizers[1], "plain")
    for t in range(5):
        for params, optimizer in zip((ours, plain), optimizers):
            set_gradients(params, t)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, plain))
    assert optimizers[0].cpr.lagrange_multiplier.max() > 1e-3


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_have_float32_arithmetic(
    build: type, dtype: torch.dtype, backend: str
) -> None:
    if build is SGDCPR and backend == "cpu":
        assert not SGDCPR(parameters(dtype), lr=0.02).defaults["fused"]  # torch 2.6's is wrong
        return
    options = {"eps": 1e-4} if build is AdamCPR else {}
    ours = run(build, backend, dtype, lr=0.02, **options, **BOUNDED)
    assert {t.dtype for t in (ours.cpr.kappa, ours.cpr.lagrange_multiplier)} == {torch.float32}
    expected = run(build, "plain", torch.float64, lr=0.02, **options, **BOUNDED)
    epsilon = torch.finfo(dtype).eps
    for p, q in zip(values(ours), values(expected)):
        assert p.isfinite().all()
        torch.testing.assert_close(p, q, rtol=8 * epsilon, atol=16 * epsilon)


def test_parameters_of_several_dtypes_and_groups(backend: str) -> None:
    """Half matrices beside float32 biases, and two learning rates."""
    for build in (SGDCPR, AdamCPR) if backend == "triton" else (AdamCPR,):
        both = []
        for way in (backend, "plain"):
            low = parameters(torch.bfloat16, DEVICE.get(way, "cpu"), SHAPES[:1])
            full = parameters(torch.float32, DEVICE.get(way, "cpu"), SHAPES[1:5])
            groups = [{"params": [*low, full[0]], "lr": 0.05}, {"params": full[1:]}]
            optimizer = build(groups, lr=0.01, **{**BOUNDED, "fused": way == backend})
            use(optimizer, way)
            for t in range(6):
                set_gradients([*low, *full], t)
                optimizer.step()
            both.append(optimizer)
        # The plain way rounds to bfloat16 after the correction and again after the step.
        assert_same(both[0], both[1], rtol=2e-2)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_float32_moments_of_half_precision_parameters(build: type, backend: str) -> None:
    """The Triton kernel takes them; torch's fused step on the CPU does not."""
    if backend == "cpu":
        pytest.skip("torch's fused step wants one dtype")
    optimizer = run(build, backend, torch.bfloat16, steps=1, lr=0.02, **BOUNDED)
    for state in optimizer.state.values():
        for key in state.keys() - {"step"}:
            state[key] = state[key].float()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    set_gradients(params, 1)
    optimizer.step()
    assert all(v.dtype == torch.float32 for s in optimizer.state.values() for v in s.values())
    assert all(p.isfinite().all() and p.dtype == torch.bfloat16 for p in params)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_strides_do_not_matter(build: type, backend: str) -> None:
    """Channels-last and transposed parameters, gradients and loaded moments in another order."""
    shape = (6, 50, 5, 3)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    results = []
    for layout in ("contiguous", "channels_last", "transposed", "every_second"):
        value = start.clone()
        if layout == "channels_last":
            value = value.to(memory_format=torch.channels_last)
        elif layout == "transposed":
            value = value.transpose(0, 1).contiguous().transpose(0, 1)
        elif layout == "every_second":
            value = value.repeat_interleave(2, dim=1)[:, ::2]
        p = torch.nn.Parameter(value.to(DEVICE[backend]))
        optimizer = build([p], lr=0.01, kappa=KappaKI0(0.9))
        if layout != "every_second":
            use(optimizer, backend)
        for t in range(4):
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(t))
            p.grad = noise.to(p.device)  # contiguous
            if t == 2:
                state = optimizer.state_dict()
                for entry in state["state"].values():
                    for key, moment in entry.items():
                        entry[key] = moment.contiguous()
                optimizer.load_state_dict(state)
            optimizer.step()
        assert p.stride() == value.stride()
        results.append(p.detach().cpu())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)


# When a measure may be reused


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
def test_a_parameter_changed_from_outside_is_measured_anew(
    change: Callable[[torch.nn.Parameter], None] | None, backend: str
) -> None:
    device = DEVICE[backend]
    p, q = parameters(device=device, shapes=[(60, 50), (5, 4)])
    optimizer = SGDCPR([p, q], lr=0.0, kappa=KappaKI0(1.0))
    one_pass = use(optimizer, backend)
    for t in range(3):
        set_gradients([p, q], t + 10)
        optimizer.step()
        if t == 1 and change is not None:
            change(p)
    measure = p.detach().double().square().mean().item()
    assert one_pass is not None and one_pass.reused_measures == (2 if change is None else 1)
    bound = optimizer.cpr.kappa[0].item()
    assert optimizer.cpr.lagrange_multiplier[0].item() > 0.02 * bound or change is None
    assert optimizer.cpr.measure[0].item() == pytest.approx(measure, rel=1e-6)


def test_a_parameter_of_another_size_is_followed(backend: str) -> None:
    """Without momentum, which has a size of its own, torch takes it."""
    for replace in (lambda x: x[:2], lambda x: torch.cat([x] * 300)):
        results = []
        for way in (backend, "plain"):
            params = parameters(device=DEVICE.get(way, "cpu"), shapes=[(64, 100), (5, 7), (30, 30)])
            optimizer = SGDCPR(params, lr=0.02, momentum=0.0, nesterov=False, **BOUNDED)
            use(optimizer, way)
            for t in range(6):
                if t == 3:
                    params[1].data = replace(params[1].data)
                set_gradients(params, t + 10)
                optimizer.step()
            results.append(optimizer)
        assert_same(results[0], results[1], rtol=2e-5)


def test_steps_that_the_pass_does_not_see_are_seen(backend: str) -> None:
    """Steps that go the plain way in between, and another optimizer over the same parameters."""
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


def test_a_change_that_torch_cannot_see_is_measured_a_step_later(backend: str) -> None:
    """What docs/library.md says of ``.data``, and its way out."""
    for announce in (False, True):
        p = parameters(device=DEVICE[backend], shapes=[(60, 50)])[0]
        optimizer = SGDCPR([p], lr=0.0, kappa=KappaKI0(1.0))
        use(optimizer, backend)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        p.data.mul_(2)
        if announce:
            torch.autograd.graph.increment_version(p)
        optimizer.step()
        assert (optimizer.cpr.lagrange_multiplier.item() > 0) == announce
        optimizer.step()
        assert optimizer.cpr.lagrange_multiplier.item() > 0


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
@settings(max_examples=15, deadline=None)
@given(stop=st.integers(0, 7), bound=st.sampled_from([KappaWS(3), KappaK(0.5), KappaIP(1, ema=0.5)]))
def test_a_resumed_run_is_bit_identical(build: type, stop: int, bound: Bound) -> None:
    """A measure that was reused and one that was taken after loading are the same number.

    On the CPU with large tensors; test_a_fresh_measure_is_the_reused_one has the other backend.
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


def test_a_fresh_measure_is_the_reused_one(backend: str) -> None:
    for build in (SGDCPR, AdamCPR):
        optimizer = run(build, backend, lr=0.02, **BOUNDED)
        one_pass = optimizer.cpr.one_pass
        reused = one_pass.measure().clone()
        one_pass._known_for = None
        assert torch.equal(one_pass.measure(), reused)
        expected = torch.stack([p.detach().double().square().mean() for p in one_pass.matrices])
        torch.testing.assert_close(reused.cpu().double(), expected.cpu(), rtol=1e-6, atol=0)


# Odd steps


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_gradient_scalers_wishes(build: type, scale: float, backend: str) -> None:
    """Torch hands a fused optimizer ``grad_scale`` and ``found_inf``: unscale, or do not step."""
    device = DEVICE[backend]
    both = []
    for way in (backend, "none"):
        params = parameters(device=device)
        optimizer = build(params, lr=0.02, **BOUNDED)
        if way == backend:
            use(optimizer, backend)
        for t in range(6):
            skipped = way == backend and t in (0, 3)
            if way == backend:
                optimizer.grad_scale = torch.tensor(scale, device=device)
                optimizer.found_inf = torch.tensor(float(skipped), device=device)
            if t in (0, 3) and way != backend:
                continue
            set_gradients(params, t, scale if way == backend else 1.0)
            if skipped:
                params[0].grad = torch.full_like(params[0], math.inf)
            optimizer.step()
        both.append(optimizer)
    assert both[0].cpr.step_count == 4
    assert_same(both[0], both[1], rtol=1e-6)
    if build is AdamCPR:
        assert {float(s["step"]) for s in both[0].state.values()} <= {3.0, 4.0}
    ours, plain = ([p.grad for p in o.param_groups[0]["params"]] for o in both)
    for g, h in zip(ours, plain):  # as torch leaves them
        torch.testing.assert_close(g, h)


def test_empty_tensors_are_no_trouble(backend: str) -> None:
    for build in (SGDCPR, AdamCPR):
        matrix, empty = parameters(device=DEVICE[backend], shapes=[(5, 4), (0, 3)])
        optimizer = build([{"params": [matrix]}, {"params": [empty]}], lr=0.1)
        use(optimizer, backend)
        set_gradients([matrix, empty], 10)
        optimizer.step()
        assert optimizer.cpr.names == ["0.0"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_matrix_does_not_break_the_others(bad: float, backend: str) -> None:
    p, q = parameters(device=DEVICE[backend], shapes=[(60, 50), (60, 50)])
    optimizer = SGDCPR([p, q], lr=0.1, kappa=KappaKI0(0.99), mu=0.1)
    use(optimizer, backend)
    set_gradients([p, q], 20)
    optimizer.step()
    before = optimizer.cpr.lagrange_multiplier
    set_gradients([p, q], 21)
    p.grad[3, 4] = bad
    optimizer.step()
    middle = optimizer.cpr.lagrange_multiplier
    set_gradients([p, q], 22)
    optimizer.step()
    after = optimizer.cpr.lagrange_multiplier
    assert middle[0] > before[0] and after[0] == middle[0] and after[1] > middle[1] > before[1]
    assert optimizer.cpr.metrics()["skipped_updates"] == 1
    assert q.isfinite().all() and p.isfinite().sum() == p.numel() - 1


def test_what_no_pass_covers_goes_the_plain_way() -> None:
    def one_pass_steps(params: list[Any], build: type, change: Any = None, **o: Any):
        optimizer = build(params, lr=0.01, **{"kappa": KappaKI0(0.9), "mu": 0.01, **o})
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for t in range(10, 13):
            set_gradients(held, t)
            if change is not None:
                change(optimizer)
            optimizer.step()
        assert optimizer.cpr.step_count == 3 and optimizer.cpr.lagrange_multiplier.max() > 0
        return None if optimizer.cpr.one_pass is None else optimizer.cpr.one_pass.reused_measures

    def dampen(optimizer: Any) -> None:
        optimizer.param_groups[0]["dampening"] = 0.1

    def decay(optimizer: Any) -> None:
        optimizer.param_groups[1]["weight_decay"] = 0.1

    assert one_pass_steps(parameters(), SGDCPR) == 2
    assert one_pass_steps(parameters(), SGDCPR, regularizer="huber") is None
    assert one_pass_steps(parameters(), SGDCPR, fused=False) == 0
    options = {"momentum": 0.9, "nesterov": False}
    assert one_pass_steps(parameters(), SGDCPR, dampen, **options) == 0
    matrix, bias = parameters(shapes=[(5, 4), (4,)])
    assert one_pass_steps([{"params": [matrix]}, {"params": [bias]}], AdamCPR, decay) == 0


def test_weight_decay_on_biases_is_still_torchs() -> None:
    results = []
    for decay in (0.0, 0.5):
        matrix, bias = parameters(shapes=[(5, 4), (4,)])
        optimizer = SGDCPR([{"params": [matrix]}, {"params": [bias]}], lr=0.1, kappa=KappaK(0.1))
        optimizer.param_groups[1]["weight_decay"] = decay
        set_gradients([matrix, bias], 10)
        optimizer.step()
        results.append((matrix, bias))
    assert torch.equal(results[0][0], results[1][0]) and not torch.equal(results[0][1], results[1][1])


def test_our_step_runs_every_hook_once() -> None:
    """Also when torch has wrapped the step of the class that it falls back to."""
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
    """torch's fused SGD stops at the first, and at the second takes momentum from stale memory."""
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


def test_what_hooks_do_comes_before_the_update() -> None:
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


def test_parameters_may_change_their_layout_on_the_way() -> None:
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


def test_nothing_is_read_from_the_device() -> None:
    """On the meta device a read raises. What a GPU would run here is torch's operations only."""
    for build in (SGDCPR, AdamCPR):
        for regularizer in ("l2", "l1", "std", "huber"):
            for bound in (KappaK(1.0), KappaKI0(1.0), KappaWS(1), KappaIP(1, ema=0.5)):
                params = [torch.nn.Parameter(torch.empty(4, 3, device="meta")) for _ in range(3)]
                cpr = CPR(params, kappa=bound, regularizer=regularizer, adaptive=True)
                for p in params:
                    p.grad = torch.empty_like(p)
                with torch.no_grad():
                    cpr._update_and_correct(found_inf=torch.zeros((), device="meta"))
                optimizer = build(params, lr=0.1, kappa=bound, regularizer=regularizer)
                assert optimizer.cpr.one_pass is None and not optimizer.defaults["fused"]


# What a GPU would be given

_COMPILE = """
import re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nnunet_cpr.kernels import triton_kernels

def compiled(kernel, constants, **types):
    names = kernel.arg_names
    constants = {**constants, **{n: None for n, t in types.items() if t == "constexpr"}}
    signature = {n: types.get(n, "constexpr") for n in names}
    places = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs={})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

tables = dict(addresses="*i64", numels="*i64", matrices="*i32", first_chunks="*i32",
              chunk_tensors="*i32", first_partials="*i32", partials="*fp32")
kinds = [(True, tl.float32, False), (False, tl.float32, True), (True, tl.bfloat16, True)]
for adam, param, amp in kinds:
    scalars = ("momentum", "beta1_rest", "log_beta1", "beta2", "beta2_rest", "log_beta2", "eps")
    ptx = compiled(
        triton_kernels.step_kernel,
        dict(PARAM=param, MOMENT=param, ALIGNED=True, LR_IS_TENSOR=amp, ADAM=adam, MOMENTUM=True,
             NESTEROV=not adam, MAXIMIZE=False, AMSGRAD=amp and adam, SCALED=amp, MAY_SKIP=amp,
             CHUNK=16384, BLOCK=1024),
        **tables, coefficients="*fp32", lr="*fp32" if amp else "fp32",
        grad_scale="*fp32" if amp else "constexpr", found_inf="*fp32" if amp else "constexpr",
        **{name: "fp32" for name in scalars},
    )
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx, "loads are not as wide as they can be"
    assert not re.search(r"atom|red\\.global|\\.local", ptx), "an atomic, or local memory"
    wide = len(re.findall(r"ld\\.global\\.v4", ptx))
    print(adam, param, amp, wide)
for param in (tl.float32, tl.float16):
    constants = dict(PARAM=param, ALIGNED=True, CHUNK=16384, BLOCK=1024)
    assert "ld.global.v4" in compiled(triton_kernels.measure_kernel, constants, **tables)
types = dict(partials="*fp32", first_partials="*i32", sums="*fp64")
compiled(triton_kernels.sum_kernel, dict(BLOCK=1024), **types)
print("compiled")
"""


def test_the_kernels_compile_for_a_gpu_with_wide_loads_and_no_atomics() -> None:
    pytest.importorskip("triton", minversion="3.3")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "compiled"
