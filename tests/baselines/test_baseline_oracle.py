"""Comparison methods against a float64 oracle, for hundreds of steps of SGD and Adam."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from nnunet_cpr.baselines import (
    AdaDecay,
    AdaptiveWeightDecay,
    CautiousDecay,
    CorrectedDecay,
    CosineDecay,
    DecoupledDecay,
    Hyperball,
    IndependentDecay,
    NormRescaling,
    WeightNormControl,
)
from nnunet_cpr.optimizers import FusedAdam, FusedSGD
from tests.helpers.oracle import OracleAdam, OracleSGD

# Methods in NumPy, written from the papers, independent of the package: for one step of the training the
# points after their own correction; the moves are those of tests/helpers/oracle.py.

Points = dict[str, np.ndarray]
Gradients = dict[str, "np.ndarray | None"]
Rates = dict[str, float]


class OracleBaseline:
    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        """Return the corrected parameters before the optimizer update, for those with a gradient."""
        return {n: x for n, x in points.items() if gradients[n] is not None}

    def after(self, points: Points) -> Points:
        """Return the parameters after the optimizer update and a second correction."""
        return points


@dataclass
class OracleDecoupled(OracleBaseline):
    """Loshchilov and Hutter 2019, Algorithm 2: the decay is scaled by the learning rate."""

    weight_decay: float

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        moving = super().before(points, gradients, lr)
        return {n: x - lr[n] * self.weight_decay * x for n, x in moving.items()}


@dataclass
class OracleCosine(OracleBaseline):
    """Cosine schedule between two coefficients (Caron et al. 2021)."""

    first: float
    last: float
    steps: int
    t: int = 0

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        moving = super().before(points, gradients, lr)
        way = (1 - math.cos(math.pi * min(self.t, self.steps) / self.steps)) / 2
        self.t += 1
        now = (1 - way) * self.first + way * self.last
        return {n: x - lr[n] * now * x for n, x in moving.items()}


@dataclass
class OracleAdaDecay(OracleBaseline):
    """Nakamura and Hong 2019: sigmoid of absolute gradients standardized within the layer."""

    weight_decay: float
    alpha: float

    def rate(self, gradient: np.ndarray) -> np.ndarray:
        size = np.abs(gradient)
        deviation = size - size.mean()
        std = math.sqrt(float((deviation**2).mean()))
        standard = deviation / std if std else np.zeros_like(size)
        return 2 / (1 + np.exp(-self.alpha * standard))

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        moving = super().before(points, gradients, lr)
        return {
            n: x - lr[n] * self.weight_decay * self.rate(gradients[n]) * x for n, x in moving.items()
        }


@dataclass
class OracleAWD(OracleBaseline):
    """Ghiasi et al. 2022, Algorithm 1: one coefficient for all matrices, averaged over steps."""

    weight_decay: float
    coefficient: float = 0.0

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        moving = super().before(points, gradients, lr)
        of_gradients = np.concatenate([gradients[n].ravel() for n in moving])
        of_weights = np.concatenate([x.ravel() for x in moving.values()])
        present = self.weight_decay * np.linalg.norm(of_gradients) / np.linalg.norm(of_weights)
        self.coefficient = 0.1 * self.coefficient + 0.9 * float(present)
        return {n: x - lr[n] * self.coefficient * x for n, x in moving.items()}


@dataclass
class OracleRescaling(OracleBaseline):
    """Liu et al. 2023 (Omnigrok): training with a constant norm of all weights."""

    factor: float
    initial: float | None = None

    def norm(self, points: Points) -> float:
        return math.sqrt(sum(float((x**2).sum()) for x in points.values()))

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        if self.initial is None:
            self.initial = self.norm(points)
        return super().before(points, gradients, lr)

    def after(self, points: Points) -> Points:
        norm = self.norm(points)
        return {n: x * (self.factor * self.initial / norm) for n, x in points.items()}


@dataclass
class OracleCorrected(OracleBaseline):
    """Defazio 2025, AdamC: the decay of normalized layers is scaled by lr / lr_max once more."""

    weight_decay: float
    max_lr: Rates
    normalized: tuple[str, ...]

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        moving = super().before(points, gradients, lr)
        scaled = {
            n: self.weight_decay * (lr[n] / self.max_lr[n] if n in self.normalized else 1.0)
            for n in moving
        }
        return {n: x * (1 - lr[n] * scaled[n]) for n, x in moving.items()}


@dataclass
class OracleIndependent(OracleBaseline):
    """Loshchilov and Hutter 2019, Algorithm 2, with the decay outside of the step size."""

    weight_decay: float
    max_lr: Rates

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        moving = super().before(points, gradients, lr)
        return {n: x - lr[n] / self.max_lr[n] * self.weight_decay * x for n, x in moving.items()}


@dataclass
class OracleNormControl(OracleBaseline):
    """Loshchilov 2023: decay towards the point of the same direction with the target norm."""

    weight_decay: float
    factor: float
    start: int
    t: int = 0
    target: Rates = field(default_factory=dict)

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        if self.t == self.start:
            self.target = {n: self.factor * float(np.linalg.norm(x)) for n, x in points.items()}
        self.t += 1
        moving = super().before(points, gradients, lr)
        if not self.target:
            return moving
        wanted = {n: x / np.linalg.norm(x) * self.target[n] for n, x in moving.items()}
        return {n: x + lr[n] * self.weight_decay * (wanted[n] - x) for n, x in moving.items()}


@dataclass
class OracleCautious(OracleBaseline):
    """Chen et al. 2025, Algorithm 1; the update u is that of the optimizer alone."""

    weight_decay: float
    start: Points = field(default_factory=dict)
    lr: Rates = field(default_factory=dict)

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        self.start, self.lr = super().before(points, gradients, lr), lr
        return self.start

    def after(self, points: Points) -> Points:
        result = dict(points)
        for n, x in self.start.items():
            u = x - points[n]
            decayed = np.where(u * x >= 0, x, 0.0)
            result[n] = points[n] - self.lr[n] * self.weight_decay * decayed
        return result


@dataclass
class OracleHyperball(OracleBaseline):
    """Wen et al. 2026: R N(x - lr R N(u)), where N divides by the norm and R is the initial norm."""

    factor: float
    radius: Rates = field(default_factory=dict)
    start: Points = field(default_factory=dict)
    lr: Rates = field(default_factory=dict)

    def before(self, points: Points, gradients: Gradients, lr: Rates) -> Points:
        if not self.radius:
            self.radius = {n: self.factor * float(np.linalg.norm(x)) for n, x in points.items()}
        self.start, self.lr = super().before(points, gradients, lr), lr
        return self.start

    def after(self, points: Points) -> Points:
        result = dict(points)
        for n, x in self.start.items():
            u = x - points[n]
            y = x - self.lr[n] * self.radius[n] * u / np.linalg.norm(u)
            result[n] = self.radius[n] * y / np.linalg.norm(y)
        return result


# Comparison

STEPS = 250
SHAPES = {"a": (6, 5), "b": (3, 4, 2, 2), "c": (1, 7), "bias": (6,)}
GROUPS = [["a", "bias"], ["b"], ["c"]]
FASTER = {"a": 1.0, "bias": 1.0, "b": 0.5, "c": 3.0}  # learning rates relative to each other
CASES = {
    "decoupled": (lambda p: DecoupledDecay(p, 0.6), lambda: OracleDecoupled(0.6)),
    "cosine falls": (
        lambda p: CosineDecay(p, 0.9, 0.1, steps=200),
        lambda: OracleCosine(0.9, 0.09, 200),
    ),
    "adadecay 8": (lambda p: AdaDecay(p, 0.6, 8.0), lambda: OracleAdaDecay(0.6, 8.0)),
    "awd": (lambda p: AdaptiveWeightDecay(p, 2.0), lambda: OracleAWD(2.0)),
    "rescale 0.8": (lambda p: NormRescaling(p, 0.8), lambda: OracleRescaling(0.8)),
    "corrected": (
        lambda p: CorrectedDecay(p, 0.6, normalized=["a", "c"]),
        lambda: OracleCorrected(0.6, FASTER, ("a", "c")),
    ),
    "cautious": (lambda p: CautiousDecay(p, 0.6), lambda: OracleCautious(0.6)),
    "independent": (lambda p: IndependentDecay(p, 0.01), lambda: OracleIndependent(0.01, FASTER)),
    "norm 0.5 after 70": (
        lambda p: WeightNormControl(p, 2.0, 0.5, start=70),
        lambda: OracleNormControl(2.0, 0.5, 70),
    ),
    "hyperball 2": (lambda p: Hyperball(p, 2.0), lambda: OracleHyperball(2.0)),
}


class Problem:
    """Return a noisy quadratic loss; one matrix often has no gradient, another has none for long."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.start = {n: rng.normal(0, 0.3, s) for n, s in SHAPES.items()}
        self.target = {n: rng.normal(0.1, 0.5, s) for n, s in SHAPES.items()}
        self.noise = {n: rng.normal(0, 0.1, (STEPS, *s)) for n, s in SHAPES.items()}
        self.absent = {n: rng.random(STEPS) < (0.2 if n == "b" else 0.0) for n in SHAPES}
        self.absent["c"][20:60] = True

    def gradient(self, name: str, x: np.ndarray, t: int) -> np.ndarray | None:
        if self.absent[name][t]:
            return None
        return 0.1 * (x - self.target[name]) + self.noise[name][t]


def schedule(t: int) -> float:
    return min(1.0, (t + 1) / 30) * (1 - t / STEPS) ** 0.9


def run_oracle(problem: Problem, baseline: OracleBaseline, optimizer, lr: float) -> dict:
    points = {n: x.copy() for n, x in problem.start.items()}
    for t in range(STEPS):
        gradients = {n: problem.gradient(n, x, t) for n, x in points.items()}
        rates = {n: lr * FASTER[n] * schedule(t) for n in points}
        corrected = baseline.before({n: points[n] for n in "abc"}, gradients, rates)
        for n, g in gradients.items():
            if g is not None:
                optimizer.lr = rates[n]
                points[n] = corrected.get(n, points[n]) + optimizer.move(n, g)
        points |= baseline.after({n: points[n] for n in "abc"})
    return points


def run_ours(problem: Problem, build, kind: str, lr: float, fused: bool) -> tuple[dict, object]:
    params = {n: torch.nn.Parameter(torch.from_numpy(x.copy())) for n, x in problem.start.items()}
    groups = [{"params": [params[n] for n in g], "lr": lr * FASTER[g[0]]} for g in GROUPS]
    if kind == "sgd":
        optimizer = (FusedSGD if fused else torch.optim.SGD)(groups, momentum=0.9, nesterov=True)
    else:
        optimizer = (FusedAdam if fused else torch.optim.Adam)(groups, betas=(0.9, 0.99))
    baseline = build(list(params.items()))
    assert baseline.attach(optimizer) is optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for t in range(STEPS):
        for n, p in params.items():
            g = problem.gradient(n, p.detach().numpy(), t)
            p.grad = None if g is None else torch.from_numpy(g)
        optimizer.step()
        scheduler.step()
    return {n: p.detach().numpy() for n, p in params.items()}, baseline


def oracle_optimizer(kind: str):
    return OracleSGD(0.0, 0.9) if kind == "sgd" else OracleAdam(0.0, (0.9, 0.99))


LR = {"sgd": 0.05, "adam": 0.01}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "fused"), [("sgd", False), ("adam", True)])
def test_agrees_with_the_oracle(kind: str, fused: bool, case: str) -> None:
    problem = Problem()
    ours, theirs = CASES[case]
    oracle = theirs()
    if isinstance(oracle, OracleCorrected | OracleIndependent):
        oracle.max_lr = {n: LR[kind] * FASTER[n] for n in "abc"}
    expected = run_oracle(problem, oracle, oracle_optimizer(kind), LR[kind])
    points, baseline = run_ours(problem, ours, kind, LR[kind], fused)
    assert baseline.names == ["a", "b", "c"] and baseline.step_count == STEPS
    for n, x in points.items():
        assert np.isfinite(x).all() and np.abs(x).max() < 10
        np.testing.assert_allclose(x, expected[n], rtol=3e-6, atol=3e-7, err_msg=n)
    if isinstance(oracle, OracleAWD):
        assert baseline._state["coefficient"].item() == pytest.approx(oracle.coefficient, rel=1e-5)
    # The comparison would be empty if the baseline did next to nothing.
    without = run_oracle(problem, OracleBaseline(), oracle_optimizer(kind), LR[kind])
    assert all(np.abs(without[n] - expected[n]).max() > 5e-3 for n in "abc")
    np.testing.assert_allclose(points["bias"], without["bias"], rtol=1e-9)
