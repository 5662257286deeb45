"""Optimizers whose fused step applies a comparison method, and torch's with the method in a hook."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from nnunet_cpr.optimizers import FusedAdam, FusedSGD
from tests.helpers.baseline_kinds import KINDS
from tests.helpers.resume_cases import differences
from tests.optimizers.fused.stepping import parameters, set_gradients, use, values

each_pair = pytest.mark.parametrize(
    ("build", "torchs", "options"),
    [
        (FusedSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (FusedAdam, torch.optim.Adam, {}),
    ],
)


@each_pair
def test_kernels_apply_the_decay(build: Any, torchs: Any, options: dict[str, Any]) -> None:
    """Compare with torch's optimizer and the method in a hook, on tensors of several chunks."""
    results = []
    for cls in (build, torchs):
        params = parameters(shapes=[(64, 100), (17,), (5, 7)])
        optimizer = KINDS["norm"](params).attach(cls(params, lr=0.02, fused=True, **options))
        if cls is build:
            use(optimizer, "cpu")
            optimizer._take_torchs_step = None
        for t in range(10, 13):
            set_gradients(params, t)
            optimizer.step()
        results.append(params)
    torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)


@each_pair
def test_optimizer_without_a_method_is_torchs(build: Any, torchs: Any, options: dict[str, Any]) -> None:
    ours = build(parameters(), lr=0.05, **options)
    theirs = torchs(parameters(), lr=0.05, fused=True, **options)
    for optimizer, t in itertools.product((ours, theirs), range(6)):
        set_gradients(optimizer.param_groups[0]["params"], t)
        optimizer.step()
    assert differences(values(ours), values(theirs)) == []
    assert differences(ours.state_dict()["state"], theirs.state_dict()["state"]) == []
    theirs.load_state_dict(ours.state_dict())
