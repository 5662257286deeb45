"""SGDCPR and AdamCPR against the float64 oracle, for hundreds of steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.cpr import bounds
from tests.helpers.oracle import OracleAdam, OracleCPR, OracleSGD, measure

SHAPES = {"a": (6, 5), "b": (3, 4, 2, 2), "c": (1, 7), "bias": (6,)}
STEPS = 300
BOUNDS = {
    "k": (KappaK(1.0), ("k", 1.0)),  # the value is K_BOUND's
    "ki0": (KappaKI0(0.9), ("ki0", 0.9)),
    "ws": (KappaWS(40), ("ws", 40)),
    "ip": (KappaIP(10), ("ip", 10, 0.0)),
    "ip-ema": (KappaIP(10, ema=0.5), ("ip", 10, 0.5)),
}
assert {type(bound) for bound, _ in BOUNDS.values()} == set(bounds.BOUNDS.values()), "add the new bound"
# Their corrections do not shrink with the parameters, so they need a slower multiplier.
K_BOUND = {"l2": 0.02, "l1": 0.15, "std": 0.15, "huber": 0.02}
MU = {"l2": 1.0, "l1": 1e-3, "std": 0.5, "huber": 0.1}


class Problem:
    """Return a noisy quadratic loss whose minimum is outside the bounds."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.start = {n: rng.normal(0, 0.1, s) for n, s in SHAPES.items()}
        self.target = {n: rng.normal(0.05, 0.4, s) for n, s in SHAPES.items()}
        self.noise = {n: rng.normal(0, 0.05, (STEPS, *s)) for n, s in SHAPES.items()}
        self.absent = {n: rng.random(STEPS) < (0.1 if n == "b" else 0.0) for n in SHAPES}

    def gradient(self, name: str, x, t: int):
        return 0.05 * (x - self.target[name]) + 0.2 * self.noise[name][t]


def run_oracle(problem: Problem, cpr: OracleCPR, optimizer) -> dict[str, np.ndarray]:
    params = {n: x.copy() for n, x in problem.start.items()}
    for t in range(STEPS):
        has_grad = {n: not problem.absent[n][t] for n in params}
        correction = cpr.correction({n: params[n] for n in params if n != "bias"}, has_grad)
        for n, x in params.items():
            if has_grad[n]:
                move = optimizer.move(n, problem.gradient(n, x, t))
                params[n] = x + move - correction.get(n, 0.0)
    return params


def run_ours(problem: Problem, params: dict[str, torch.Tensor], optimizer) -> None:
    for t in range(STEPS):
        for n, p in params.items():
            g = torch.from_numpy(problem.gradient(n, p.detach().numpy(), t))
            p.grad = None if problem.absent[n][t] else g
        optimizer.step()


@pytest.mark.parametrize("adaptive", [False, True], ids=["", "ada"])
@pytest.mark.parametrize("regularizer", MU)
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_agrees_with_the_oracle(kind: str, bound: str, regularizer: str, adaptive: bool) -> None:
    problem = Problem(seed=3)
    ours, theirs = BOUNDS[bound]
    if bound == "k":
        ours, theirs = KappaK(K_BOUND[regularizer]), ("k", K_BOUND[regularizer])
    mu = MU[regularizer]
    params = {n: torch.nn.Parameter(torch.from_numpy(x.copy())) for n, x in problem.start.items()}
    oracle = OracleCPR(theirs, regularizer, mu, adaptive)
    settings = {"kappa": ours, "regularizer": regularizer, "mu": mu, "adaptive": adaptive}
    # Two parameter groups; the second asks by its weight decay to be left alone.
    groups = [
        {"params": [(n, p) for n, p in params.items() if n != "bias"], "weight_decay": 0.1},
        {"params": [("bias", params["bias"])], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        optimizer = SGDCPR(groups, lr=0.02, momentum=0.9, **settings)
        expected = run_oracle(problem, oracle, OracleSGD(0.02, 0.9))
    else:
        optimizer = AdamCPR(groups, lr=0.005, betas=(0.9, 0.99), **settings)
        expected = run_oracle(problem, oracle, OracleAdam(0.005, (0.9, 0.99)))
    run_ours(problem, params, optimizer)
    if bound != "ip-ema" and not adaptive:
        assert len(oracle.kappa) == 3 and max(oracle.lam.values()) > 1e-4, "no bound was reached"

    cpr = optimizer.cpr
    assert cpr.names == ["a", "b", "c"]
    assert cpr.step_count == STEPS
    assert all(np.isfinite(x).all() and np.abs(x).max() < 10 for x in expected.values())
    for n, p in params.items():
        np.testing.assert_allclose(p.detach().numpy(), expected[n], rtol=1e-4, atol=1e-6)
    kappa = [oracle.kappa.get(n, np.inf) for n in cpr.names]
    np.testing.assert_allclose(cpr.kappa.numpy(), kappa, rtol=1e-5)
    lam = [oracle.lam[n] for n in cpr.names]
    np.testing.assert_allclose(cpr.lagrange_multiplier.numpy(), lam, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("regularizer", MU)
def test_adaptive_bounds_follow_a_parameter_down(regularizer: str) -> None:
    """Move a parameter above its bound, below it and up again: the bound is reset."""
    x = np.random.default_rng(0).normal(0, 1.5, (6, 5))  # some elements beyond huber's 1
    p = torch.nn.Parameter(torch.from_numpy(x.copy()))
    p.grad = torch.zeros_like(p)
    cpr = CPR([p], kappa=KappaKI0(1.05), regularizer=regularizer, mu=1e-2, adaptive=True)
    oracle = OracleCPR(("ki0", 1.05), regularizer, 1e-2, adaptive=True)
    bounds = set()
    for t in range(120):
        factor = 1.02 if t % 40 < 12 else 0.985
        p.data *= factor
        x = x * factor
        x = x - oracle.correction({"0": x}, {"0": True})["0"]
        cpr.step()
        bounds.add(oracle.kappa["0"])
        assert cpr.kappa.item() == pytest.approx(oracle.kappa["0"], rel=1e-5)
        assert cpr.lagrange_multiplier.item() == pytest.approx(oracle.lam["0"], rel=1e-3, abs=1e-6)
    assert len(bounds) >= 2
    np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-4, atol=1e-6)


def test_tied_weights_count_once() -> None:
    tied = torch.nn.Parameter(torch.full((3, 3), 0.5, dtype=torch.float64))
    module = torch.nn.ModuleDict({"one": torch.nn.Linear(3, 3), "two": torch.nn.Linear(3, 3)})
    module["one"].weight = module["two"].weight = tied
    cpr = CPR(module, kappa=KappaK(0.2))
    assert cpr.names == ["one.weight"]
    tied.grad = torch.zeros_like(tied)
    cpr.step()
    lam = 0.25 - 0.2
    np.testing.assert_allclose(tied.detach().numpy(), 0.5 * (1 - 2 * lam), rtol=1e-6)


@pytest.mark.parametrize("regularizer", MU)
def test_large_matrices_are_measured_exactly(regularizer: str) -> None:
    """Use matrices as large as nnU-Net's largest, where one float32 sum is off by 1e-4."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(320, 640, 3, 3, 3, generator=generator) * 0.02
    for y in (x, x + 0.05, x.to(memory_format=torch.channels_last_3d), x[:, ::2]):
        ours = CPR([torch.nn.Parameter(y)], regularizer=regularizer).measure.item()
        assert ours == pytest.approx(measure(regularizer, y.double().numpy()), rel=1e-6)
