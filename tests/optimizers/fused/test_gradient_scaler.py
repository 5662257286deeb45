"""Steps under ``GradScaler`` in nnU-Net's order: unscale, clip, step. On the CPU, as on a GPU.

An optimizer with ``fused=True`` skips overflows by itself. ``GradScaler`` then reads nothing on the
host, for which a GPU would have to finish the backward pass first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nnunet_cpr import CPR, SGDCPR, AdamCPR
from nnunet_cpr.integrations import from_timm
from nnunet_cpr.nnunet.parts.average import AveragedWeights
from nnunet_cpr.optimizers import FusedAdam, FusedSGD
from tests.helpers.baseline_kinds import KINDS
from tests.helpers.resume_cases import differences

STEPS = 12
OVERFLOWS = [(), (0,), (0, 1, 5), (3, 4)]


def with_method(kind: str, build: Callable[..., Any], model: torch.nn.Module) -> Any:
    return KINDS[kind](model).attach(build(model.parameters(), 0.05, fused=True))


def attached(build: Callable[..., Any], model: torch.nn.Module) -> Any:
    return CPR(model, kappa="ws3", mu=0.5).attach(build(model.parameters(), 0.05, fused=True))


def timm(name: str, model: torch.nn.Module) -> Any:
    return from_timm.build(model.parameters(), name, 0.05, fused=True)


SGD = partial(FusedSGD, momentum=0.9, nesterov=True)
BUILDS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "SGDCPR": lambda model: SGDCPR(model, 0.05, kappa="ws3", mu=0.5, fused=True),
    "SGDCPR std": lambda m: SGDCPR(m, 0.05, kappa="ws3", regularizer="std", mu=0.5, fused=True),
    "AdamCPR": lambda model: AdamCPR(model, 0.05, kappa="ip1", mu=0.5, fused=True),
    "AdamCPR adaptive": lambda m: AdamCPR(m, 0.05, kappa="ws3", mu=0.5, adaptive=True, fused=True),
    "SGD": lambda model: SGD(model.parameters(), 0.05, weight_decay=1e-2, fused=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 0.05, fused=True),
    "AdamW + CPR": partial(attached, partial(torch.optim.AdamW, weight_decay=0)),
    "timm's AdamW": partial(timm, "adamw"),
    **{f"SGD + {kind}": partial(with_method, kind, SGD) for kind in KINDS},
    **{f"Adam + {kind}": partial(with_method, kind, FusedAdam) for kind in KINDS},
}


class HostReads(TorchDispatchMode):
    """Count of the values that are read from tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def train(build: Callable[..., Any], overflows: tuple[int, ...], leaves_out: bool) -> tuple[list, int]:
    """Train, and return weights, averages, state and the number of host reads.

    Args:
        build: makes the optimizer.
        overflows: iterations with a gradient that is not finite.
        leaves_out: leave these out, in place of a step that is skipped.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    optimizer = build(model)
    averaged = AveragedWeights(model, 0.5)

    def average(stepped: Any, *_: Any) -> None:
        found_inf = getattr(stepped, "found_inf", None)
        averaged.update(model, None if found_inf is None else found_inf == 0)

    optimizer.register_step_post_hook(average)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    reads, taken = HostReads(), 0
    for t in range(STEPS):
        if leaves_out and t in overflows:
            continue
        for group in optimizer.param_groups:  # warm-up
            group["lr"] = 0.05 * min(1, (taken + 1) / 4)
        taken += t not in overflows
        optimizer.zero_grad()
        data = torch.randn(4, 6, generator=torch.Generator().manual_seed(t))
        scaler.scale(model(data).square().mean()).backward()
        if t in overflows:
            model[0].weight.grad[0, 0] = float("inf")
        with reads:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 12)
            scaler.step(optimizer)
            scaler.update()
    state = optimizer.state_dict()
    regularization = state.get("cpr", state.get("baseline", {"state": {}}))["state"]
    moments = [value for own in state["state"].values() for value in own.values()]
    values = [*model.parameters(), averaged.steps, moments, *averaged.network.parameters()]
    return [*values, regularization], reads.count


@pytest.mark.parametrize("overflows", OVERFLOWS, ids=str)
@pytest.mark.parametrize("name", BUILDS)
def test_skipped_step_changes_nothing_and_nothing_is_read(name: str, overflows: tuple[int, ...]) -> None:
    found, reads = train(BUILDS[name], overflows, leaves_out=False)
    expected, _ = train(BUILDS[name], overflows, leaves_out=True)
    assert reads == 0
    assert not differences(found, expected)
    assert all(p.isfinite().all() for p in found[:4])


def test_state_of_an_unfused_optimizer_does_not_switch_the_skipping_off() -> None:
    """The flag of which ``GradScaler`` knows and the steps must agree after a load."""
    for build in (SGDCPR, AdamCPR, partial(SGDCPR, regularizer="l1")):
        model = torch.nn.Linear(4, 2)
        saved = build(torch.nn.Linear(4, 2), fused=False)
        saved.param_groups[0]["params"][0].grad = torch.ones(2, 4)
        saved.step()
        loaded = build(model, fused=True)
        loaded.load_state_dict(saved.state_dict())
        assert [group["fused"] for group in loaded.param_groups] == [True]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        with HostReads() as reads:
            scaler.step(loaded)
        assert reads.count == 0 and loaded.cpr.step_count == 2
