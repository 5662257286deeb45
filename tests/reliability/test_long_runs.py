"""Memory of a long training."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch import nn

from nnunet_cpr import CPR, AdamCPR

STEPS = 1200
SKIPPED = 10  # every tenth step overflows


def footprint() -> tuple[int, int]:
    """Return the numbers of tensors and of Python's memory blocks."""
    gc.collect()
    tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    return tensors, sys.getallocatedblocks()


@pytest.mark.slow  # 4 seconds each
@pytest.mark.parametrize(
    "build",
    [
        lambda model: AdamCPR(model, 1e-2, kappa="ws100", adaptive=True),
        lambda model: CPR(model, kappa="ip10").attach(torch.optim.Adam(model.parameters(), 1e-2)),
    ],
    ids=["AdamCPR", "attached"],
)
def test_long_training_keeps_nothing(build) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1))
    optimizer = build(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=SKIPPED - 1)
    scaler.scale(torch.zeros(()))
    found = []
    for step in range(STEPS):
        for p in model.parameters():
            p.grad = torch.full_like(p, torch.inf if step % SKIPPED == 0 else 1e-3)
        scaler.step(optimizer)
        scaler.update()
        if step % (STEPS // 3) == 0:
            found.append(footprint())
    (_, _), (tensors, blocks), (tensors_later, blocks_later) = found
    assert tensors_later == tensors
    assert blocks_later - blocks < STEPS / 5  # a leak of one block a step has STEPS / 3
