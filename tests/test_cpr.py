"""CPR's update: settings, unusual steps, values that are not finite, metrics."""

from __future__ import annotations

import math

import pytest
import torch

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaK, KappaKI0, KappaWS
from tests.helpers.matrices import matrix, set_gradients


@pytest.mark.parametrize("regularizer", ["l2", "l1", "std", "huber"])
def test_gpu_path_equals_cpu_path(regularizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the path of a GPU, where every matrix is corrected, if need be by 0."""

    def run() -> tuple[list[torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((4, 3), (2, 2, 3))]
        params.append(torch.nn.Parameter(torch.full((2, 3), 2.0)))
        optimizer = SGDCPR(params, lr=0.1, kappa=KappaKI0(0.99), regularizer=regularizer, mu=0.01)
        for t in range(20):
            for p in params:
                p.grad = -0.1 * p.detach().nan_to_num(posinf=2.0)  # growing
            if t == 10:
                params[2].detach()[0, 0] = math.inf
            optimizer.step()
        return params, optimizer.cpr.lagrange_multiplier

    ours, multipliers = run()
    monkeypatch.setattr("nnunet_cpr.regularizers._unbind", lambda values: values.unbind())
    theirs, others = run()
    torch.testing.assert_close(multipliers, others)
    assert multipliers[:2].max() > 0
    for p, q in zip(ours[:2], theirs[:2]):
        torch.testing.assert_close(p, q)
    assert theirs[2][0, 1:].isfinite().all() and ours[2][0, 1:].isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kappa": None}, r"kappa: expected a bound such as .* got None"),
        ({"mu": 0}, "mu: expected a positive finite number"),
        ({"regularizer": "l3"}, "unknown regularizer 'l3'; choose from l2, l1, std, huber"),
    ],
)
def test_wrong_settings_are_refused(model: torch.nn.Module, settings: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        CPR(model, **settings)


# Steps


@pytest.mark.parametrize("regularizer", ["l2", "l1", "std", "huber"])
def test_nonfinite_parameter_leaves_its_multiplier_finite(regularizer: str) -> None:
    p, q = matrix(2.0), matrix(2.0)
    p.detach()[0, 0] = q.detach()[0, 0] = 2.5
    optimizer = SGDCPR([p, q], lr=0.0, kappa=KappaK(0.1), regularizer=regularizer, mu=0.01)
    optimizer.step()
    lam = optimizer.cpr.lagrange_multiplier
    p.detach()[0, 0] = -math.inf
    optimizer.step()
    after = optimizer.cpr.lagrange_multiplier
    assert after[0] == lam[0] and after[1] > lam[1]
    assert optimizer.cpr.metrics()["skipped_updates"] == 1
    assert torch.isfinite(p[1]).all()


def test_l2_limits_and_counts_large_corrections() -> None:
    p = matrix(2.0)
    optimizer = SGDCPR([p], lr=0.0, kappa=KappaK(1.0))
    optimizer.step()  # lambda = 3, far above 1/2
    assert torch.equal(p, torch.zeros_like(p))
    assert optimizer.cpr.lagrange_multiplier.item() == pytest.approx(3.0)
    assert optimizer.cpr.metrics()["limited_corrections"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_is_float32_for_every_parameter_dtype(dtype: torch.dtype) -> None:
    p = matrix(2.0, dtype)
    optimizer = AdamCPR([p], kappa=KappaK(3.99))
    optimizer.step()
    cpr = optimizer.cpr
    assert {t.dtype for t in (cpr.kappa, cpr.lagrange_multiplier, cpr.measure)} == {torch.float32}
    assert cpr.lagrange_multiplier.item() == pytest.approx(0.01, rel=1e-4)


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_state_follows_the_model_to_another_device(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1, kappa=KappaWS(1))
    model.cuda()
    for t in range(3):
        set_gradients(model.parameters(), t)
        optimizer.step()
    assert optimizer.cpr.kappa.device.type == "cuda" and optimizer.cpr.kappa.isfinite().all()
