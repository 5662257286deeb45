"""DTensors with other placements of gradients, and DTensors beside plain parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nnunet_cpr import SGDCPR
from tests.cpr.distributed.crew import Crew


def sequence_parallel(build: Callable[..., Any]) -> list[torch.Tensor]:
    """Train with norms whose gradients are partial sums over processes."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)
    optimizer = build(model.parameters(), lr=0.05, momentum=0.9)
    for t in range(3):
        optimizer.zero_grad()
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(t))
        local = x.chunk(2, dim=1)[mesh.get_rank()].contiguous()
        model(local).square().sum().backward()
        assert any(
            isinstance(p.grad, DTensor) and p.grad.placements == (Partial(),) for p in model.parameters()
        )
        optimizer.step()
    return [p.to_local().detach().clone() for p in model.parameters()]


def test_partial_gradients_are_summed(two: Crew) -> None:
    ours = functools.partial(SGDCPR, kappa="ws1000000", nesterov=False)
    found = two.run(sequence_parallel, ours)
    torch.testing.assert_close(found, two.run(sequence_parallel, torch.optim.SGD), rtol=1e-5, atol=1e-6)
    for rank in found:
        assert torch.equal(rank[0], found[0][0])  # the norm's weight is the same on both
