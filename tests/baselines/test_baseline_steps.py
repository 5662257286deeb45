"""Comparison methods with GradScaler, closures, values that are not finite, dtypes and strides."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from nnunet_cpr.baselines import AdaDecay, AdaptiveWeightDecay, DecoupledDecay, NormRescaling
from nnunet_cpr.optimizers import FusedAdam
from tests.helpers.baseline_kinds import KINDS, every_baseline, matrix, same_states
from tests.helpers.matrices import calls_of_its_closure, set_gradients, take_steps_by_closure


def values(*params: torch.Tensor) -> list[torch.Tensor]:
    return [p.detach().clone() for p in params]


# GradScaler

fused_and_not = pytest.mark.parametrize("fused", [False, True, "ours"], ids=["", "fused", "ours"])
unscaled_first_or_not = pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale"])


class Scaled:
    """Matrix whose loss has given gradients, with a GradScaler."""

    def __init__(self, kind: str, fused: bool | str, unscale: bool, scale: float | None) -> None:
        self.p = torch.nn.Parameter(torch.linspace(1, 2, 6).reshape(2, 3))
        self.q = torch.nn.Parameter(torch.linspace(-1, 1, 8).reshape(2, 4))
        params = [("p", self.p), ("q", self.q)]
        # Not SGD with momentum: torch 2.15's fused one never initialises its buffers if the first step
        # is skipped.
        build = FusedAdam if fused == "ours" else torch.optim.Adam
        self.optimizer = build([self.p, self.q], lr=0.1, fused=bool(fused))
        self.baseline = KINDS[kind](params)
        self.baseline.attach(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        self.unscale = unscale

    def step(self, factor: float) -> None:
        self.optimizer.zero_grad()
        loss = (self.p.square().sum() + self.q.square().sum()) * factor
        self.scaler.scale(loss).backward()
        if self.unscale:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@every_baseline
@fused_and_not
@unscaled_first_or_not
def test_gradient_scale_changes_nothing(kind: str, fused: bool | str, unscale: bool) -> None:
    scaled, plain = (Scaled(kind, fused, unscale and s is not None, s) for s in (1024.0, None))
    for factor in (0.1, 0.3, 0.2):
        scaled.step(factor)
        plain.step(factor)
    for p, q in ((scaled.p, plain.p), (scaled.q, plain.q)):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    if kind == "awd":
        assert scaled.baseline._state["coefficient"] > 0.01
        found, expected = (run.baseline._state["coefficient"] for run in (scaled, plain))
        torch.testing.assert_close(found, expected)


@every_baseline
@fused_and_not
@unscaled_first_or_not
@pytest.mark.parametrize("at", [0, 2])
def test_step_skipped_by_grad_scaler_does_not_count(kind, fused, unscale, at: int) -> None:
    run, twin = (Scaled(kind, fused, unscale, 8.0) for _ in range(2))
    for t in range(5):
        if t == at:
            before, state = values(run.p, run.q), run.baseline.state_dict()
            run.step(math.inf)
            assert all(map(torch.equal, values(run.p, run.q), before))
            assert same_states(run.baseline.state_dict(), state)
            run.scaler.update(8.0)
        run.step(0.1)
        twin.step(0.1)
    assert run.baseline.step_count == 5
    assert all(map(torch.equal, values(run.p, run.q), values(twin.p, twin.q)))
    assert same_states(run.baseline.state_dict(), twin.baseline.state_dict())


# Closures


@every_baseline
def test_closure_runs_before_the_update(kind: str) -> None:
    (without, _), *with_one = take_steps_by_closure(
        lambda p: KINDS[kind]([p]).attach(torch.optim.Adam([p], lr=0.1))
    )
    for p, _ in with_one:
        assert torch.equal(p, without)


@every_baseline
def test_repeated_closure_calls_are_one_step(kind: str) -> None:
    p = matrix(2.0)
    optimizer = torch.optim.LBFGS([p], lr=1e-3, max_iter=5)
    baseline = KINDS[kind]([p])
    baseline.attach(optimizer)
    assert calls_of_its_closure(optimizer, p) > 1
    assert baseline.step_count == 1 and p.isfinite().all()


# Gradients that are missing, zero or not finite


@every_baseline
def test_step_without_gradients_counts_only(kind: str) -> None:
    p = matrix(2.0)
    baseline = KINDS[kind]([p])
    optimizer = baseline.attach(torch.optim.SGD([p], lr=0.1))
    p.grad = None
    optimizer.step()
    assert baseline.step_count == 1
    expected = 0.8 * 2.0 if kind == "rescale" else 2.0
    torch.testing.assert_close(p.detach(), torch.full((2, 3), expected))


@every_baseline
def test_baseline_leaves_matrix_without_gradient_unchanged(kind: str) -> None:
    p, q = matrix(2.0), matrix(2.0)
    q.grad = None
    KINDS[kind]([p, q]).attach(torch.optim.SGD([p, q], lr=0.1)).step()
    if kind == "rescale":  # which holds the norm of all of them
        assert q.mean().item() == pytest.approx(1.6, rel=0.01)
    else:
        assert torch.equal(q, torch.full((2, 3), 2.0))


@pytest.mark.parametrize("gradient", [0.0, 0.1, -3.3, 1e-30])
@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (101, 997)])
def test_equal_gradients_decay_equally_in_adadecay(gradient: float, shape: tuple) -> None:
    """Their standard deviation is 0, and none of them is larger than the average."""
    p, q = (torch.nn.Parameter(torch.full(shape, 2.0)) for _ in range(2))
    p.grad, q.grad = (torch.full(shape, gradient) for _ in range(2))
    AdaDecay([p], 0.5, 4.0).attach(torch.optim.SGD([p], lr=0.1)).step()
    DecoupledDecay([q], 0.5).attach(torch.optim.SGD([q], lr=0.1)).step()
    torch.testing.assert_close(p, q, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e15])
def test_small_and_large_gradients_are_standardised_alike(scale: float) -> None:
    p = torch.nn.Parameter(torch.ones(2, 3))
    p.grad = torch.arange(6.0).reshape(2, 3) * scale
    optimizer = AdaDecay([p], 1.0, 1.0).attach(torch.optim.SGD([p], lr=0.1))

    def leave_only_the_decay(*_) -> None:
        p.grad.zero_()

    optimizer.register_step_pre_hook(leave_only_the_decay)
    optimizer.step()
    size = torch.arange(6.0)
    rate = 2 * torch.sigmoid((size - size.mean()) / size.std(correction=0)).reshape(2, 3)
    torch.testing.assert_close(p.detach(), 1 - 0.1 * rate)


def test_awd_coefficient_decays_for_zero_gradients() -> None:
    p = matrix(2.0)
    awd = AdaptiveWeightDecay([p], 0.5)
    optimizer = awd.attach(torch.optim.SGD([p], lr=0.1))
    optimizer.step()
    coefficient, before = awd._state["coefficient"].clone(), p.detach().clone()
    p.grad.zero_()
    optimizer.step()
    torch.testing.assert_close(awd._state["coefficient"], 0.1 * coefficient)
    torch.testing.assert_close(p.detach(), before * (1 - 0.1 * 0.1 * coefficient))


def test_awd_waits_while_all_weights_are_0() -> None:
    p = matrix(0.0)
    awd = AdaptiveWeightDecay([p], 0.5)
    optimizer = awd.attach(torch.optim.SGD([p], lr=0.1))
    optimizer.step()
    assert awd._state["coefficient"] == 0 and p.isfinite().all()
    optimizer.step()
    assert 0 < awd._state["coefficient"] < math.inf and p.isfinite().all()


def test_rescaling_leaves_zero_weights_unchanged() -> None:
    p = matrix(0.0)
    optimizer = NormRescaling([p], 2.0).attach(torch.optim.SGD([p], lr=0.1))
    gradient = p.grad.clone()
    optimizer.step()
    torch.testing.assert_close(p.detach(), -0.1 * gradient)


@every_baseline
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradient_adds_no_damage(kind, bad) -> None:
    """Only the elements that the optimizer updates by it become NaN."""
    p, q = matrix(2.0), matrix(3.0)
    baseline = KINDS[kind]([p, q])
    optimizer = baseline.attach(torch.optim.SGD([p, q], lr=0.1))
    optimizer.step()
    p.grad[0, 0] = bad
    optimizer.step()
    assert p.flatten()[1:].isfinite().all() and q.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in baseline.state_dict()["state"].values())
    with torch.no_grad():  # somebody repairs it
        p[0, 0], p.grad[0, 0] = 1.0, 1.0
    before = p.detach().clone()
    optimizer.step()
    assert p.isfinite().all() and not torch.equal(p, before)


@every_baseline
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_parameter_does_not_affect_others(kind: str, bad: float) -> None:
    p, q = matrix(2.0), matrix(3.0)
    baseline = KINDS[kind]([p, q])
    optimizer = baseline.attach(torch.optim.SGD([p, q], lr=0.1))
    optimizer.step()
    with torch.no_grad():
        p[0, 0] = bad
    for _ in range(2):
        optimizer.step()
    assert q.isfinite().all() and p.flatten()[1:].isfinite().all()
    assert all(tensor.isfinite().all() for tensor in baseline.state_dict()["state"].values())


# Dtypes, strides and where the numbers are


@every_baseline
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_single_precision(kind: str, dtype: torch.dtype) -> None:
    """Use values that are exact in half precision, and decays that it can represent."""
    results = []
    for d in (dtype, torch.float32):
        p = torch.nn.Parameter((torch.arange(32.0).reshape(4, 8) / 16 + 0.5).to(d))
        p.grad = (torch.arange(32.0).reshape(4, 8).sin() * 8).to(dtype).to(d)
        baseline = KINDS[kind]([p])
        optimizer = baseline.attach(torch.optim.SGD([p], lr=0.1))
        for _ in range(3):
            optimizer.step()
            optimizer.zero_grad()
            p.grad = (torch.arange(32.0).reshape(4, 8).cos()).to(dtype).to(d)
        assert p.dtype == d
        floats = [t for t in baseline.state_dict()["state"].values() if t.is_floating_point()]
        assert all(t.dtype == torch.float32 for t in floats)
        results.append(p.detach().float())
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(results[0], results[1], rtol=8 * precision, atol=8 * precision)


def test_tiny_half_precision_gradients_are_standardised() -> None:
    """Neither their mean nor their standard deviation is representable in float16."""
    size = torch.arange(1.0, 7.0).reshape(2, 3)
    p = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float16))
    p.grad = (size * 2.0**-24).half()  # its smallest numbers
    AdaDecay([p], 1.0, 1.0).attach(torch.optim.SGD([p], lr=0.5)).step()
    rate = 2 * torch.sigmoid((size - size.mean()) / size.std(correction=0))
    torch.testing.assert_close(p.detach().float(), 1 - 0.5 * rate, rtol=0, atol=1e-3)


def test_tiny_half_precision_gradients_count_in_awd() -> None:
    """Their squares are 0 in float16."""
    p = matrix(1.0, torch.float16)
    p.grad.mul_(1e-4)
    awd = AdaptiveWeightDecay([p], 1.0)
    awd.attach(torch.optim.SGD([p], lr=0.1)).step()
    norm = float(p.grad.double().norm())
    assert awd._state["coefficient"].item() == pytest.approx(0.9 * norm / math.sqrt(6), rel=1e-3)


@every_baseline
def test_the_default_dtype_changes_nothing(kind: str) -> None:
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(torch.linspace(1, 2, 6, dtype=torch.float32).reshape(2, 3))
        p.grad = torch.linspace(-1, 1, 6, dtype=torch.float32).reshape(2, 3)
        torch.set_default_dtype(dtype)
        try:
            optimizer = KINDS[kind]([p]).attach(torch.optim.SGD([p], lr=0.1))
            for _ in range(7):
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        results += values(p)
    torch.testing.assert_close(results[0], results[1])


@every_baseline
@pytest.mark.parametrize("same_layout", [True, False], ids=["", "mixed"])
def test_strides_change_nothing(kind: str, same_layout: bool) -> None:
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    g = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = torch.nn.Parameter(x.clone(memory_format=layout))
        p.grad = g.clone(memory_format=layout if same_layout else torch.channels_last)
        optimizer = KINDS[kind]([p]).attach(torch.optim.SGD([p], lr=0.1, momentum=0.9))
        for _ in range(3):
            optimizer.step()
        assert p.is_contiguous(memory_format=layout)
        results += values(p)
    torch.testing.assert_close(results[0], results[1].contiguous())


@every_baseline
def test_one_element_matrices(kind: str) -> None:
    p = torch.nn.Parameter(torch.full((1, 1), 2.0))
    p.grad = torch.full((1, 1), 0.5)
    KINDS[kind]([p]).attach(torch.optim.SGD([p], lr=0.1)).step()
    coefficients = {"awd": 0.9 * 0.5 * 0.25, "norm": 0.5 * 0.2, "independent": 0.05 / 0.1}
    decayed = 2.0 * (1 - 0.1 * coefficients.get(kind, 0.5)) - 0.05
    expected = {"rescale": 1.6, "hyperball": 2.0}.get(kind, decayed)
    assert p.item() == pytest.approx(expected, rel=1e-6)


@every_baseline
def test_a_learning_rate_that_is_a_tensor(kind: str) -> None:
    results = []
    for lr in (0.1, torch.tensor(0.1)):
        p = matrix(2.0)
        optimizer = KINDS[kind]([p]).attach(torch.optim.Adam([p], lr=lr))
        for _ in range(3):
            optimizer.step()
        results += values(p)
    torch.testing.assert_close(results[0], results[1])


@every_baseline
def test_baseline_does_not_change_gradients(kind: str, model) -> None:
    optimizer = KINDS[kind](model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    set_gradients(model.parameters(), 0)
    before = copy.deepcopy([p.grad for p in model.parameters()])
    optimizer.step()
    for p, g in zip(model.parameters(), before):
        assert torch.equal(p.grad, g) and p.requires_grad and p.grad_fn is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_baseline
def test_baseline_does_not_synchronize_and_moves_state(kind: str, model) -> None:
    model.float()
    twin = copy.deepcopy(model)
    optimizer = KINDS[kind](model).attach(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    baseline = KINDS[kind](twin)
    on_gpu = baseline.attach(torch.optim.SGD(twin.parameters(), lr=0.1, fused=True))
    twin.cuda()
    for t in range(4):
        set_gradients(model.parameters(), t)
        set_gradients(twin.parameters(), t)
        optimizer.step()
        torch.cuda.set_sync_debug_mode("error" if t else "default")
        try:
            on_gpu.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert baseline.state_dict()["state"]["step"].device.type == "cuda"
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-5, atol=1e-6)
