"""Comparison methods since the paper: peak learning rates, norms and signs."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from nnunet_cpr.baselines import (
    CautiousDecay,
    CorrectedDecay,
    DecoupledDecay,
    Hyperball,
    IndependentDecay,
    WeightNormControl,
)
from tests.helpers.baseline_kinds import matrix, same_states
from tests.helpers.examples import examples
from tests.helpers.matrices import set_gradients


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()


# Highest learning rates


def test_independent_decay_ignores_the_size_of_the_learning_rate() -> None:
    results = []
    for lr in (1e-6, 1e-8):
        p = matrix(2.0)
        optimizer = IndependentDecay([p], 0.1).attach(torch.optim.SGD([p], lr=lr))
        schedule = lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=4)
        for _ in range(5):
            optimizer.step()
            schedule.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    expected = 2 * math.prod(1 - 0.1 * share for share in (1, 0.875, 0.75, 0.625, 0.5))
    assert results[0].mean().item() == pytest.approx(expected, rel=1e-4)


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=10)


def warmup(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))


@pytest.mark.parametrize(
    ("schedule", "max_lr", "expected"),
    [(None, None, 0.1), (warmup, None, 0.1), (one_cycle, None, 0.4), (warmup, 0.7, 0.7)],
)
@pytest.mark.parametrize("first", ["schedule", "method"])
def test_highest_learning_rate_is_found(schedule, max_lr, expected: float, first: str) -> None:
    p = matrix(2.0)
    optimizer = torch.optim.SGD([p], lr=0.1)
    decay = IndependentDecay([p], 0.1, max_lr)
    if schedule is not None and (first == "schedule" or schedule is one_cycle):
        schedule(optimizer)
    decay.attach(optimizer)
    assert decay.state_dict()["state"]["max_lr"].tolist() == [pytest.approx(expected)]


def test_highest_learning_rate_is_kept_when_attached_again() -> None:
    p = matrix(2.0)
    optimizer = torch.optim.SGD([p], lr=0.1)
    decay = IndependentDecay([p], 0.1)
    decay.attach(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0  # at the end of a schedule
    saved = decay.state_dict()
    decay.detach()
    other = IndependentDecay([p], 0.1)
    other.load_state_dict(saved)
    for method in (decay, other):
        method.attach(optimizer)
        assert method.state_dict()["state"]["max_lr"].tolist() == [pytest.approx(0.1)]
        method.detach()


def test_unknown_highest_learning_rate_is_refused() -> None:
    p = matrix(2.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    with pytest.raises(ValueError, match=r"max_lr: expected the highest learning rate.*give max_lr"):
        IndependentDecay([p], 0.1).attach(optimizer)
    IndependentDecay([p], 0.1, 0.2).attach(optimizer)


def test_highest_learning_rate_is_continued() -> None:
    """Whoever resumes may build the optimizer with the learning rate of that moment."""
    states, results = [], []
    for resumed in (False, True):
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        CorrectedDecay(model, 0.5).attach(optimizer)
        for t, lr in enumerate((0.1, 0.05, 0.02)):
            if resumed and t == 1:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                decay = CorrectedDecay(model, 0.5)
                decay.attach(optimizer)
                optimizer.load_state_dict(state)
            optimizer.param_groups[0]["lr"] = lr
            set_gradients(model.parameters(), t)
            optimizer.step()
        states.append(optimizer.state_dict()["baseline"])
        results.append([p.detach() for p in model.parameters()])
    assert same_states(*states) and all(map(torch.equal, *results))


def test_other_normalized_matrices_are_refused() -> None:
    model = layers()
    state = CorrectedDecay(model, 0.5).state_dict()
    other = CorrectedDecay(model, 0.5, normalized=["2.weight"])
    with pytest.raises(ValueError, match=r"normalized: expected False, got True for '0\.weight'"):
        other.load_state_dict(state)


# Norms


@examples(20, search=200)
@given(seed=st.integers(0, 999), lr=st.floats(1e-3, 0.3), scale=st.floats(1e-3, 1e3))
def test_hyperball_turns_matrices_by_the_learning_rate(seed: int, lr: float, scale: float) -> None:
    """The step is a chord from theta to theta - lr R N(u), then projected on the sphere."""
    p = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).double())
    optimizer = Hyperball([p]).attach(torch.optim.SGD([p], lr=lr))
    radius = float(p.detach().norm())
    for t in range(3):
        before = p.detach().clone()
        set_gradients([p], 100 + t)
        p.grad *= scale
        optimizer.step()
        assert float(p.detach().norm()) == pytest.approx(radius, rel=1e-6)
        moved = before - lr * radius * p.grad / p.grad.norm()
        torch.testing.assert_close(p.detach(), moved * radius / moved.norm(), rtol=1e-5, atol=1e-6)


def test_hyperball_waits_for_the_norm_of_a_zero_matrix() -> None:
    p = matrix(0.0)
    optimizer = Hyperball([p]).attach(torch.optim.SGD([p], lr=0.1))
    gradient = p.grad.clone()
    optimizer.step()
    torch.testing.assert_close(p.detach(), -0.1 * gradient)
    optimizer.step()
    assert float(p.detach().norm()) == pytest.approx(0.1 * float(gradient.norm()), rel=1e-5)


def test_norm_control_approaches_the_target_from_both_sides() -> None:
    for factor in (0.5, 2.0):
        p = matrix(1.0)
        optimizer = WeightNormControl([p], 1.0, factor).attach(torch.optim.SGD([p], lr=0.1))
        distances = []
        for _ in range(60):
            p.grad.zero_()
            optimizer.step()
            distances.append(abs(float(p.detach().norm()) - factor * math.sqrt(6)))
        assert distances == sorted(distances, reverse=True) and distances[-1] < 1e-2


@pytest.mark.parametrize("stop", [2, 3, 4, 7])
def test_norm_control_resumes_around_its_start(stop: int) -> None:
    def build():
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        control = WeightNormControl(model, 0.5, start=3)
        control.attach(optimizer)
        return model, optimizer, control

    model, optimizer, control = build()
    for t in range(8):
        if t == stop:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        if t == 3:
            norms = [float(p.detach().norm()) for p in control.parameters]
        set_gradients(model.parameters(), t)
        optimizer.step()
    assert control.state_dict()["state"]["target"].tolist() == pytest.approx(norms)
    resumed, other, _ = build()
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for t in range(stop, 8):
        set_gradients(resumed.parameters(), t)
        other.step()
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


# Signs


def test_cautious_decay_is_plain_decay_where_signs_agree() -> None:
    p, q = matrix(2.0), matrix(2.0)
    CautiousDecay([p], 0.5).attach(torch.optim.SGD([p], lr=0.1)).step()
    DecoupledDecay([q], 0.5).attach(torch.optim.SGD([q], lr=0.1)).step()
    agrees = p.grad >= 0  # the weights are positive
    torch.testing.assert_close(p.detach()[agrees], q.detach()[agrees])
    torch.testing.assert_close(p.detach()[~agrees], (2.0 - 0.1 * p.grad)[~agrees])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_cautious_decay_sees_updates_whose_product_underflows(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    p = nn.Parameter(torch.full((1, 2), 4 * tiny, dtype=dtype))
    p.grad = torch.tensor([[tiny, -tiny]], dtype=dtype)
    CautiousDecay([p], 0.5).attach(torch.optim.SGD([p], lr=1.0)).step()
    torch.testing.assert_close(p.detach() / tiny, torch.tensor([[1.0, 5.0]], dtype=dtype))
