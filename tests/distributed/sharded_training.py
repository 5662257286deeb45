"""Small training on one process or on several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaKI0, KappaWS, MuonCPR

BATCH = 8


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
    kappa: str = "ws"
    adaptive: bool = False

    def build(self, model: nn.Module) -> tuple[torch.optim.Optimizer, CPR]:
        bounds: dict[str, Any] = {
            "ws": KappaWS(2), "ki0": KappaKI0(0.9), "ip": KappaIP(1), "never": KappaWS(10**6)
        }  # fmt: skip
        settings = {
            "kappa": bounds[self.kappa], "regularizer": self.regularizer, "adaptive": self.adaptive
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
    for step in steps:
        x, y = data(step)
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


def agree(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that numbers agree to a relative difference of 1e-6."""
    for key, value in expected.items():
        close = torch.allclose(found[key], value, rtol=1e-6, atol=1e-9)
        assert close, f"{key}: {found[key]} and not {value}"


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


def together(way: str, method: Method, steps: int) -> dict[str, Any]:
    """Train on all processes; return the results and the number of all-reduces."""
    model = WAYS[way](Net())
    optimizer, cpr = method.build(model)
    calls, inside = [], [False]
    all_reduce, step = dist.all_reduce, optimizer.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        if inside[0]:
            calls.append(args[0].shape)
        return all_reduce(*args, **kwargs)

    def counted_step() -> None:
        inside[0] = True
        step()
        inside[0] = False

    dist.all_reduce, optimizer.step = counted, counted_step  # type: ignore[assignment,method-assign]
    try:
        train(model, optimizer, range(steps), *part_of_the_batch(way))
    finally:
        dist.all_reduce = all_reduce
    result: dict[str, Any] = found(model, cpr)
    result["all-reduces"] = len(calls)
    return result


def fused_and_unfused(build: type, steps: int) -> tuple[list[Tensor], list[Tensor], int]:
    """Train in float32 with and without fused steps; return parameters and the number of reused sums.

    On one of four processes a matrix has no elements.
    """
    results = []
    for fused in (None, False):
        model = fsdp(Net().float())
        optimizer = build(model, lr=0.02, kappa=KappaKI0(0.9), mu=0.1, fused=fused)
        for step in range(steps):
            x, y = (values.float() for values in data(step))
            optimizer.zero_grad()
            (model(x) - 3 * y).square().mean().backward()
            optimizer.step()
        results.append([full(p) for p in model.parameters()])
        assert (optimizer._backend is None) == (fused is False)
        assert optimizer.cpr.lagrange_multiplier.max() > 0
        if fused is None:
            reused = optimizer._backend.reused_measures
    return *results, reused


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
