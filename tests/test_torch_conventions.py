"""Conventions of torch's optimizers for parameters and arguments."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from nnunet_cpr import CPR, SGDCPR, AdamCPR, MuonCPR
from nnunet_cpr.baselines import DecoupledDecay
from tests.helpers.matrices import matrix, set_gradients

BUILDS = pytest.mark.parametrize("build", [SGDCPR, AdamCPR, MuonCPR])


pytestmark = pytest.mark.filterwarnings("ignore:params. no parameter to orthogonalize")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def steps(optimizer: Any, count: int = 3) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for t in range(count):
        set_gradients(params, t)
        optimizer.step()


# Memory


@pytest.mark.parametrize(
    "attach",
    [
        lambda m: AdamCPR(m, lr=0.1),
        lambda m: DecoupledDecay(m, 0.1).attach(torch.optim.Adam(m.parameters())),
    ],
)
def test_an_optimizer_is_freed_with_its_last_reference(attach: Any) -> None:
    m = model()
    optimizer = attach(m)
    steps(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    del scheduler
    moments = [
        weakref.ref(v)
        for s in optimizer.state.values()
        for v in s.values()
        if isinstance(v, torch.Tensor)
    ]
    while gc.collect():  # garbage of other tests may take several collections
        pass
    gc.disable()
    try:
        assert gc.get_referrers(optimizer) == []
        alive = weakref.ref(optimizer)
        del optimizer
        assert alive() is None and all(moment() is None for moment in moments) and moments
        assert gc.collect() == 0
    finally:
        gc.enable()


# Parameters


@BUILDS
def test_named_parameters_are_in_the_groups(build: type) -> None:
    m = model()
    names = [name for name, _ in m.named_parameters()]
    for params in (m, m.named_parameters(), [{"params": m.named_parameters()}]):
        optimizer = build(params)
        assert optimizer.param_groups[0]["param_names"] == names
        assert optimizer.cpr.names == ["0.weight", "1.weight"]
    assert "param_names" not in build(m.parameters()).param_groups[0]


@BUILDS
def test_the_default_dtype_does_not_matter(build: type) -> None:
    results = []
    for default in (torch.float32, torch.bfloat16):
        p, q = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(2, 3))
        torch.set_default_dtype(default)
        try:
            groups = [{"params": [p], "kappa": "k0p5"}, {"params": [q], "regularizer": "l1"}]
            optimizer = build(groups, lr=0.1)
            steps(optimizer)
            steps(build([p, q], lr=0.1))
            assert optimizer.cpr.measure.dtype is torch.float32
        finally:
            torch.set_default_dtype(torch.float32)
        results.append((p, q))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_the_default_device_does_not_matter(build: type, fused: bool | None) -> None:
    m = model()
    for p in m.parameters():
        p.grad = torch.ones_like(p)
    torch.set_default_device("meta")
    try:
        optimizer = build(m, lr=0.1, fused=fused)
        for _ in range(3):
            optimizer.step()
    finally:
        torch.set_default_device(None)
    assert all(p.isfinite().all() for p in m.parameters())


# Arguments


@BUILDS
@pytest.mark.filterwarnings("error")
def test_weight_decay_is_refused_in_one_line(build: type) -> None:
    with pytest.raises(TypeError, match="CPR: expected 0, since CPR replaces it"):
        build([matrix()], weight_decay=1e-2)
    build([matrix()], weight_decay=0)


# Deviations (docs/reference/deviations-from-torch.md)

TORCHS = [
    pytest.param(SGDCPR, partial(torch.optim.SGD, momentum=0.99, nesterov=True), id="SGD"),
    pytest.param(AdamCPR, torch.optim.Adam, id="Adam"),
]


@pytest.mark.parametrize(("ours", "torchs"), TORCHS)
@pytest.mark.parametrize(
    ("parameter", "gradient"),
    [
        (lambda t: t.repeat_interleave(2, 1)[:, ::2], lambda t: t),
        (lambda t: t, lambda t: t.T.contiguous().T),
        (lambda t: t, lambda t: t.to_sparse()),
        (lambda t: t, lambda t: t[0].clone()),  # broadcast
        (lambda t: t, lambda t: t[:, :2].clone()),
        (lambda t: t, lambda t: t.double()),
    ],
)
def test_fused_step_of_unlike_gradients_is_torchs_unfused_step(
    ours: Any, torchs: Any, parameter: Callable[..., Any], gradient: Callable[..., Any]
) -> None:
    results = []
    for build in (partial(ours, fused=True), partial(torchs, fused=False)):
        torch.manual_seed(0)
        p = nn.Parameter(parameter(torch.randn(4, 3)))
        given = gradient(torch.randn(4, 3))
        p.grad = given if given.is_sparse else torch.ones_like(p)
        p.grad.data = given  # of any dtype and shape
        try:
            build([p], lr=0.1).step()
            results.append(p.detach())
            assert p.grad.layout == given.layout
            assert p.grad.is_sparse or p.grad.stride() == given.stride()
        except RuntimeError as error:
            results.append(type(error))
    if isinstance(results[1], type):
        assert results[0] is results[1]
    else:
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(("ours", "torchs"), TORCHS)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameter_twice_in_a_group_is_stepped_twice(ours: Any, torchs: Any) -> None:
    results = []
    for build in (ours, partial(torchs, fused=True)):
        p = matrix()
        optimizer = build([p, p], lr=0.1)
        if ours is SGDCPR and build is not ours:
            optimizer.step()  # the gradient is 0
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o.add_param_group({"params": [matrix()]}), "group 3: .* got a new group"),
        (lambda o: o.param_groups.pop(1), "group 1: .* got .*ws1000"),
        (lambda o: o.param_groups[0]["params"].pop(), "the optimizer does not have '0.0'"),
        (lambda o: o.param_groups.reverse(), "the order at construction, got '2.0' in place of '0.0'"),
        (lambda o: o.param_groups[0].update(weight_decay=-0.1), "applies weight decay to '0.0'"),
        (lambda o: o.param_groups[1].update(weight_decay=0.1), None),  # nothing regularized
    ],
)
def test_groups_changed_after_construction_are_refused_at_the_step(
    build: type, change: Callable[[Any], Any], message: str | None
) -> None:
    optimizer: Any = build(
        [
            {"params": [matrix()]},
            {"params": [nn.Parameter(torch.ones(3))], "kappa": "k2"},
            {"params": [matrix()]},
        ]
    )
    steps(optimizer)
    change(optimizer)
    if message is None:
        steps(optimizer)
        return
    with pytest.raises(ValueError, match=message):
        steps(optimizer)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR, MuonCPR, CPR, DecoupledDecay])
@pytest.mark.parametrize("decay", [-0.1, torch.tensor(-0.1), torch.ones(2), float("nan")])
def test_wrong_decay_of_a_group_is_refused(build: type, decay: Any) -> None:
    with pytest.raises(ValueError, match=r"weight_decay of a parameter group: .* got (-0|nan|tensor)"):
        build([{"params": [matrix()], "weight_decay": decay}])
    build([{"params": [matrix()], "weight_decay": torch.tensor(0.1)}])
