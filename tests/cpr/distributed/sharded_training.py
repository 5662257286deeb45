"""Small training on one process or on several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nnunet_cpr import CPR, SGDCPR, AdamCPR, MuonCPR

BATCH = 8
agree = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-9)


class Net(nn.Module):
    """Model whose numbers of rows are not divisible by the number of processes, one less than it.

    In float64, so that it is the sharding that a comparison sees and not the rounding of gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(10, 16)
        self.second = nn.Linear(16, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.third = nn.Linear(7, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.third(torch.tanh(self.norm(x)))


@dataclass(frozen=True)
class Method:
    """Return an optimizer with CPR whose multipliers rise within a few steps."""

    optimizer: str = "SGDCPR"
    regularizer: str = "l2"
    kappa: str = "ws2"
    adaptive: bool = False

    def build(self, model: nn.Module) -> tuple[torch.optim.Optimizer, CPR]:
        settings: dict[str, Any] = {
            "kappa": self.kappa, "regularizer": self.regularizer, "adaptive": self.adaptive
        }  # fmt: skip
        if self.optimizer == "Adam":
            theirs = torch.optim.Adam(model.parameters(), lr=0.02)
            cpr = CPR(model, **settings)
            return cpr.attach(theirs), cpr
        # Newton-Schulz amplifies the rounding errors that differ between one process and several.
        ours = {
            "SGDCPR": lambda: SGDCPR(model, lr=0.05, momentum=0.9, **settings),
            "AdamCPR": lambda: AdamCPR(model, lr=0.02, **settings),
            "MuonCPR": lambda: MuonCPR(model, lr=0.02, adamw_for=(), ns_dtype="float64", **settings),
        }[self.optimizer]()
        return ours, ours.cpr


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, 10, generator=generator, dtype=torch.float64)
    return x, torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    rank: int = 0,
    size: int = 1,
) -> None:
    """Take steps on this process's part of the batches with these numbers."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        x, y = (values.to(dtype) for values in data(step))
        part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        optimizer.zero_grad()
        # Growing targets make the weights grow.
        loss = (model(x[part]) - 3 * y[part]).square().mean()
        loss.backward()
        optimizer.step()


def full(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def found(model: nn.Module, cpr: CPR) -> dict[str, Tensor]:
    """Return parameters, bounds, multipliers and separately computed regularization values."""
    parameters = {f"parameter {name}": full(p) for name, p in model.named_parameters()}
    state = {f"state {key}": value.clone() for key, value in cpr.state_dict()["state"].items()}
    return {**parameters, **state, "measure": cpr.measure}


def alone(method: Method, steps: int) -> dict[str, Tensor]:
    model = Net()
    optimizer, cpr = method.build(model)
    train(model, optimizer, range(steps))
    return found(model, cpr)


# Ways to spread a model over processes


def fsdp(model: Net) -> Net:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.second, model.third):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hybrid(model: Net) -> Net:
    """Return a mesh of two copies, each sharded over half of the processes."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard"))
    return fully_shard(model, mesh=mesh)


def fsdp_and_tensor_parallel(model: Net) -> Net:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


WAYS: dict[str, Callable[[Net], Net]] = {
    way.__name__: way for way in (fsdp, hybrid, fsdp_and_tensor_parallel)
}


def part_of_the_batch(way: str) -> tuple[int, int]:
    """Return the data-parallel rank and size of this process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if way == "fsdp_and_tensor_parallel":
        return rank // (size // 2), 2
    return rank, size


def together(way: str, method: Method, steps: int) -> tuple[dict[str, Tensor], int]:
    """Train on all processes; return the results and the number of all-reduces of optimizer steps."""
    model = WAYS[way](Net())
    optimizer, cpr = method.build(model)
    step, counts = optimizer.step, []

    def counted_step() -> None:
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            step()
        counts.append(all_reduce.call_count)

    optimizer.step = counted_step  # type: ignore[method-assign,assignment]
    train(model, optimizer, range(steps), *part_of_the_batch(way))
    return found(model, cpr), sum(counts)


def fused_and_unfused(build: type, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Train in float32 with and without fused steps; return the parameters.

    On one of four processes a matrix has no elements.
    """
    results = []
    for fused in (None, False):
        model = fsdp(Net().float())
        optimizer = build(model, lr=0.02, kappa="ki0x0p9", mu=0.1, fused=fused)
        if fused is None:
            optimizer._take_torchs_step = None
        train(model, optimizer, range(steps))
        results.append([full(p) for p in model.parameters()])
        assert optimizer.cpr.lagrange_multiplier.max() > 0
    return results[0], results[1]


# Beside training


def save_sharded(folder: str, method: Method, steps: int) -> None:
    model = fsdp(Net())
    optimizer, _ = method.build(model)
    train(model, optimizer, range(steps), *part_of_the_batch("fsdp"))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_sharded_and_go_on(
    folder: str, way: str | None, method: Method, steps: range
) -> dict[str, Tensor]:
    model = Net() if way is None else WAYS[way](Net())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)  # all has to come from the file
    optimizer, cpr = method.build(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert cpr.step_count == 0, "asking for a state is no step"
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert not any("cpr" in group for group in optimizer.param_groups)
    train(model, optimizer, steps, *((0, 1) if way is None else part_of_the_batch(way)))
    return found(model, cpr)
