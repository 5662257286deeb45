"""torch's learning-rate schedulers and its checks of them on optimizers with CPR."""

from __future__ import annotations

import copy
import gc
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from nnunet_cpr import CPR, SGDCPR, AdamCPR, MuonCPR
from nnunet_cpr.optimizers import Muon
from tests.helpers.small_problems import assert_all_equal, backward, matrix_with_gradient, small_model

Scheduler = Any

SGD_DEFAULTS = {"momentum": 0.9, "nesterov": True}
PAIRS = {
    "AdamCPR": (AdamCPR, torch.optim.Adam, {}),
    "MuonCPR": (MuonCPR, Muon, {}),
    "SGDCPR": (SGDCPR, torch.optim.SGD, SGD_DEFAULTS),
}

SCHEDULERS: dict[str, Callable[[Optimizer], Scheduler]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(
        opt, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]
    ),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.95),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, step_size=3, gamma=0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, milestones=[2, 5, 9], gamma=0.5),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, factor=0.5, total_iters=4),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, start_factor=0.25, total_iters=4),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, gamma=0.9),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, total_iters=10, power=0.9),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=10, eta_min=1e-5),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(
        opt, T_0=3, T_mult=2
    ),
    "ReduceLROnPlateau": lambda opt: ReduceLROnPlateau(opt, factor=0.5, patience=1),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, base_lr=1e-3, max_lr=1e-2, step_size_up=3),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=[1e-2, 2e-2], total_steps=15),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [
            lr_scheduler.ConstantLR(opt, factor=0.1, total_iters=3),
            lr_scheduler.ExponentialLR(opt, gamma=0.9),
        ],
        milestones=[4],
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.LinearLR(opt, start_factor=0.5, total_iters=4),
            lr_scheduler.ExponentialLR(opt, gamma=0.9),
        ]
    ),
    "SWALR": lambda opt: SWALR(opt, swa_lr=1e-3, anneal_epochs=5),
}

each_pair = pytest.mark.parametrize("pair", list(PAIRS))


def groups_of(model: nn.Sequential, lr: Any = 0.02) -> list[dict[str, Any]]:
    """Return two groups, the second with a learning rate of its own."""
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": lr}]


def step_both(model: nn.Sequential, optimizer: Optimizer, scheduler: Scheduler, steps: range) -> None:
    for step in steps:
        backward(model, 1 + 0.1 * step)
        optimizer.step()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step([3.0, 2.0, 4.0, 5.0, 5.0][step % 5])
        else:
            scheduler.step()


def settings(optimizer: Optimizer) -> list[list[Any]]:
    keys = ("lr", "momentum", "betas", "initial_lr")
    return [[copy.deepcopy(group.get(key)) for key in keys] for group in optimizer.param_groups]


def test_all_schedulers_of_torch_are_covered() -> None:
    assert {*lr_scheduler.__all__, "SWALR"} - {"LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", list(SCHEDULERS))
@each_pair
def test_scheduled_steps_equal_those_of_torch(pair: str, name: str, tensor_lr: bool) -> None:
    cpr_class, torch_class, options = PAIRS[pair]
    trained: list[list[Any]] = []
    scheduled: list[list[Any]] = []
    for optimizer_class in (cpr_class, torch_class):
        rates = (torch.tensor(0.01), torch.tensor(0.02)) if tensor_lr else (0.01, 0.02)
        model = small_model(torch.float64)
        fused = {} if pair == "MuonCPR" else {"fused": True}
        optimizer = optimizer_class(groups_of(model, rates[1]), lr=rates[0], **options, **fused)
        scheduler = SCHEDULERS[name](optimizer)
        rows = [settings(optimizer)]
        for step in range(12):
            step_both(model, optimizer, scheduler, range(step, step + 1))
            rows.append(settings(optimizer))
        trained.append(list(model.parameters()))
        scheduled.append(rows)
    assert scheduled[0] == scheduled[1]
    torch.testing.assert_close(*trained, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", list(SCHEDULERS))
@each_pair
def test_resumed_schedule_continues_identically(pair: str, name: str) -> None:
    cpr_class, _, options = PAIRS[pair]

    def start() -> tuple[nn.Sequential, Any, Scheduler]:
        model = small_model()
        optimizer = cpr_class(groups_of(model), lr=0.01, kappa="ki0x0p9", **options)
        return model, optimizer, SCHEDULERS[name](optimizer)

    model, optimizer, scheduler = start()
    step_both(model, optimizer, scheduler, range(5))
    saved = copy.deepcopy([part.state_dict() for part in (model, optimizer, scheduler)])
    step_both(model, optimizer, scheduler, range(5, 11))
    parts = start()
    for part, state in zip(parts, saved):
        part.load_state_dict(state)
    step_both(*parts, range(5, 11))
    assert_all_equal(parts[0].parameters(), model.parameters())
    assert settings(parts[1]) == settings(optimizer)
    assert torch.equal(parts[1].cpr.lagrange_multiplier, optimizer.cpr.lagrange_multiplier)


# Warnings about the order of the two steps


@each_pair
def test_optimizer_before_scheduler_does_not_warn(pair: str) -> None:
    optimizer = PAIRS[pair][0]([matrix_with_gradient()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = lr_scheduler.StepLR(optimizer, step_size=3)
        for _ in range(5):
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize("last_epoch", [-1, 10])
@each_pair
def test_scheduler_before_optimizer_warns(pair: str, last_epoch: int) -> None:
    group = {"params": [matrix_with_gradient()], "initial_lr": 0.1}
    optimizer = PAIRS[pair][0]([group])
    scheduler = lr_scheduler.StepLR(optimizer, step_size=3, last_epoch=last_epoch)
    with pytest.warns(UserWarning, match="how-to-adjust-learning-rate"):
        scheduler.step()


@each_pair
def test_overridden_step_warns(pair: str) -> None:
    optimizer = PAIRS[pair][0]([matrix_with_gradient()])
    scheduler = lr_scheduler.StepLR(optimizer, step_size=3)
    step = optimizer.step
    optimizer.step = types.MethodType(lambda self, *args: step(*args), optimizer)
    optimizer.step()
    with pytest.warns(UserWarning, match="`optimizer.step\\(\\)` has been overridden"):
        scheduler.step()


# References


def attached(optimizer_class: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    """Return a function that builds a torch optimizer with CPR attached."""

    def build(params: list[nn.Parameter]) -> Any:
        return CPR(params, kappa="ki0x0p9").attach(optimizer_class(params, **options))

    return build


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "AdamCPR": lambda params: AdamCPR(params, kappa="ki0x0p9"),
    "AdamCPR unfused": lambda params: AdamCPR(params, kappa="ki0x0p9", fused=False),
    "MuonCPR": lambda params: MuonCPR(params, kappa="ki0x0p9"),
    "SGDCPR": lambda params: SGDCPR(params, kappa="ki0x0p9"),
    "SGDCPR unfused": lambda params: SGDCPR(params, kappa="ki0x0p9", fused=False),
    "CPR on SGD": attached(torch.optim.SGD, lr=0.1, momentum=0.9),
    "CPR on AdamW": attached(torch.optim.AdamW, weight_decay=0),
    "CPR on fused Adam": attached(torch.optim.Adam, fused=True),
    "CPR on LBFGS": attached(torch.optim.LBFGS),
}

each_builder = pytest.mark.parametrize("builder", list(BUILDERS))


@pytest.fixture(scope="module", autouse=True)
def _frozen_modules() -> Iterator[None]:
    # A collection takes long while it looks at every object of torch and pytest.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@contextmanager
def collector_disabled() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def use(optimizer: Any, with_scheduler: bool = True) -> Any:
    """Step, schedule, save and load, and return a weak reference to the scheduler."""
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0) if with_scheduler else None
    for _ in range(2):
        optimizer.step(lambda: torch.zeros(()))
        if scheduler is not None:
            scheduler.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step(lambda: torch.zeros(()))
    repr(optimizer)
    return None if scheduler is None else weakref.ref(scheduler)


@pytest.mark.parametrize("is_used", [False, True], ids=["new", "used"])
@each_builder
def test_optimizer_has_no_cyclic_references(builder: str, is_used: bool) -> None:
    optimizer = BUILDERS[builder]([matrix_with_gradient(10, 2)])
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    del scheduler
    if is_used:
        use(optimizer)
    gc.collect()
    assert gc.get_referrers(optimizer) == []
    reference = weakref.ref(optimizer)
    del optimizer
    assert reference() is None
    assert gc.collect() == 0


@each_builder
def test_scheduler_is_freed_without_collector(builder: str) -> None:
    with collector_disabled():
        reference = use(BUILDERS[builder]([matrix_with_gradient(10, 2)]))
        assert reference() is None


@each_builder
def test_state_is_freed_without_collector(builder: str) -> None:
    p = matrix_with_gradient(10, 2)
    optimizer = BUILDERS[builder]([p])
    use(optimizer, with_scheduler=False)
    values = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
    tensors = [weakref.ref(value) for value in values if isinstance(value, torch.Tensor)]
    assert tensors or builder == "CPR on LBFGS"
    with collector_disabled():
        del optimizer, values
        assert all(tensor() is None for tensor in tensors)
