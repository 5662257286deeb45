"""CPR with loss scaling, clipping, weight averages and compilation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaKI0, KappaWS
from tests.helpers.examples import examples
from tests.helpers.resume_cases import BASELINES, OURS, TORCH, Case, Training, differences

STEPS = 12

# GradScaler


WAYS = [name for name in (*OURS, *TORCH) if name != "lbfgs"]


@examples(20, search=100)
@given(
    optimizer=st.sampled_from(WAYS),
    baseline=st.sampled_from([None, None, *BASELINES]),
    bound=st.sampled_from(
        [
            ("KappaK", {"value": 0.01}),
            ("KappaKI0", {"factor": 0.9}),
            ("KappaWS", {"steps": 3}),
            ("KappaIP", {"interval": 1}),
            ("KappaIP", {"interval": 2, "ema": 0.5}),
        ]
    ),
    regularizer=st.sampled_from(["l2", "l2", "l1", "std", "huber"]),
    adaptive=st.booleans(),
    overflows=st.sets(st.integers(0, STEPS + 3), max_size=8),
    bad=st.sampled_from([math.inf, -math.inf, math.nan]),
    clip=st.booleans(),
)
def test_steps_skipped_by_grad_scaler_leave_no_trace(
    optimizer: str,
    baseline: str | None,
    bound: tuple[str, dict],
    regularizer: str,
    adaptive: bool,
    overflows: set[int],
    bad: float,
    clip: bool,
) -> None:
    """Compare bitwise with a training without a scaler and these steps; scales are powers of 2."""
    baseline = None if optimizer in OURS else baseline
    if optimizer == "sgd-fused":  # torch's own takes momentum from stale memory if the first is skipped
        overflows = overflows - {0}
    case = Case(optimizer, baseline, *bound, regularizer=regularizer, adaptive=adaptive)
    scaled, plain = Training(case), Training(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    good = [t for t in range(STEPS) if t not in overflows]
    hypothesis.assume(good)
    for t in range(STEPS):
        scaled.optimizer.zero_grad()
        scaled.set_gradients(t)
        loss = torch.zeros(())
        for p in scaled.model.parameters():
            if p.grad is not None:
                loss = loss + (p * p.grad.clone()).sum()
        scaled.optimizer.zero_grad()
        scaler.scale(loss).backward()
        if t in overflows:
            scaled.model[3].weight.grad[1, 2] = bad
        if clip:
            scaler.unscale_(scaled.optimizer)
            torch.nn.utils.clip_grad_norm_(scaled.model.parameters(), 3.0)
        scaler.step(scaled.optimizer)
        scaler.update()
        if t in overflows:
            continue
        plain.set_gradients(t)
        if clip:
            torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 3.0)
        plain.optimizer.step()
        assert scaled.attached.step_count == plain.attached.step_count == 1 + good.index(t)
    one, other = scaled.state(), plain.state()
    assert differences(one["model"], other["model"]) == []
    assert differences(one["optimizer"], other["optimizer"]) == []


def test_scaled_autocast_training_respects_bounds() -> None:
    """Train with autocast, gradients that overflow at first, and clipping."""
    for build in (SGDCPR, AdamCPR):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        optimizer = build(model, lr=1e-2, kappa=KappaKI0(1.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32, growth_interval=5)
        x = torch.randn(64, 8)
        y = x.sum(1, keepdim=True) * 5
        skipped = 0
        for _ in range(60):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(x) - y).square().mean()
            before = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
        assert 5 < skipped < 40 and optimizer.cpr.step_count == 60 - skipped
        metrics = optimizer.cpr.metrics()
        assert metrics["skipped_updates"] == 0 and metrics["lagrange_multiplier_max"] > 0


# Accumulated and clipped gradients


def steps_of(build: Callable, backward: Callable, steps: int = 8) -> tuple[Any, torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)).double()
    optimizer = build(model)
    cpr = optimizer.cpr if hasattr(optimizer, "cpr") else attached_to(optimizer)
    x = torch.randn(24, 6, dtype=torch.float64)
    y = 20 * torch.randn(24, 2, dtype=torch.float64)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()
    assert cpr.step_count == steps and cpr.lagrange_multiplier.max() > 0
    return cpr, model


def attached_to(optimizer: torch.optim.Optimizer) -> Any:
    return next(h.__self__ for h in optimizer._optimizer_state_dict_post_hooks.values())


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


BUILDS: dict[str, Callable] = {
    "SGDCPR": lambda m: SGDCPR(m, lr=0.02, kappa=KappaWS(2)),
    "AdamCPR": lambda m: AdamCPR(m, lr=0.02, kappa=KappaWS(2)),
    "attached": lambda m: CPR(m, kappa=KappaWS(2)).attach(torch.optim.Adam(m.parameters(), lr=0.02)),
    "attached-fused": lambda m: CPR(m, kappa=KappaWS(2)).attach(
        torch.optim.Adam(m.parameters(), lr=0.02, fused=True)
    ),
}
every_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


def assert_close(one: tuple[Any, torch.nn.Module], other: tuple[Any, torch.nn.Module]) -> None:
    (cpr, model), (other_cpr, other_model) = one, other
    for p, q in zip(model.parameters(), other_model.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)
    # Multipliers are sums of float32 differences.
    for key in ("kappa", "lagrange_multiplier"):
        torch.testing.assert_close(getattr(cpr, key), getattr(other_cpr, key), rtol=1e-4, atol=1e-8)


@every_build
def test_accumulated_gradients_equal_the_full_batch(build: Callable) -> None:
    whole = steps_of(build, lambda m, x, y: loss_of(m, x, y).backward())
    for parts in (2, 3, 8):

        def in_parts(m: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, parts: int = parts) -> None:
            for a, b in zip(x.chunk(parts), y.chunk(parts)):
                (loss_of(m, a, b) / parts).backward()

        assert_close(steps_of(build, in_parts), whole)


@every_build
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("how", ["norm", "value"])
def test_step_uses_clipped_gradients(build: Callable, foreach: bool, how: str) -> None:
    def clipped(m: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        loss_of(m, x, y).backward()
        if how == "norm":
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.7, foreach=foreach)
        else:
            torch.nn.utils.clip_grad_value_(m.parameters(), 0.1, foreach=foreach)

    def by_hand(m: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        loss_of(m, x, y).backward()
        norm = torch.cat([p.grad.flatten() for p in m.parameters()]).norm()
        for p in m.parameters():
            scaled = p.grad * min(1.0, 0.7 / (norm.item() + 1e-6))
            p.grad = scaled if how == "norm" else p.grad.clamp(-0.1, 0.1)

    assert_close(steps_of(build, clipped), steps_of(build, by_hand))


# Averages of the weights


def average(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return other weights to swap in, far from the model's."""
    return [3 * p.detach().clone() for p in model.parameters()]


def copied(model: torch.nn.Module, values: list[torch.Tensor]) -> list[torch.Tensor]:
    backup = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), values):
            p.copy_(value)
    return backup


def copied_by_foreach(model: torch.nn.Module, values: list[torch.Tensor]) -> list[torch.Tensor]:
    backup = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), values)
    return backup


def loaded(model: torch.nn.Module, values: list[torch.Tensor]) -> list[torch.Tensor]:
    backup = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict({**model.state_dict(), **dict(zip(dict(model.named_parameters()), values))})
    return backup


def exchanged(model: torch.nn.Module, values: list[torch.Tensor]) -> list[torch.Tensor]:
    backup = [p.data for p in model.parameters()]
    for p, value in zip(model.parameters(), values):
        p.data = value
    return backup


def as_one_vector(model: torch.nn.Module, values: list[torch.Tensor]) -> list[torch.Tensor]:
    backup = [p.detach().clone() for p in model.parameters()]
    vector = torch.nn.utils.parameters_to_vector(values)
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    return backup


def copied_through_data(model: torch.nn.Module, values: list[torch.Tensor]) -> list[torch.Tensor]:
    backup = [p.detach().clone() for p in model.parameters()]
    for p, value in zip(model.parameters(), values):
        p.data.copy_(value)
    return backup


def copied_through_numpy(model: torch.nn.Module, values: list[torch.Tensor]) -> list[torch.Tensor]:
    backup = [p.detach().clone() for p in model.parameters()]
    for p, value in zip(model.parameters(), values):
        p.detach().numpy()[...] = value.numpy()
    return backup


SEEN = [copied, copied_by_foreach, loaded, exchanged, as_one_vector]
UNSEEN = [copied_through_data, copied_through_numpy]
ways_to_run = pytest.mark.parametrize(
    "optimizer", ["SGDCPR", "AdamCPR", "AdamCPR-unfused", "adam-fused"]
)


@ways_to_run
@pytest.mark.parametrize("swap", [*SEEN, *UNSEEN])
def test_swapping_an_average_in_and_out_changes_nothing(optimizer: str, swap: Callable) -> None:
    undisturbed, training = Training(Case(optimizer)), Training(Case(optimizer))
    for t in range(STEPS):
        undisturbed.step(t)
        training.step(t)
        backup = swap(training.model, average(training.model))
        with torch.no_grad():
            training.model[4](torch.ones(1, 4))  # evaluates
        swap(training.model, backup)
    assert differences(training.state(), undisturbed.state()) == []


def training_with_other_weights(optimizer: str, put: Callable, announce: bool = False) -> Training:
    """Continue from other weights at the sixth step."""
    training = Training(Case(optimizer, None, "KappaKI0", {"factor": 1.0}))
    training.run(0, 6)
    put(training.model, average(training.model))
    if announce:
        torch.autograd.graph.increment_version(training.model.parameters())
    training.run(6, 8)
    return training


@ways_to_run
@pytest.mark.parametrize("swap", SEEN)
def test_swapped_weights_get_new_sums(optimizer: str, swap: Callable) -> None:
    ours = training_with_other_weights(optimizer, swap)
    unfused = {"SGDCPR": "SGDCPR-unfused", "AdamCPR": "AdamCPR-unfused"}.get(optimizer, optimizer)
    plain = training_with_other_weights(unfused, copied)  # has no measure to remember
    for p, q in zip(ours.model.parameters(), plain.model.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    multipliers = [t.attached.lagrange_multiplier for t in (ours, plain)]
    torch.testing.assert_close(*multipliers, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["SGDCPR", "AdamCPR"])
@pytest.mark.parametrize("swap", UNSEEN)
def test_unversioned_change_needs_increment_version(optimizer: str, swap: Callable) -> None:
    said = training_with_other_weights(optimizer, swap, announce=True)
    seen = training_with_other_weights(optimizer, copied)
    assert differences(said.state(), seen.state()) == []


@ways_to_run
def test_weight_average_changes_nothing(optimizer: str) -> None:
    undisturbed, training = Training(Case(optimizer)), Training(Case(optimizer))
    averages = [
        torch.optim.swa_utils.AveragedModel(training.model),
        torch.optim.swa_utils.AveragedModel(
            training.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        ),
    ]
    for t in range(STEPS):
        undisturbed.step(t)
        training.step(t)
        for each in averages:
            each.update_parameters(training.model)
    assert differences(training.state(), undisturbed.state()) == []


# torch.compile


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def compiled_steps(case: Case, backend: str | None) -> Training:
    training = Training(case)
    step = training.optimizer.step
    if backend is not None:
        step = torch.compile(step, backend=backend)
    for t in range(8):
        if case.closure:
            step(lambda t=t: training._loss(t))
        else:
            training.set_gradients(t)
            step()
        training.scheduler.step()
    return training


def check_compiled_step(case: Case, backend: str) -> None:
    compiled, plain = compiled_steps(case, backend), compiled_steps(case, None)
    assert compiled.attached.step_count == plain.attached.step_count == 8
    rtol = 0 if case.optimizer in OURS else 1e-4  # a compiled step of torch's rounds in its own way
    for p, q in zip(compiled.model.parameters(), plain.model.parameters()):
        torch.testing.assert_close(p, q, rtol=rtol, atol=0.1 * rtol)
    one, other = (t.attached._state for t in (compiled, plain))
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], rtol=rtol, atol=0.1 * rtol, equal_nan=True)


def named(case: Case) -> str:
    return f"{case.optimizer}-{case.baseline or 'cpr'}{'-closure' * case.closure}"


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "case",
    [
        Case("SGDCPR"),
        Case("AdamCPR", None, "KappaIP", {"interval": 1}, closure=True),
        Case("sgd-bare", closure=True),
        Case("sgd-bare", "rescale"),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                Case("AdamCPR"),
                Case("sgd", adaptive=True),
                Case("adam-fused", regularizer="std"),
                Case("sgd", "awd"),
            )
        ),
    ],
    ids=named,
)
def test_compiled_step_equals_eager_step(case: Case) -> None:
    check_compiled_step(case, "eager")


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "case",
    [Case("SGDCPR"), Case("AdamCPR"), Case("sgd"), Case("adamw"), Case("sgd", "adadecay")],
    ids=named,
)
def test_compiled_step_equals_eager_step_with_inductor(case: Case) -> None:
    check_compiled_step(case, "inductor")


def training_of_a_compiled_model(
    build: Callable, backend: str | None, whole: bool
) -> tuple[Any, torch.nn.Module]:
    """``whole``: forward, backward and the optimizer's step in one compiled function.

    Not with torch's plain Adam, whose compiled step rounds in its own way, with CPR or without.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)).double()
    called = torch.compile(model, backend=backend) if backend and not whole else model
    optimizer = build(called)
    x = torch.randn(24, 6, dtype=torch.float64)
    y = 20 * torch.randn(24, 2, dtype=torch.float64)

    def step() -> None:
        optimizer.zero_grad()
        (called(x) - y).square().mean().backward()
        optimizer.step()

    run = torch.compile(step, backend=backend) if backend and whole else step
    for _ in range(8):
        run()
    cpr = attached_to(optimizer)
    assert cpr.step_count == 8 and cpr.lagrange_multiplier.max() > 0
    assert cpr.names == ["0.weight", "2.weight"]
    return cpr, model


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("build", "whole"), [("SGDCPR", False), ("AdamCPR", True), ("attached-fused", True)]
)
def test_compiled_model_trains_like_eager_model(build: str, whole: bool) -> None:
    compiled = training_of_a_compiled_model(BUILDS[build], "aot_eager", whole)
    assert_close(compiled, training_of_a_compiled_model(BUILDS[build], None, whole))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("build", ["SGDCPR", "AdamCPR", "attached-fused"])
def test_compiled_model_trains_like_eager_model_with_inductor(build: str, whole: bool) -> None:
    compiled = training_of_a_compiled_model(BUILDS[build], "inductor", whole)
    assert_close(compiled, training_of_a_compiled_model(BUILDS[build], None, whole))
