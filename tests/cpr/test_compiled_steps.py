"""Steps inside ``torch.compile``, which run uncompiled."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nnunet_cpr import CPR, SGDCPR, AdamCPR, MuonCPR
from nnunet_cpr.baselines import CautiousDecay
from nnunet_cpr.optimizers import FusedAdam, FusedSGD, Muon


class Subclass(MuonCPR):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


BUILDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGDCPR": functools.partial(SGDCPR, kappa="ki0x0p9"),
    "AdamCPR": functools.partial(AdamCPR, kappa="ki0x0p9"),
    "MuonCPR": functools.partial(MuonCPR, kappa="ki0x0p9"),
    "subclass": functools.partial(Subclass, kappa="ki0x0p9"),
    "Muon": Muon,
    "FusedSGD": functools.partial(FusedSGD, momentum=0.9),
    "FusedAdam": FusedAdam,
    "CPR on SGD": lambda m: CPR(m, "ki0x0p9").attach(torch.optim.SGD(m.parameters())),
    "CautiousDecay on Muon": lambda m: CautiousDecay(m).attach(Muon(m)),
}


@pytest.mark.parametrize("whole", [False, True], ids=["step", "train step"])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_compiled_steps_are_the_eager_ones(
    build: Callable[[nn.Module], torch.optim.Optimizer], whole: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    images = torch.randn(8, 4)
    results = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        optimizer = build(own)
        compiled = torch.compile(backend="eager") if is_compiled else lambda function: function
        step = optimizer.step if whole else compiled(optimizer.step)

        def train_step(own: nn.Module = own, step: Any = step) -> None:
            own.zero_grad()
            own(images).square().sum().backward()
            step()

        train = compiled(train_step) if whole else train_step
        for _ in range(3):
            train()
        results.append(own.state_dict())
    torch.testing.assert_close(*results, rtol=0, atol=0)
