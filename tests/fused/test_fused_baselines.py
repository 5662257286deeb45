"""Optimizers whose fused step applies a comparison method, and torch's with the method in a hook."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaKI0
from nnunet_cpr.baselines import AdaDecay, AdaptiveWeightDecay, DecoupledDecay, WeightNormControl
from nnunet_cpr.optimizers import FusedAdam, FusedSGD
from tests.helpers.baseline_kinds import KINDS, matrix, same_states
from tests.helpers.matrices import set_gradients, take_same_steps, take_steps_by_closure
from tests.helpers.stepping import assert_same, parameters, use
from tests.helpers.stepping import set_gradients as set_outward_gradients

PAIRS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "sgd": (FusedSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (FusedAdam, torch.optim.Adam, {}),
}
each_pair = pytest.mark.parametrize("pair", PAIRS)
one_factor = pytest.mark.parametrize(
    "kind", [kind for kind, build in KINDS.items() if build([matrix()]).has_decay]
)


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))


def run(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for t in steps:
        set_gradients(model.parameters(), t)
        if t == 3:
            model[2].weight.grad = None
        optimizer.step()


def forbid_unfused_steps(optimizer: Any) -> None:
    optimizer._take_torchs_step = None


@each_pair
def test_kernels_apply_the_decay(pair: str, backend: str) -> None:
    """Compare with the same optimizer without a backend, on tensors of several chunks."""
    cls, _, options = PAIRS[pair]
    results = []
    for name in (backend, "plain"):
        params = parameters(shapes=[(64, 100), (17,), (5, 7)])
        ours = KINDS["norm"](params).attach(cls(params, lr=0.02, fused=True, **options))
        use(ours, name)
        if name != "plain":
            forbid_unfused_steps(ours)
        for t in range(10, 13):
            set_outward_gradients(params, t)
            ours.step()
        results.append((params, ours))
    for p, q in zip(results[0][0], results[1][0]):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


@one_factor
@each_pair
@pytest.mark.parametrize("resumes_fused", [False, True], ids=["hook", "fused"])
def test_state_crosses_between_hook_and_fused_step(kind: str, pair: str, resumes_fused: bool) -> None:
    fused, unfused, options = PAIRS[pair]
    first, second = (unfused, fused) if resumes_fused else (fused, unfused)
    model, other = layers(), layers()
    method = KINDS[kind](model)
    optimizer = method.attach(first(model.parameters(), lr=0.05, **options))
    run(model, optimizer, range(5))
    other.load_state_dict(model.state_dict())
    resumed = KINDS[kind](other)
    loaded = resumed.attach(second(other.parameters(), lr=0.05, **options))
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, range(5, 10))
    run(other, loaded, range(5, 10))
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)  # a decay is in float32
    assert resumed.step_count == method.step_count == 10


@each_pair
def test_optimizer_without_a_method_is_torchs(pair: str) -> None:
    ours, theirs, options = PAIRS[pair]
    models = layers(), layers()
    steps = [ours(models[0], lr=0.05, **options)]
    steps.append(theirs(models[1].parameters(), lr=0.05, fused=True, **options))
    take_same_steps(6, *zip(models, steps), rtol=0, atol=0)
    for key, value in steps[0].state_dict()["state"].items():
        assert all(torch.equal(v, steps[1].state_dict()["state"][key][k]) for k, v in value.items())
    theirs(models[1].parameters(), lr=0.1).load_state_dict(steps[0].state_dict())


def test_cpr_attached_to_it_is_the_optimizer_with_cpr() -> None:
    results = []
    for attached in (False, True):
        for ours, plain, options in (
            (SGDCPR, FusedSGD, {"momentum": 0.9, "nesterov": True}),
            (AdamCPR, FusedAdam, {}),
        ):
            params = parameters()
            cpr = {"kappa": KappaKI0(1.0), "mu": 0.1}
            if attached:
                optimizer = plain(params, lr=0.02, **options)
                optimizer.cpr = CPR(params, **cpr)
                optimizer.cpr.attach(optimizer)
            else:
                optimizer = ours(params, lr=0.02, **options, **cpr)
            forbid_unfused_steps(optimizer)
            for t in range(6):
                set_outward_gradients(params, t)
                optimizer.step()
            results.append(optimizer)
    for one, other in zip(results[:2], results[2:]):
        assert one.cpr.lagrange_multiplier.max() > 1e-3
        assert_same(one, other, rtol=0)


def test_method_can_be_exchanged_between_steps() -> None:
    """Each pair of methods has its own matrices, which the backend must follow."""
    ours, theirs = layers(), layers()
    optimizers = FusedSGD(ours, lr=0.05), torch.optim.SGD(theirs.parameters(), lr=0.05)
    pairs = list(zip((ours, theirs), optimizers))
    take_same_steps(2, *pairs, rtol=1e-5, atol=1e-6)
    for build in (
        lambda m: DecoupledDecay(m, 0.5),
        lambda m: WeightNormControl([m[2].weight], 0.5, 0.8),
        lambda m: AdaDecay(m, 0.5),
        lambda m: CPR(m, KappaKI0(0.9), regularizer="std"),
    ):
        methods = [build(model) for model, _ in pairs]
        for method, (_, optimizer) in zip(methods, pairs):
            method.attach(optimizer)
        take_same_steps(3, *pairs, rtol=1e-5, atol=1e-6)
        for method in methods:
            method.detach()
    take_same_steps(2, *pairs, rtol=1e-5, atol=1e-6)


def test_added_group_is_stepped_and_decayed() -> None:
    ours, theirs = layers(), layers()
    optimizers = [
        cls(model[0].parameters(), lr=0.05, momentum=0.9)
        for cls, model in ((FusedSGD, ours), (torch.optim.SGD, theirs))
    ]
    pairs = list(zip((ours, theirs), optimizers))
    take_same_steps(2, *pairs, rtol=1e-5, atol=1e-6)
    for model, optimizer in pairs:
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
        DecoupledDecay(model[::2], 0.5).attach(optimizer)
    forbid_unfused_steps(optimizers[0])
    take_same_steps(3, *pairs, rtol=1e-5, atol=1e-6)


@each_pair
def test_weight_decay_of_other_parameters_takes_unfused_steps(pair: str) -> None:
    results = []
    for cls in PAIRS[pair][:2]:
        model = layers()
        biases = [p for p in model.parameters() if p.ndim < 2]
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        groups = [{"params": biases, "weight_decay": 0.1}, {"params": matrices}]
        run(model, DecoupledDecay(model, 0.5).attach(cls(groups, lr=0.05)), range(5))
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_norms_are_those_of_the_previous_kernel() -> None:
    """The sums of squares are reused until somebody changes a matrix."""
    model = layers()
    optimizer = FusedAdam(model, lr=0.05)
    WeightNormControl(model, 0.5, 0.8).attach(optimizer)
    run(model, optimizer, range(3))
    assert optimizer._backend.reused_measures == 2
    with torch.no_grad():
        model[0].weight.mul_(3)
    twin = layers()
    other = torch.optim.Adam(twin.parameters(), lr=0.05)
    twin_method = WeightNormControl(twin, 0.5, 0.8)
    twin_method.attach(other)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, range(4, 6))
    run(twin, other, range(4, 6))
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_awd_leaves_out_matrices_without_gradients() -> None:
    states = []
    for cls in (FusedSGD, torch.optim.SGD):
        p, q = matrix(2.0), matrix(1e3)
        q.grad = None
        method = AdaptiveWeightDecay([p, q], 0.5)
        method.attach(cls([p, q], lr=0.1)).step()
        assert torch.equal(q, torch.full((2, 3), 1e3))
        states.append(method.state_dict())
    torch.testing.assert_close(states[0]["state"], states[1]["state"])
    assert states[0]["state"]["coefficient"] > 0.01


def test_closure_runs_before_the_fused_update() -> None:
    (without, _), *with_one = take_steps_by_closure(
        lambda p: DecoupledDecay([p], 0.5).attach(FusedAdam([p], lr=0.1))
    )
    for p, _ in with_one:
        assert torch.equal(p, without)


def test_optimizer_of_a_method_cannot_be_copied() -> None:
    model = layers()
    optimizer = FusedSGD(model, lr=0.1)
    method = DecoupledDecay(model)
    method.attach(optimizer)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="DecoupledDecay attached"):
            copied(optimizer)


def test_refused_state_changes_nothing() -> None:
    model = layers()
    optimizer = FusedSGD(model, lr=0.1)
    method = DecoupledDecay(model)
    method.attach(optimizer)
    run(model, optimizer, range(2))
    before = method.state_dict()
    with pytest.raises(ValueError, match="saved without DecoupledDecay"):
        optimizer.load_state_dict(FusedSGD(model, lr=0.1).state_dict())
    assert same_states(method.state_dict(), before)
