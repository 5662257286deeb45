"""Ask what Muon costs, for those who choose an optimizer: ``python -m benchmarks.muon_cost``.

Run ``python -m benchmarks.muon_cost --help``.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.limits import CheckOption, Limit, check_limits
from benchmarks.measure import (
    Timing,
    as_json,
    gpu_steps_in_turn,
    in_turn,
    machine,
    require_device,
)
from benchmarks.train_step import Iteration, ratio_with_the_rest_shared, set_environment
from nnunet_cpr import SGDCPR, MuonCPR
from nnunet_cpr.files import atomic_write
from nnunet_cpr.optimizers import Muon

SGD, MUON = "nnUNetTrainer", "nnUNetTrainerMuon"
TRAINERS = (SGD, MUON, "nnUNetTrainerMuonCPR_ki0x0p5_mu1en3")
BARS = {"cpu": 1.15, "cuda": 1.05}
"""Largest ratio of an iteration with Muon to one with nnU-Net's SGD."""
DTYPES = ("float32", "bfloat16")
BASE = "SGDCPR"

app = typer.Typer(add_completion=False)


@app.command()
def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Duration of each of the two parts.")] = 120.0,
    rounds: Annotated[int, typer.Option(min=2, help="Minimum number of measurements of each.")] = 5,
    patch: Annotated[int, typer.Option(help="Side of the patch; 0: 64 on a CPU, 128 on a GPU.")] = 0,
    compiled: Annotated[bool, typer.Option(help="torch.compile the network, as nnU-Net does.")] = True,
    checks: CheckOption = False,
    output: Annotated[Path | None, typer.Option(help="Folder for muon_cost_<device>.json.")] = None,
) -> None:
    """Time the optimizer step and the training iteration of nnU-Net's 31 M-parameter network."""
    console = Console(width=110)
    require_device(device)
    edge = patch or (64 if device == "cpu" else 128)
    if edge % 32 or edge < 64:
        raise typer.BadParameter(f"--patch: expected a multiple of 32, at least 64, got {edge}")
    machine_info = machine(device)
    console.print(", ".join(f"{key} {value}" for key, value in machine_info.items()))
    with tempfile.TemporaryDirectory() as folder:
        set_environment(Path(folder), compiled)
        iterations = {name: Iteration(name, device, edge) for name in TRAINERS}
        network = iterations[SGD].trainer.network
        measure = gpu_steps_in_turn if device == "cuda" else in_turn
        steps = measure(_steps(network, device), BASE, seconds, rounds)
        console.print(_table(f"One optimizer step, {device}", BASE, steps))
        trained = in_turn({n: i.run for n, i in iterations.items()}, SGD, seconds, rounds)
    console.print(_table(f"One iteration on 2 patches of {edge}^3, {device}", SGD, trained))
    shared = {n: ratio_with_the_rest_shared(iterations, trained, SGD, n) for n in TRAINERS[1:]}
    for name, ratio in shared.items():
        console.print(f"{name} / {SGD} with the same time for everything but the step: {ratio:.3f}")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        document = {
            **{"machine": machine_info, "device": device, "patch": edge},
            **{"steps": as_json(steps), "iterations": as_json(trained)},
            "ratio_with_the_rest_shared": shared,
        }
        file = output / f"muon_cost_{device}.json"
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")
        console.print(f"written: {file}", soft_wrap=True)
    limits = [
        (Limit(f"{name} / {SGD}, one iteration", BARS[device]), ratio) for name, ratio in shared.items()
    ]
    if checks and not check_limits(limits, console):
        raise typer.Exit(1)


def _steps(network: nn.Module, device: str) -> dict[str, Callable[[], Any]]:
    """Return the optimizer steps to time, on copies of the network's parameters with gradients."""
    actions: dict[str, Callable[[], Any]] = {}
    for name, build in _optimizers().items():
        actions[name] = _Step(network, build, device)
    return actions


def _optimizers() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    def timm(model: nn.Module) -> torch.optim.Optimizer:
        from timm.optim.muon import Muon as TimmMuon

        return TimmMuon(model.parameters(), lr=3e-3)

    built: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {BASE: lambda m: SGDCPR(m, 1e-2)}
    for dtype in DTYPES:
        built[f"Muon, {dtype}"] = lambda m, dtype=dtype: Muon(m, ns_dtype=dtype)  # type: ignore[misc]
    built["Muon, every kind"] = lambda m: Muon(m, adamw_for=())
    built["MuonCPR"] = lambda m: MuonCPR(m, kappa="ki0x0p5", mu=1e-3)
    built["timm's Muon, bfloat16"] = timm
    return built


class _Step:
    """Step of an optimizer on a copy of a network with fixed gradients."""

    def __init__(
        self, network: nn.Module, build: Callable[[nn.Module], torch.optim.Optimizer], device: str
    ) -> None:
        self.model = copy.deepcopy(getattr(network, "_orig_mod", network)).to(device)
        generator = torch.Generator(device).manual_seed(0)
        for p in self.model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, device=device) * 1e-3
        self.optimizer = build(self.model)

    def __call__(self) -> None:
        self.optimizer.step()


def _table(title: str, base: str, timings: dict[str, Timing]) -> Table:
    table = Table(title=title)
    table.add_column("")
    for heading in ("ms", "host ms", f"/ {base}", "quartiles", "rounds"):
        table.add_column(heading, justify="right")
    for name, t in timings.items():
        quartiles = f"{t.ratio_low:.3f} to {t.ratio_high:.3f}"
        host = "" if t.host_milliseconds is None else f"{t.host_milliseconds:.3g}"
        table.add_row(name, f"{t.milliseconds:.4g}", host, f"{t.ratio:.3f}", quartiles, str(t.rounds))
    return table


if __name__ == "__main__":
    app()
