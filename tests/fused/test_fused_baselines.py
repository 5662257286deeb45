"""Optimizers whose fused step applies a comparison method, and torch's with the method in a hook."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from nnunet_cpr.optimizers import FusedAdam, FusedSGD
from tests.fused.stepping import parameters, use
from tests.fused.stepping import set_gradients as set_outward_gradients
from tests.helpers.baseline_kinds import KINDS, matrix
from tests.helpers.matrices import set_gradients, take_same_steps

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
@pytest.mark.parametrize(("pair", "resumes_fused"), [("sgd", False), ("adam", True)])
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
