"""CPR's update: settings, unusual steps, values that are not finite, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaK, KappaKI0, KappaWS
from nnunet_cpr.cpr.bounds import Bound
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
    monkeypatch.setattr("nnunet_cpr.cpr.sums._sums_on_cpu", squared_norms)
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


@dataclass(frozen=True)
class Remembering(KappaK):
    change: str = "in place"

    def memory(self, like: Tensor) -> dict[str, Tensor]:
        if self.change == "shape":
            return {"sum": like.new_zeros(2, *like.shape)}
        return {"kappa" if self.change == "name" else "sum": torch.zeros_like(like)}

    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict) -> None:
        if self.change == "in place":
            memory["sum"] += measure
        else:
            memory["sum"] = memory["sum"] + measure


class NoFields(Bound):
    def __init__(self, value: int) -> None:
        object.__setattr__(self, "value", value)

    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict) -> None: ...


class Nameless(L2):
    name = None  # type: ignore[assignment]


class TakesItsName(L2):
    pass


class OneSum(L2):
    name = "one_sum"

    def sums(self, params: list[Tensor]) -> Tensor:
        return super().sums(params)[0]


class OneMeasure(L2):
    name = "one_measure"

    def measure(self, sums: Tensor, numel: Tensor) -> Tensor:
        return super().measure(sums, numel).mean()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: {"kappa": Remembering(1, "other")}, r"memory\['sum'\]: expected an update in place"),
        (lambda: {"kappa": Remembering(1, "shape")}, r"one number .* got 'sum' of shape \[2, 2\]"),
        (lambda: {"kappa": Remembering(1, "name")}, r"a name other than .*kappa.* got 'kappa'"),
        (lambda: {"kappa": NoFields(1)}, "settings of NoFields as fields of a dataclass, .* got value"),
        (lambda: {"regularizer": Nameless()}, "Nameless.name: expected one of its own, .* got None"),
        (lambda: {"regularizer": TakesItsName()}, "TakesItsName.name: .* got 'l2'; l2, l1"),
        (lambda: {"regularizer": OneSum()}, r"one_sum: expected sums of shape \[rows, 2\], got \[2\]"),
        (lambda: {"regularizer": OneMeasure()}, r"a measure of shape \[2\], got \[\]"),
    ],
)
def test_mistakes_in_bounds_and_functions_are_refused(
    settings: Callable[[], dict], message: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    set_gradients(model.parameters(), 0)
    with pytest.raises((ValueError, TypeError), match=message):
        SGDCPR(model, **settings()).step()


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
