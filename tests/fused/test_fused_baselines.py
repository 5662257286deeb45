"""Optimizers whose fused step applies a comparison method, and torch's with the method in a hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnunet_cpr.optimizers import FusedAdam, FusedSGD
from tests.fused.stepping import parameters, use
from tests.fused.stepping import set_gradients as set_outward_gradients
from tests.helpers.baseline_kinds import KINDS
from tests.helpers.matrices import set_gradients

PAIRS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "sgd": (FusedSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (FusedAdam, torch.optim.Adam, {}),
}
each_pair = pytest.mark.parametrize("pair", PAIRS)


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


@each_pair
def test_optimizer_without_a_method_is_torchs(pair: str) -> None:
    ours, theirs, options = PAIRS[pair]
    models = layers(), layers()
    steps = [ours(models[0], lr=0.05, **options)]
    steps.append(theirs(models[1].parameters(), lr=0.05, fused=True, **options))
    for model, optimizer in zip(models, steps):
        run(model, optimizer, range(6))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    for key, value in steps[0].state_dict()["state"].items():
        assert all(torch.equal(v, steps[1].state_dict()["state"][key][k]) for k, v in value.items())
    theirs(models[1].parameters(), lr=0.1).load_state_dict(steps[0].state_dict())
