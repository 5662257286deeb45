"""Comparison methods on an optimizer: attaching, checkpoints, unusual steps and numbers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.optim import lr_scheduler

from nnunet_cpr.baselines import (
    CosineDecay,
    DecoupledDecay,
    Hyperball,
    IndependentDecay,
    amos,
)
from tests.helpers.baseline_kinds import KINDS, every_baseline
from tests.helpers.matrices import matrix, set_gradients


def test_state_of_another_method_is_refused(model: torch.nn.Module) -> None:
    other, optimizer = (
        KINDS[kind](model).attach(torch.optim.SGD(model.parameters()))
        for kind in ("decoupled", "cautious")
    )
    with pytest.raises(ValueError, match=r"^cannot load the CautiousDecay state: .*method: expected"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("setting", "build"),
    [
        ("weight_decay", lambda m: DecoupledDecay(m, -1.0)),
        ("steps", lambda m: CosineDecay(m, steps=0.5)),
    ],
)
def test_wrong_settings_are_refused(model: torch.nn.Module, setting: str, build) -> None:
    with pytest.raises(ValueError, match=f"^{setting}: expected a .* number.*, got"):
        build(model)


# Steps


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
def test_nonfinite_gradient_adds_no_damage(kind: str) -> None:
    """Only the elements that the optimizer updates by it become NaN."""
    p, q = matrix(2.0), matrix(3.0)
    set_gradients([p, q], 0)
    baseline = KINDS[kind]([p, q])
    optimizer = baseline.attach(torch.optim.SGD([p, q], lr=0.1))
    optimizer.step()
    p.grad[0, 0] = math.nan
    optimizer.step()
    assert p.flatten()[1:].isfinite().all() and q.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in baseline.state_dict()["state"].values())
    with torch.no_grad():  # somebody repairs it
        p[0, 0], p.grad[0, 0] = 1.0, 1.0
    before = p.detach().clone()
    optimizer.step()
    assert p.isfinite().all() and not torch.equal(p, before)


@every_baseline
def test_half_precision_follows_single_precision(kind: str) -> None:
    """Use values that are exact in half precision, and decays that it can represent."""
    dtype = torch.bfloat16
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


# Learning rates, norms and signs


@pytest.mark.parametrize(
    ("schedule", "max_lr", "expected"),
    [
        (lambda optimizer: None, None, 0.1),
        (lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1), None, 0.1),
        (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps=10), None, 0.4),
        (lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1), 0.7, 0.7),
    ],
)
def test_highest_learning_rate_is_found(schedule, max_lr, expected: float) -> None:
    p = matrix(2.0)
    optimizer = torch.optim.SGD([p], lr=0.1)
    decay = IndependentDecay([p], 0.1, max_lr)
    schedule(optimizer)
    decay.attach(optimizer)
    assert decay.state_dict()["state"]["max_lr"].tolist() == [pytest.approx(expected)]


def test_unknown_highest_learning_rate_is_refused() -> None:
    p = matrix(2.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    with pytest.raises(ValueError, match=r"max_lr: expected the highest learning rate.*give max_lr"):
        IndependentDecay([p], 0.1).attach(optimizer)
    IndependentDecay([p], 0.1, 0.2).attach(optimizer)


def test_highest_learning_rate_is_continued() -> None:
    """Whoever resumes may build the optimizer with the learning rate of that moment."""
    p = matrix(1.0)
    optimizers = [IndependentDecay([p], 0.5).attach(torch.optim.SGD([p], lr=lr)) for lr in (0.1, 0.01)]
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    optimizers[1].param_groups[0]["lr"] = 0.05
    optimizers[1].step()
    torch.testing.assert_close(p.detach(), torch.full((2, 3), 1 - 0.05 / 0.1 * 0.5))


def test_hyperball_waits_for_the_norm_of_a_zero_matrix() -> None:
    p = matrix(0.0)
    set_gradients([p], 0)
    optimizer = Hyperball([p]).attach(torch.optim.SGD([p], lr=0.1))
    gradient = p.grad.clone()
    optimizer.step()
    torch.testing.assert_close(p.detach(), -0.1 * gradient)
    optimizer.step()
    assert float(p.detach().norm()) == pytest.approx(0.1 * float(gradient.norm()), rel=1e-5)


# AMOS


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))


def test_decay_of_amos_applies_to_matrices_only() -> None:
    plain, decayed = small_model(), small_model()
    for model, weight_decay in ((plain, 0.0), (decayed, 0.5)):
        optimizer = amos(model, lr=0.1, weight_decay=weight_decay)
        assert ("baseline" in optimizer.state_dict()) == (weight_decay > 0)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for name, p in small_model().named_parameters():
        assert torch.equal(plain.get_parameter(name), p)
        shrunk = p * (1 - 0.1 * 0.5) if name in ("0.weight", "2.weight") else p
        torch.testing.assert_close(decayed.get_parameter(name), shrunk)
