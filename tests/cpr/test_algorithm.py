"""CPR's update: settings, unusual steps, values that are not finite, metrics."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaK, KappaKI0, KappaWS
from nnunet_cpr.cpr.regularizers import L2
from nnunet_cpr.cpr.sums import squared_norms
from tests.helpers.matrices import matrix, set_gradients


@pytest.mark.parametrize("regularizer", ["l2", "l1", "std", "huber"])
def test_gpu_path_equals_cpu_path(regularizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a matrix that is left out, which stays as it is where it is infinite."""

    def run(may_fuse: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((4, 3), (2, 2, 3))]
        params.append(torch.nn.Parameter(torch.full((2, 3), 2.0)))
        optimizer = SGDCPR(params, lr=0.1, kappa=KappaKI0(0.99), regularizer=regularizer, mu=0.01)
        optimizer._may_fuse = may_fuse
        for t in range(20):
            for p in params:
                p.grad = -0.1 * p.detach().nan_to_num(neginf=2.0)  # growing
            if t == 10:
                params[2].detach()[0, 0] = -math.inf
                before = optimizer.cpr.lagrange_multiplier[2]
            optimizer.step()
        assert optimizer.cpr.lagrange_multiplier[2] == before > 0
        assert optimizer.cpr.metrics()["skipped_updates"] == 10
        return params, optimizer.cpr.lagrange_multiplier

    ours, multipliers = run(may_fuse=True)
    monkeypatch.setattr(L2, "sums", lambda self, params: squared_norms(params)[None])
    theirs, others = run(may_fuse=False)
    torch.testing.assert_close(multipliers, others)
    assert multipliers[:2].max() > 0
    for p, q in zip(ours[:2], theirs[:2]):
        torch.testing.assert_close(p, q)
    for p in (ours[2], theirs[2]):
        assert p[0, 0] == -math.inf and p[0, 1:].isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kappa": None}, r"kappa: expected a bound such as .* got None"),
        ({"mu": 0}, "mu: expected a positive finite number"),
        ({"adaptive": "no"}, "adaptive: expected True or False, got 'no'"),
        ({"regularizer": "l3"}, "unknown regularizer 'l3'; choose from l2, l1, std, huber"),
        ({"regularizer": L2}, "expected one of l2, .* or an instance of Regularizer, got <class"),
    ],
)
def test_wrong_settings_are_refused(model: torch.nn.Module, settings: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        CPR(model, **settings)


def test_attached_cpr_refuses_another_step(model: torch.nn.Module) -> None:
    optimizer = AdamCPR(model)
    with pytest.raises(RuntimeError, match="attached to an optimizer, whose step regularizes; leave"):
        optimizer.cpr.step()
    assert optimizer.cpr.step_count == 0


# Bounds and regularization functions of users


@dataclass(frozen=True)
class Falling(KappaK):
    """A bound that falls, derived from one that is set once."""

    is_set_once = False

    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict) -> None:
        kappa.copy_(self.value / (1 + step))


@pytest.mark.parametrize("attach", [True, False])
def test_derived_bound_is_updated_in_each_step(model: torch.nn.Module, attach: bool) -> None:
    if attach:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cpr = CPR(model, kappa=Falling(1))
        cpr.attach(optimizer)
    else:
        optimizer = SGDCPR(model, kappa=Falling(1))
        cpr = optimizer.cpr
    for t in range(4):
        set_gradients(model.parameters(), t)
        optimizer.step()
    assert set(cpr.kappa.tolist()) == {0.25}


def test_bound_relative_to_a_matrix_of_zeros_is_a_warning() -> None:
    zero, one = (torch.nn.Parameter(torch.full((3, 3), value)) for value in (0.0, 0.5))
    with pytest.warns(UserWarning, match="R of 'zero' is 0, so that its bound would be 0"):
        SGDCPR([("zero", zero), ("one", one)], kappa="ki0x2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SGDCPR([("zero", zero), ("one", one)])
        SGDCPR([("one", one)], kappa="ki0x2")


@dataclass(frozen=True)
class Remembering(KappaK):
    is_set_once = False

    def memory(self, like: Tensor) -> dict[str, Tensor]:
        return {"sum": torch.zeros_like(like)}

    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict) -> None:
        memory["sum"] += measure


def test_bound_remembers_what_it_updates_in_place(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.0, kappa=Remembering(1))
    measure = optimizer.cpr.measure
    for t in range(3):
        set_gradients(model.parameters(), t)
        optimizer.step()
    torch.testing.assert_close(optimizer.state_dict()["cpr"]["state"]["sum"], 3 * measure)


# Steps


def test_l2_limits_and_counts_large_corrections() -> None:
    p = matrix(2.0)
    optimizer = SGDCPR([p], lr=0.0, kappa=KappaK(1.0))
    optimizer.step()  # lambda = 3, far above 1/2
    assert torch.equal(p, torch.zeros_like(p))
    assert optimizer.cpr.lagrange_multiplier.item() == pytest.approx(3.0)
    assert optimizer.cpr.metrics()["limited_corrections"] == 1


@pytest.mark.parametrize("fused", [None, False])
def test_multiplier_that_stays_limited_is_said_once(fused: bool | None) -> None:
    p, q = matrix(0.1), matrix(0.1)
    optimizer = SGDCPR([("spiked", p), ("calm", q)], lr=0.0, kappa="ki0x1", fused=fused)
    p.data.mul_(20)  # R = 4, kappa = 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.cpr.metrics()
    kappa = optimizer.cpr.measure[1].item()
    optimizer.step()  # sets the bounds; that of the first matrix is not exceeded
    p.data.mul_(20)
    optimizer.step()
    multiplier = optimizer.cpr.lagrange_multiplier[0].item()
    steps = (multiplier - 0.5) / optimizer.cpr.kappa[0].item()
    with pytest.warns(UserWarning, match=f"R of 'spiked' .* in each of the next {steps:,.0f} steps"):
        optimizer.cpr.metrics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for read in (optimizer.cpr.metrics, optimizer.state_dict):
            read()
    assert optimizer.cpr.kappa[1].item() == pytest.approx(kappa)
    limited = 1
    while optimizer.cpr.lagrange_multiplier[0] > 0.5:
        optimizer.step()
        limited += optimizer.cpr.lagrange_multiplier[0].item() > 0.5
    assert limited == optimizer.cpr.metrics()["limited_corrections"] and abs(limited - steps) <= 1


@pytest.mark.parametrize("regularizer", ["l2", "std"])
def test_correction_that_is_limited_once_is_not_said(regularizer: str) -> None:
    p = matrix(1.0)
    optimizer = SGDCPR([p], lr=0.0, kappa=KappaK(0.5), regularizer=regularizer, mu=1.9)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()


def test_training_without_a_bound_is_said_once_when_it_is_saved() -> None:
    p = matrix(0.5)
    optimizer = AdamCPR([("w", p)], lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()  # before the first step
    for _ in range(300):
        optimizer.step()
    with pytest.warns(UserWarning, match=r"kappa='ws1000': no bound is set after step 300,.*'ws60'"):
        state = optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()
        optimizer.load_state_dict(state)
        other = AdamCPR([("w", p)], lr=1e-3, kappa="ws1")
        for _ in range(3):
            other.step()
        other.state_dict()


def test_values_that_are_not_finite_are_left_out_until_they_are() -> None:
    p = matrix(2.0)
    optimizer = SGDCPR([p], lr=0.0, kappa=KappaWS(1))
    optimizer.step()
    p.detach()[0, 0] = math.nan
    optimizer.step()
    assert optimizer.cpr.kappa.isinf().all()
    p.detach()[0, 0] = 2.0
    optimizer.step()
    assert optimizer.cpr.kappa.item() == pytest.approx(4.0)
    p.detach().mul_(1.1)
    p.grad[0, 0] = math.nan  # reaches the matrix with the step, which CPR takes before
    optimizer.step()
    multiplier = optimizer.cpr.lagrange_multiplier
    optimizer.step()
    assert torch.equal(optimizer.cpr.lagrange_multiplier, multiplier) and multiplier > 0


@pytest.mark.parametrize(("regularizer", "expected"), [("l2", 1e-8), ("huber", 5e-9), ("l1", 1e-4)])
def test_small_half_precision_weights_are_measured(regularizer: str, expected: float) -> None:
    p = torch.nn.Parameter(torch.full((100, 100), 1e-4, dtype=torch.float16))
    assert CPR([p], regularizer=regularizer).measure.item() == pytest.approx(expected, rel=1e-2)


def test_metrics_report_bounds_and_skipped_updates(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1, kappa=KappaWS(1))
    first = optimizer.cpr.metrics()
    assert math.isnan(first["measure_to_kappa"]) and first["bounded"] == 0
    for t in range(5):
        set_gradients(model.parameters(), t)
        optimizer.step()
    last = optimizer.cpr.metrics()
    assert last["bounded"] == 1 and last["active"] > 0
    assert last["measure_to_kappa"] > 1
    assert last["lagrange_multiplier_max"] >= last["lagrange_multiplier_mean"] > 0
