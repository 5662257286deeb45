"""Conventions of torch's optimizers for parameters and arguments."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaWS, MuonCPR
from nnunet_cpr.baselines import DecoupledDecay
from tests.helpers.matrices import matrix, set_gradients

FUSED_BUILDS = pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
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
        lambda m: SGDCPR(m, lr=0.1),
        lambda m: MuonCPR(m, lr=0.1, adamw_for=()),
        lambda m: CPR(m).attach(torch.optim.Adam(m.parameters())),
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


def test_cpr_can_be_attached_after_its_optimizer_is_freed() -> None:
    m = model()
    cpr = CPR(m, kappa="ws1")
    optimizer = cpr.attach(torch.optim.SGD(m.parameters(), lr=0.1))
    steps(optimizer)
    del optimizer
    other = cpr.attach(torch.optim.SGD(m.parameters(), lr=0.1))
    steps(other)
    assert cpr.step_count == 6


# Gradient scaling


@FUSED_BUILDS
def test_only_an_explicit_fused_leaves_unscaling_to_the_step(build: type) -> None:
    for fused in (None, False, True):
        assert build(model(), fused=fused)._step_supports_amp_scaling is (fused is True)


@FUSED_BUILDS
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("regularizer", ["l2", "l1"])
@pytest.mark.parametrize("turned", [False, True])
def test_grad_scaler_gives_the_unscaled_training(
    build: type, fused: bool | None, regularizer: str, turned: bool
) -> None:
    """Train with a skipped step; ``turned`` parameters have gaps after the first step."""
    results = []
    for scaled in (False, True):
        m = model()
        optimizer = build(m, lr=0.05, kappa=KappaWS(1), regularizer=regularizer, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled)
        for t in range(6):
            if t == 1 and turned:
                m[0].weight.data = m[0].weight.data.repeat_interleave(2, dim=1)[:, ::2]
            if t == 3 and not scaled:
                continue
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(t)
            loss = m(torch.randn(8, 5, generator=generator)).square().mean()
            scaler.scale(loss).backward()
            if t == 3:
                m[0].bias.grad[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.cpr.step_count == 5
        results.append(list(m.parameters()))
    for p, q in zip(*results):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# Sparse gradients


def test_sgd_takes_sparse_gradients_of_parameters() -> None:
    results = []
    for build in (SGDCPR, torch.optim.SGD):
        torch.manual_seed(0)
        embedding = nn.Embedding(6, 3, sparse=True)
        m = nn.Sequential(embedding, nn.Linear(3, 2))
        optimizer = build(m.parameters(), lr=0.1, momentum=0.9, nesterov=False)
        for t in range(4):
            optimizer.zero_grad()
            m(torch.tensor([t, 0, 5])).square().sum().backward()
            optimizer.step()
        results.append(list(m.parameters()))
    for p, q in zip(*results):
        torch.testing.assert_close(p, q)


def test_a_sparse_momentum_is_loaded_and_stepped_on() -> None:
    p = nn.Parameter(torch.ones(6, 3))
    optimizer = SGDCPR([p], lr=0.1, momentum=0.9, nesterov=False)
    p.grad = torch.ones(6, 3).to_sparse()
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"].is_sparse
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    p.grad = torch.ones(6, 3).to_sparse()
    optimizer.step()
    torch.testing.assert_close(p, torch.full_like(p, 1 - 0.1 - 0.19))


def test_adam_refuses_sparse_gradients_as_torch_does() -> None:
    m = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2))
    optimizer = AdamCPR(m.parameters(), lr=0.1)
    m(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        optimizer.step()


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
def test_states_load_into_other_unnamed_parameters(build: type) -> None:
    m = model()
    first = build(m.parameters(), lr=0.1, kappa="ws1")
    steps(first)
    twin = copy.deepcopy(m)
    second = build(twin.parameters(), lr=0.1, kappa="ws1")
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.cpr.kappa, first.cpr.kappa) and second.cpr.step_count == 3
    for optimizer in (first, second):
        steps(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(m.parameters(), twin.parameters()))


def test_states_with_other_names_are_refused() -> None:
    saved = SGDCPR([matrix(), matrix()]).state_dict()
    for others, message in (
        ([("a", matrix()), ("b", matrix())], "it lacks 'a', 'b' and it has '0', '1', which is not"),
        ([{"params": [matrix(), matrix()]}], r"it lacks '0\.0', '0\.1' and it has '0', '1'"),
        ([matrix()], "it has '1', which is not regularized here$"),
    ):
        with pytest.raises(ValueError, match=message):
            SGDCPR(others).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"shape: expected \[9, 9\], got \[\d+, \d+\] for '0'$"):
        SGDCPR([nn.Parameter(torch.ones(9, 9)), matrix()]).load_state_dict(saved)


def test_unnamed_states_of_another_selection_are_refused() -> None:
    """Check that positions are those among all parameters, as those of torch's momenta."""

    def built(frozen: int) -> SGDCPR:
        params = [nn.Parameter((i + 1.0) * torch.ones(4, 4)) for i in range(3)]
        params[frozen].requires_grad_(False)
        return SGDCPR(params, kappa="ki0x1")

    first = built(frozen=1)
    steps(first)
    with pytest.raises(ValueError, match="it lacks '1' and it has '2'"):
        built(frozen=2).load_state_dict(first.state_dict())


@BUILDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(
    build: type, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for default in (torch.float32, dtype):
        monkeypatch.setattr("nnunet_cpr.optimizers._fused_step._agrees", {})
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


@FUSED_BUILDS
def test_the_default_device_does_not_matter(build: type) -> None:
    m = model()
    torch.set_default_device("meta")
    try:
        for fused in (None, False):
            optimizer = build(m, lr=0.1, fused=fused)
            for _ in range(3):
                for p in m.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
    finally:
        torch.set_default_device(None)
    assert all(p.isfinite().all() for p in m.parameters())


@BUILDS
def test_groups_that_were_removed_or_reordered_are_refused(build: type) -> None:
    for change in (lambda groups: groups.pop(0), lambda groups: groups.reverse()):
        optimizer = build([{"params": [matrix()]}, {"params": [matrix()], "kappa": "ws5"}])
        change(optimizer.param_groups)
        with pytest.raises(ValueError, match=r"as at construction|does not have"):
            steps(optimizer)


@BUILDS
def test_mixed_names_are_refused(build: type) -> None:
    p, q = matrix(), matrix()
    for mixed in (
        [("p", p), q],
        [{"params": [("p", p), q]}],
        [{"params": [("p", p)]}, {"params": [q]}],
    ):
        with pytest.raises(ValueError, match="expected names for all parameters or none"):
            build(mixed)


@BUILDS
def test_a_set_in_a_group_is_refused(build: type) -> None:
    with pytest.raises(TypeError, match="a parameter group: expected an ordered collection"):
        build([{"params": {matrix()}}])


@BUILDS
def test_an_empty_list_is_refused(build: type) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        build([])


@BUILDS
def test_vectors_alone_train_as_with_torch(build: type) -> None:
    results = []
    torchs = next(c for c in build.__mro__ if c.__name__ in ("SGD", "Adam", "Muon"))
    for kind in (build, torchs):
        p = nn.Parameter(torch.ones(4))
        if kind is build:
            with pytest.warns(UserWarning, match="no parameter to"):
                optimizer: Any = kind([p], lr=0.1)
        else:
            more = {"momentum": 0.99, "nesterov": True} if kind is torch.optim.SGD else {}
            optimizer = kind([p], lr=0.1, **more)
        steps(optimizer)
        results.append(p)
        if kind is build:
            assert set(optimizer.cpr.metrics()) and optimizer.cpr.measure.shape == (0,)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            print(optimizer, optimizer.cpr)
    torch.testing.assert_close(*results)


def test_vectors_alone_leave_a_stock_optimizer_alone() -> None:
    for regularizer in (CPR, lambda p: DecoupledDecay(p, 0.1)):
        p, q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        with pytest.warns(UserWarning, match="no parameter to regularize"):
            steps(regularizer([p]).attach(torch.optim.SGD([p], lr=0.1)))
        steps(torch.optim.SGD([q], lr=0.1))
        assert torch.equal(p, q)


# Arguments


@FUSED_BUILDS
def test_gaps_that_come_later_leave_their_neighbours_alone(build: type) -> None:
    p = nn.Parameter(torch.randn(6, 5))
    optimizer = build([p], lr=0.1, fused=True)
    steps(optimizer)
    wide = torch.full((6, 10), 7.0)
    p.data = wide[:, ::2]
    steps(optimizer)
    assert (wide[:, 1::2] == 7.0).all() and not (wide[:, ::2] == 7.0).any()


def test_sgd_has_torchs_default_learning_rate() -> None:
    assert SGDCPR([matrix()]).defaults["lr"] == torch.optim.SGD([matrix()]).defaults["lr"] == 1e-3


@BUILDS
def test_weight_decay_is_refused_in_one_line(build: type) -> None:
    with pytest.raises(TypeError, match="CPR: expected 0, since CPR replaces it"):
        build([matrix()], weight_decay=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build([matrix()], weight_decay=0)
