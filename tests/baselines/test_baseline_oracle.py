"""Comparison methods against a float64 oracle, for hundreds of steps of SGD and Adam."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
from tests.helpers.baseline_kinds import matrix
from tests.helpers.baseline_oracle import (
    OracleAdaDecay,
    OracleAWD,
    OracleBaseline,
    OracleCautious,
    OracleCorrected,
    OracleCosine,
    OracleDecoupled,
    OracleHyperball,
    OracleIndependent,
    OracleNormControl,
    OracleRescaling,
)
from tests.helpers.examples import examples
from tests.helpers.matrices import set_gradients, take_same_steps
from tests.helpers.oracle import OracleAdam, OracleSGD

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
    "cosine rises": (lambda p: CosineDecay(p, 0.1, 10, steps=400), lambda: OracleCosine(0.1, 1.0, 400)),
    "adadecay 1": (lambda p: AdaDecay(p, 0.6, 1.0), lambda: OracleAdaDecay(0.6, 1.0)),
    "adadecay 8": (lambda p: AdaDecay(p, 0.6, 8.0), lambda: OracleAdaDecay(0.6, 8.0)),
    "awd": (lambda p: AdaptiveWeightDecay(p, 2.0), lambda: OracleAWD(2.0)),
    "rescale 0.8": (lambda p: NormRescaling(p, 0.8), lambda: OracleRescaling(0.8)),
    "rescale 4": (lambda p: NormRescaling(p, 4.0), lambda: OracleRescaling(4.0)),
    "corrected": (
        lambda p: CorrectedDecay(p, 0.6, normalized=["a", "c"]),
        lambda: OracleCorrected(0.6, FASTER, ("a", "c")),
    ),
    "cautious": (lambda p: CautiousDecay(p, 0.6), lambda: OracleCautious(0.6)),
    "independent": (lambda p: IndependentDecay(p, 0.01), lambda: OracleIndependent(0.01, FASTER)),
    "norm 1": (lambda p: WeightNormControl(p, 2.0), lambda: OracleNormControl(2.0, 1.0, 0)),
    "norm 0.5": (lambda p: WeightNormControl(p, 2.0, 0.5), lambda: OracleNormControl(2.0, 0.5, 0)),
    "norm after 70": (
        lambda p: WeightNormControl(p, 2.0, start=70),
        lambda: OracleNormControl(2.0, 1.0, 70),
    ),
    "hyperball 1": (lambda p: Hyperball(p), lambda: OracleHyperball(1.0)),
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
    if fused and baseline.has_decay:
        optimizer._torch_step = None  # every step has to be fused
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
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("kind", LR)
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


def test_decoupled_decay_on_adam_is_adamw() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)).double()
    theirs = copy.deepcopy(ours)
    optimizer = torch.optim.Adam(ours.parameters(), lr=1e-2, amsgrad=True)
    DecoupledDecay(ours, 0.3).attach(optimizer)
    biases = [p for p in theirs.parameters() if p.ndim < 2]
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)
    take_same_steps(200, (ours, optimizer), (theirs, adamw), rtol=1e-6, atol=1e-8)


# Properties that follow from the equations

VALUES = st.lists(st.floats(-10, 10, width=32), min_size=6, max_size=6)


@examples(20, search=200)
@given(gradient=VALUES, scale=st.floats(1e-6, 1e6), alpha=st.floats(0, 20))
def test_adadecays_rates(gradient: list[float], scale: float, alpha: float) -> None:
    """Rates are between 0 and 2, increase with gradients, and ignore their scale and signs."""
    p = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.1)
    AdaDecay([p], 1.0, alpha).attach(optimizer)
    p.grad = torch.tensor(gradient, dtype=torch.float64).reshape(2, 3)

    def rates(factor: float) -> torch.Tensor:
        p.detach().fill_(1.0)
        optimizer.zero_grad()
        p.grad = factor * torch.tensor(gradient, dtype=torch.float64).reshape(2, 3)
        optimizer.step()
        return ((1 - p.detach() - 0.1 * p.grad) / 0.1).flatten()

    plain = rates(1.0)
    assert (plain >= -1e-6).all() and (plain <= 2 + 1e-6).all()
    order = torch.tensor(gradient).abs().argsort()
    assert (plain[order].diff() >= -1e-6).all()
    largest = max(map(abs, gradient))
    if np.std(np.abs(gradient)) > 1e-3 * largest:
        torch.testing.assert_close(rates(-1.0), plain, rtol=1e-5, atol=1e-6)
        if largest * scale < 1e4 and largest * scale > 1e-12:  # or the move hides the decay
            torch.testing.assert_close(rates(scale), plain, rtol=1e-5, atol=1e-5)


def test_adadecay_with_alpha_0_is_decoupled_decay() -> None:
    p, q = matrix(2.0), matrix(2.0)
    for x, baseline in ((p, AdaDecay([p], 0.5, 0.0)), (q, DecoupledDecay([q], 0.5))):
        baseline.attach(torch.optim.SGD([x], lr=0.1)).step()
    torch.testing.assert_close(p, q)


@examples(20, search=200)
@given(
    first=st.floats(1e-5, 1.0),
    final=st.floats(0.01, 100.0),
    steps=st.integers(1, 100_000),
    at=st.floats(0, 2),
)
def test_the_cosine_stays_between_its_ends(first: float, final: float, steps: int, at: float) -> None:
    p = matrix()
    optimizer = torch.optim.SGD([p], lr=1.0)
    decay = CosineDecay([p], first, final, steps=steps)
    decay.attach(optimizer)

    def coefficient(step: int) -> float:
        state = decay.state_dict()
        state["state"]["step"] = torch.tensor(step)
        decay.load_state_dict(state)
        return float(decay.update_decay(lambda: torch.ones(1)))

    assert coefficient(0) == pytest.approx(first, rel=1e-5)
    assert coefficient(steps) == pytest.approx(first * final, rel=1e-4)
    assert coefficient(5 * steps) == coefficient(steps)
    low, high = sorted([first, first * final])
    step = int(at * steps)
    assert low * (1 - 1e-4) <= coefficient(step) <= high * (1 + 1e-4)
    change = coefficient(step + 1) - coefficient(step)
    assert change * (final - 1) >= -1e-5 * high * abs(final - 1)


@examples(20, search=200)
@given(
    factor=st.floats(0.1, 16), seed=st.integers(0, 999), dtype=st.sampled_from(["float32", "float64"])
)
def test_rescaling_holds_the_norm_at_its_factor(factor: float, seed: int, dtype: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    params = [
        torch.nn.Parameter(torch.randn(s, generator=generator, dtype=getattr(torch, dtype)))
        for s in ((4, 3), (2, 2, 3), (5,))
    ]

    def norm() -> float:
        return math.sqrt(sum(float(p.detach().double().square().sum()) for p in params[:2]))

    wanted = factor * norm()
    vector = params[2].detach().clone()
    optimizer = NormRescaling(params, factor).attach(torch.optim.SGD(params, lr=0.1))
    for t in range(4):
        set_gradients(params, t)
        params[0].grad = None if t == 2 else params[0].grad
        params[2].grad = None
        optimizer.step()
        assert norm() == pytest.approx(wanted, rel=1e-5)
    assert torch.equal(params[2], vector)


def test_rescaling_leaves_infinite_weights() -> None:
    p = matrix(2.0)
    optimizer = NormRescaling([p]).attach(torch.optim.SGD([p], lr=0.0))
    optimizer.step()
    p.data[0, 0] = math.inf
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)


@examples(20, search=200)
@given(scale=st.floats(1e-3, 1e3), weight_decay=st.floats(1e-4, 1.0))
def test_awd_follows_the_gradients(scale: float, weight_decay: float) -> None:
    """With constant gradients the coefficient converges to wd |g| / |theta|."""
    p = matrix(2.0)
    awd = AdaptiveWeightDecay([p], weight_decay)
    optimizer = awd.attach(torch.optim.SGD([p], lr=0.0))
    p.grad *= scale
    ratio = weight_decay * float(p.grad.norm() / p.detach().norm())
    optimizer.step()
    assert awd._state["coefficient"].item() == pytest.approx(0.9 * ratio, rel=1e-5)
    optimizer.step()
    assert awd._state["coefficient"].item() == pytest.approx(0.99 * ratio, rel=1e-5)
    p.grad = None
    optimizer.step()
    assert awd._state["coefficient"].item() == pytest.approx(0.99 * ratio, rel=1e-5)
