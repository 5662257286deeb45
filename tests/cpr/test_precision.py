"""CPR with loss scaling and compilation."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nnunet_cpr import CPR, AdamCPR, KappaWS
from nnunet_cpr.cpr.bounds import Bound
from tests.helpers.bounds import SHORT
from tests.helpers.examples import examples
from tests.helpers.resume_cases import differences
from tests.optimizers.trainings import BASELINES, OURS, TORCH, Case, Training

STEPS = 12

# GradScaler


WAYS = [name for name in (*OURS, *TORCH) if name != "lbfgs"]


@examples(15, search=100)
@given(
    optimizer=st.sampled_from(WAYS),
    baseline=st.sampled_from([None, None, *BASELINES]),
    bound=st.sampled_from(SHORT),
    regularizer=st.sampled_from(["l2", "l2", "l1", "std", "huber"]),
    adaptive=st.booleans(),
    overflows=st.sets(st.integers(0, STEPS + 3), max_size=8),
    bad=st.sampled_from([math.inf, -math.inf, math.nan]),
    clip=st.booleans(),
)
def test_steps_skipped_by_grad_scaler_leave_no_trace(
    optimizer: str,
    baseline: str | None,
    bound: Bound,
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
    case = Case(optimizer, baseline, bound, regularizer=regularizer, adaptive=adaptive)
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


# torch.compile


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained_with_its_step(backend: str | None, whole: bool) -> tuple[CPR, torch.nn.Module]:
    """``whole``: forward, backward and the optimizer's step in one compiled function."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)).double()
    called = torch.compile(model, backend=backend) if backend and not whole else model
    optimizer = AdamCPR(called, lr=0.02, kappa=KappaWS(2))
    x = torch.randn(24, 6, dtype=torch.float64)
    y = 20 * torch.randn(24, 2, dtype=torch.float64)

    def step() -> None:
        optimizer.zero_grad()
        (called(x) - y).square().mean().backward()
        optimizer.step()

    run = torch.compile(step, backend=backend) if backend and whole else step
    for _ in range(8):
        run()
    assert optimizer.cpr.step_count == 8 and optimizer.cpr.lagrange_multiplier.max() > 0
    assert optimizer.cpr.names == ["0.weight", "2.weight"]
    return optimizer.cpr, model


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backend", "whole"),
    [
        ("aot_eager", False),
        ("aot_eager", True),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_model_trains_like_eager_model(backend: str, whole: bool) -> None:
    (cpr, model), (other_cpr, other) = (trained_with_its_step(b, whole) for b in (backend, None))
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)
    # Multipliers are sums of float32 differences.
    for key in ("kappa", "lagrange_multiplier"):
        torch.testing.assert_close(getattr(cpr, key), getattr(other_cpr, key), rtol=1e-4, atol=1e-8)
