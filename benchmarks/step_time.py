"""Optimizer steps with and without CPR, side by side: ``python -m benchmarks.step_time --help``."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import shapes as networks
from benchmarks.bars import Bar, check
from benchmarks.competitors import ADAM, BASE, COMPETITORS, IN_SWEEPS, SGD
from benchmarks.figure import draw
from benchmarks.measure import Timing, as_json, free_bytes, machine, memory, require_device, step_times
from nnunet_cpr._files import atomic_write

CHECKED = "nnU-Net"  # the network whose ratios have bars
_STOCK = "SGD as nnU-Net builds it"
_AUTHORS = ("pytorch-cpr AdamCPR, foreach", "pytorch-cpr AdamCPR, loop")
_SIZES = [10**6, 4 * 10**6, 16 * 10**6, 64 * 10**6, 256 * 10**6, 10**9]
_COUNTS = [10, 100, 1000, 10_000]
_SWEPT_TENSORS, _SWEPT_SIZE = 100, 32 * 10**6

app = typer.Typer(add_completion=False)
Results = dict[str, dict[str, Timing]]


@app.command()
def main(
    network: Annotated[
        list[str] | None, typer.Option(help="Only this network; may be given several times.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="For each network and family.")] = 20.0,
    sweeps: Annotated[bool, typer.Option(help="Also sweep the size and the number of tensors.")] = True,
    checks: Annotated[
        bool, typer.Option("--check", help=f"Only {CHECKED}; exit with 1 if a bar is missed.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for step_time_<device>.json and .png.")
    ] = None,
) -> None:
    """Time the steps of all competitors in turn and compare them with torch's fused step."""
    console = Console(width=110)
    unknown = set(network or []) - set(networks.NETWORKS)
    if unknown:
        known = ", ".join(networks.NETWORKS)
        raise typer.BadParameter(f"no network is named {unknown.pop()!r}; there are {known}")
    require_device(device)

    found = machine(device)
    console.print(", ".join(f"{key} {value}" for key, value in found.items()))
    results: dict[str, Results] = {}
    for name in [CHECKED] if checks else network or list(networks.NETWORKS):
        shapes = networks.build(name)
        results[name] = {}
        for family in (SGD, ADAM):
            results[name][family] = _family(shapes, family, device, seconds)
            gc.collect()
            title = f"{name}: {networks.elements(shapes) / 1e6:.1f} M parameters, {len(shapes)} tensors"
            console.print(_table(f"{title}, {device}", family, results[name][family]))
    swept = {} if checks or not sweeps or network else _sweep(device, seconds / 4, console)

    document = {
        "machine": found,
        "device": device,
        "networks": {n: {f: as_json(t) for f, t in r.items()} for n, r in results.items()},
        "sweeps": {kind: {x: as_json(t) for x, t in r.items()} for kind, r in swept.items()},
    }
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        file = output / f"step_time_{device}.json"
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")
        with atomic_write(file.with_suffix(".png")) as temporary:
            draw(document, temporary)
        console.print(f"to look at: {file}, {file.with_suffix('.png')}", soft_wrap=True)
    if checks and not check(_bars(results[CHECKED], device), console):
        raise typer.Exit(1)


def _family(shapes: networks.Shapes, family: str, device: str, seconds: float) -> dict[str, Timing]:
    competitors = [c for c in COMPETITORS if c.family == family]
    timings = step_times(competitors, BASE[family], shapes, device, seconds, least=7)
    gc.collect()
    kept = {}
    for competitor in competitors:
        kept[competitor.name], timings[competitor.name].temporary_bytes = memory(
            competitor, shapes, device
        )
    for name, timing in timings.items():
        timing.kept_bytes = kept[name] - kept[BASE[family]]
    return timings


def _sweep(device: str, seconds: float, console: Console) -> dict[str, dict[int, dict[str, Timing]]]:
    """How the cost grows: with the number of parameters, and with the number of tensors."""
    swept: dict[str, dict[int, dict[str, Timing]]] = {"parameters": {}, "tensors": {}}
    cases = [("parameters", n, networks.uniform(n, _SWEPT_TENSORS)) for n in _SIZES]
    cases += [("tensors", n, networks.uniform(_SWEPT_SIZE, n)) for n in _COUNTS]
    for kind, n, shapes in cases:
        timings: dict[str, Timing] = {}
        for family in (SGD, ADAM):
            competitors = [c for c in COMPETITORS if c.family == family and c.name in IN_SWEEPS]
            # Parameters and up to two moments for each competitor, one set of gradients.
            words = (3 if family == ADAM else 2) * len(competitors) + 1
            if 4.4 * words * networks.elements(shapes) > 0.9 * free_bytes(device):
                console.print(f"{n:,} {kind}, {family}: left out, the memory does not hold it")
                continue
            timings |= step_times(competitors, BASE[family], shapes, device, seconds, least=5)
            gc.collect()
        if timings:
            swept[kind][n] = timings
            ratios = ", ".join(f"{name} {t.ratio:.2f}" for name, t in timings.items())
            console.print(f"{n:,} {kind}: {ratios}")
    return swept


def _table(title: str, family: str, timings: dict[str, Timing]) -> Table:
    table = Table(title=title)
    table.add_column("optimizer step")
    for heading in ("ms", f"/ {BASE[family]}", "quartiles", "rounds", "kept beyond it", "temporary"):
        table.add_column(heading, justify="right")
    for name, t in timings.items():
        table.add_row(
            name,
            f"{t.milliseconds:.3g}",
            f"{t.ratio:.2f}",
            f"{t.ratio_low:.2f} to {t.ratio_high:.2f}",
            str(t.rounds),
            _bytes(t.kept_bytes or 0),
            _bytes(t.temporary_bytes or 0),
        )
    return table


def _bytes(n: float) -> str:
    for unit in ("B", "KB", "MB"):
        if abs(n) < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def _bars(results: Results, device: str) -> list[tuple[Bar, float]]:
    adam, sgd = results[ADAM], results[SGD]
    shapes = networks.build(CHECKED)
    matrices = sum(len(shape) >= 2 for _, shape in shapes)
    largest = max(4 * torch.Size(shape).numel() for _, shape in shapes)
    limits: dict[str, Any] = {
        "cpu": {"AdamCPR": (1.22, 1.15), "SGDCPR": (1.75, 1.5)},
        "cuda": {"AdamCPR": (1.05, 1.0), "SGDCPR": (1.05, 1.0)},
    }[device]
    bars = [
        (Bar(f"AdamCPR / {BASE[ADAM]}", *limits["AdamCPR"]), adam["AdamCPR"].ratio),
        (Bar(f"SGDCPR / {BASE[SGD]}", *limits["SGDCPR"]), sgd["SGDCPR"].ratio),
    ]
    if device == "cpu":
        fastest = min(adam[name].ratio for name in _AUTHORS)
        bars += [
            (Bar(f"SGDCPR / {_STOCK}", 0.60), sgd["SGDCPR"].ratio / sgd[_STOCK].ratio),
            (Bar("AdamCPR / the authors' AdamCPR", 0.40), adam["AdamCPR"].ratio / fastest),
        ]
    for name, timing in (("AdamCPR", adam["AdamCPR"]), ("SGDCPR", sgd["SGDCPR"])):
        temporary = timing.temporary_bytes or 0
        bars.append((Bar(f"{name}: temporary", largest, number=_bytes), temporary))
        if device == "cpu":  # a GPU has larger tables
            # Three floats a matrix, three counts for all, and where each tensor is.
            limit = 12 * matrices + 24 + 64 * len(shapes) + 4
            bars.append((Bar(f"{name}: kept", limit, number=_bytes), timing.kept_bytes or 0))
    return bars


if __name__ == "__main__":
    app()
