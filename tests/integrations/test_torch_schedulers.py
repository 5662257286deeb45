"""torch's learning-rate schedulers and its checks of them on optimizers with CPR."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from nnunet_cpr import SGDCPR, AdamCPR, MuonCPR
from nnunet_cpr.optimizers import Muon
from tests.integrations.small_problems import (
    assert_all_equal,
    backward,
    matrix_with_gradient,
    small_model,
)

Scheduler = Any

SGD_DEFAULTS = {"momentum": 0.9, "nesterov": True}
PAIRS = {
    "AdamCPR": (AdamCPR, torch.optim.Adam, {}),
    "MuonCPR": (MuonCPR, Muon, {}),
    "SGDCPR": (SGDCPR, torch.optim.SGD, SGD_DEFAULTS),
}

SCHEDULERS: dict[str, Callable[[Optimizer], Scheduler]] = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=[lambda t: 0.9**t, lambda t: 1 / (1 + t)]),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda t: 0.95),
    "StepLR": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 5, 9], gamma=0.5),
    "ConstantLR": partial(lr_scheduler.ConstantLR, factor=0.5, total_iters=4),
    "LinearLR": partial(lr_scheduler.LinearLR, start_factor=0.25, total_iters=4),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=10, power=0.9),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=10, eta_min=1e-5),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "ReduceLROnPlateau": partial(ReduceLROnPlateau, factor=0.5, patience=1),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=1e-3, max_lr=1e-2, step_size_up=3),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=[1e-2, 2e-2], total_steps=15),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(opt, two_schedules(opt), milestones=[4]),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(two_schedules(opt)),
    "SWALR": partial(SWALR, swa_lr=1e-3, anneal_epochs=5),
}


def two_schedules(opt: Optimizer) -> list[Scheduler]:
    return [lr_scheduler.LinearLR(opt, 0.5, total_iters=4), lr_scheduler.ExponentialLR(opt, gamma=0.9)]


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


@pytest.mark.parametrize("name", list(SCHEDULERS))
@pytest.mark.parametrize(
    ("pair", "tensor_lr"), [("AdamCPR", False), ("MuonCPR", False), ("SGDCPR", True)]
)
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
def test_resumed_schedule_continues_identically(name: str) -> None:
    def start() -> tuple[nn.Sequential, Any, Scheduler]:
        model = small_model()
        optimizer = AdamCPR(groups_of(model), lr=0.01, kappa="ki0x0p9")
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
def test_only_scheduler_before_optimizer_warns(pair: str) -> None:
    optimizer = PAIRS[pair][0]([matrix_with_gradient()])
    scheduler = lr_scheduler.StepLR(optimizer, step_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    with pytest.warns(UserWarning, match="how-to-adjust-learning-rate"):
        lr_scheduler.StepLR(PAIRS[pair][0]([matrix_with_gradient()]), step_size=3).step()
