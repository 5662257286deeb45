"""DTensors with other placements of gradients, and DTensors beside plain parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nnunet_cpr import SGDCPR, AdamCPR
from tests.helpers.crew import Crew

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "AdamCPR": (AdamCPR, {"kappa": "ws1000000"}),
    "AdamCPR unfused": (AdamCPR, {"kappa": "ws1000000", "fused": False}),
    "Adam": (torch.optim.Adam, {}),
    "SGDCPR": (SGDCPR, {"kappa": "ws1000000", "momentum": 0.9, "nesterov": False}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
}


def sequence_parallel(kind: str) -> tuple[list[torch.Tensor], Any]:
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
    build, options = KINDS[kind]
    optimizer = build(model.parameters(), lr=0.05, **options)
    for t in range(3):
        optimizer.zero_grad()
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(t))
        local = x.chunk(2, dim=1)[mesh.get_rank()].contiguous()
        model(local).square().sum().backward()
        assert any(
            isinstance(p.grad, DTensor) and p.grad.placements == (Partial(),) for p in model.parameters()
        )
        optimizer.step()
    backend = getattr(optimizer, "_backend", None)
    return [p.to_local().detach().clone() for p in model.parameters()], backend is None


@pytest.mark.parametrize(
    ("ours", "torchs"), [("AdamCPR", "Adam"), ("AdamCPR unfused", "Adam"), ("SGDCPR", "SGD")]
)
def test_partial_gradients_are_summed(two: Crew, ours: str, torchs: str) -> None:
    found, expected = two.run(sequence_parallel, ours), two.run(sequence_parallel, torchs)
    for (own, _), (theirs, _) in zip(found, expected):
        for p, q in zip(own, theirs):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    for rank in found:
        assert torch.equal(rank[0][0], found[0][0][0])  # the norm's weight is the same on both


def mixed(kind: str, regularizer: str) -> list[torch.Tensor]:
    """Train a DTensor beside a plain parameter in one group."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    a = nn.Parameter(distribute_tensor(torch.randn(4, 6, generator=generator), mesh, [Shard(0)]))
    b = nn.Parameter(torch.randn(5, 3, generator=generator))
    build, options = KINDS[kind]
    optimizer = build([a, b], lr=0.05, **{**options, "regularizer": regularizer})
    for _ in range(3):
        a.grad = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        b.grad = torch.ones(5, 3)
        optimizer.step()
    return [a.full_tensor().detach(), b.detach()]


@pytest.mark.parametrize("regularizer", ["l2", "l1"])
def test_dtensors_and_plain_parameters_share_a_group(two: Crew, regularizer: str) -> None:
    for kind in ("AdamCPR", "SGDCPR"):
        for values in two.run(mixed, kind, regularizer):
            generator = torch.Generator().manual_seed(0)
            plain = [nn.Parameter(torch.randn(s, generator=generator)) for s in ((4, 6), (5, 3))]
            build, options = KINDS[kind.removesuffix("CPR")]
            optimizer = build(plain, lr=0.05, **options)
            for _ in range(3):
                for p in plain:
                    p.grad = torch.ones_like(p)
                optimizer.step()
            for p, q in zip(values, plain):
                torch.testing.assert_close(p, q.detach(), rtol=1e-5, atol=1e-6)


def reused(fused: bool | None) -> int:
    """Return the number of fused steps out of three."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Replicate()]))
    optimizer = AdamCPR([p], lr=0.05, fused=fused)
    for _ in range(3):
        p.grad = distribute_tensor(torch.ones(4, 6), mesh, [Replicate()])
        optimizer.step()
    return 0 if optimizer._backend is None else optimizer._backend.reused_measures


def test_fused_false_applies_to_dtensors(two: Crew) -> None:
    assert two.run(reused, None) == [2, 2]
    assert two.run(reused, False) == [0, 0]
