"""Ask what a CPR step costs beside others, for everyone: ``python -m benchmarks.step_time``."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import shapes as networks
from benchmarks.competitors import (
    ADAM,
    ADAM_METHODS,
    BASE,
    COMPETITORS,
    HALF_ACTIVE,
    IN_SWEEPS,
    ONE_FACTOR,
    SGD,
    SGD_METHODS,
)
from benchmarks.figure import draw
from benchmarks.limits import Limit, check_limits
from benchmarks.measure import Timing, as_json, free_bytes, machine, memory, require_device, step_times
from nnunet_cpr.files import atomic_write

CHECKED = "nnU-Net"  # network of the comparison methods, and of the limits on them and on memory
MAXIMA = ((1.30, 1.10), (1.40, 1.15))
"""Largest accepted ratio of a step on the CPU to torch's fused step, and the desired one, of AdamCPR and
of SGDCPR."""
GPU_MAXIMA = ((1.85, 1.05), (2.35, 1.05))
"""The same on a GPU, for AdamCPR and SGDCPR: of its own time, without that of the host."""
MANY_TENSORS = (1.30, 1.08)
"""The same for the largest number of tensors of the sweep."""
HOOK = {"AdamW fused + CPR hook": (1.80, 1.45), HALF_ACTIVE: (1.65, 1.30)}
"""The same for CPR attached to torch's fused AdamW, with all or half of the multipliers positive."""
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
    seconds: Annotated[float, typer.Option(help="Duration for each network and family.")] = 20.0,
    sweeps: Annotated[bool, typer.Option(help="Also sweep the size and the number of tensors.")] = True,
    checks: Annotated[
        bool, typer.Option("--check", help="All networks; exit with 1 if a limit is exceeded.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for step_time_<device>.json and .png.")
    ] = None,
) -> None:
    """Time the steps of all competitors in turn and compare them with torch's fused step.

    On a GPU, ms are its own time while the host is ahead of it, as in a training; host ms are the time
    until a step returns.
    """
    console = Console(width=120)
    unknown = set(network or []) - set(networks.NETWORKS)
    if unknown:
        known = ", ".join(networks.NETWORKS)
        raise typer.BadParameter(f"unknown network {unknown.pop()!r}; choose from {known}")
    require_device(device)

    machine_info = machine(device)
    console.print(", ".join(f"{key} {value}" for key, value in machine_info.items()))
    results: dict[str, Results] = {}
    for name in list(networks.NETWORKS) if checks else network or list(networks.NETWORKS):
        shapes = networks.build(name)
        results[name] = {}
        for family in BASE if name == CHECKED else (SGD, ADAM):
            results[name][family] = _family(shapes, family, device, seconds)
            gc.collect()
            title = f"{name}: {networks.elements(shapes) / 1e6:.1f} M parameters, {len(shapes)} tensors"
            console.print(_table(f"{title}, {device}", family, results[name][family]))
    swept = (
        {} if not sweeps or (network and not checks) else _sweep(device, seconds / 4, console, checks)
    )

    document = {
        "machine": machine_info,
        "device": device,
        "networks": {n: {f: as_json(t) for f, t in r.items()} for n, r in results.items()},
        "sweeps": {kind: {x: as_json(t) for x, t in r.items()} for kind, r in swept.items()},
    }
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        file = output / f"step_time_{device}.json"
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")
        draw(document, file.with_suffix(".png"))
        console.print(f"written: {file}, {file.with_suffix('.png')}", soft_wrap=True)
    if checks:
        limits = _limits(results[CHECKED], device) + (_ratios(results, swept) if device == "cpu" else [])
        if not check_limits(limits, console):
            raise typer.Exit(1)


def _family(shapes: networks.Shapes, family: str, device: str, seconds: float) -> dict[str, Timing]:
    competitors = [c for c in COMPETITORS if c.family == family or c.name == BASE[family]]
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


def _sweep(
    device: str, seconds: float, console: Console, checks: bool
) -> dict[str, dict[int, dict[str, Timing]]]:
    """Time steps for growing numbers of parameters and of tensors; for checks, only for most tensors."""
    swept: dict[str, dict[int, dict[str, Timing]]] = {"parameters": {}, "tensors": {}}
    cases = [("parameters", n, networks.uniform(n, _SWEPT_TENSORS)) for n in _SIZES]
    cases += [("tensors", n, networks.uniform(_SWEPT_SIZE, n)) for n in _COUNTS]
    for kind, n, shapes in cases[-1:] if checks else cases:
        timings: dict[str, Timing] = {}
        for family in (SGD, ADAM):
            competitors = [c for c in COMPETITORS if c.family == family and c.name in IN_SWEEPS]
            # Each competitor has parameters and up to two moments; the gradients are shared.
            words = (3 if family == ADAM else 2) * len(competitors) + 1
            if 4.4 * words * networks.elements(shapes) > 0.9 * free_bytes(device):
                console.print(f"{n:,} {kind}, {family}: skipped, too little memory")
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
    headings = (
        "ms",
        "host ms",
        f"/ {BASE[family]}",
        "quartiles",
        "rounds",
        "extra memory kept",
        "temporary",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, t in timings.items():
        table.add_row(
            name,
            f"{t.milliseconds:.3g}",
            "" if t.host_milliseconds is None else f"{t.host_milliseconds:.3g}",
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


def _limits(results: Results, device: str) -> list[tuple[Limit, float]]:
    adam, sgd = results[ADAM], results[SGD]
    shapes = networks.build(CHECKED)
    matrices = sum(len(shape) >= 2 for _, shape in shapes)
    largest = max(4 * torch.Size(shape).numel() for _, shape in shapes)
    maxima = {"cpu": MAXIMA, "cuda": GPU_MAXIMA}[device]
    limits = [
        (Limit(f"AdamCPR / {BASE[ADAM]}", *maxima[0]), adam["AdamCPR"].ratio),
        (Limit(f"SGDCPR / {BASE[SGD]}", *maxima[1]), sgd["SGDCPR"].ratio),
    ]
    if device == "cpu":
        limits += [
            # AWD needs the norm of the gradients, which are read once more.
            (
                Limit(f"{title} / {BASE[family]}", 1.7 if title == "AWD" else 1.3),
                results[family][title].ratio,
            )
            for family in (ADAM_METHODS, SGD_METHODS)
            for title in ONE_FACTOR
        ]
        fastest = min(adam[name].ratio for name in _AUTHORS)
        limits += [
            (Limit(f"SGDCPR / {_STOCK}", 0.60), sgd["SGDCPR"].ratio / sgd[_STOCK].ratio),
            (Limit("AdamCPR / the authors' AdamCPR", 0.40), adam["AdamCPR"].ratio / fastest),
        ]
    for name, timing in (("AdamCPR", adam["AdamCPR"]), ("SGDCPR", sgd["SGDCPR"])):
        temporary = timing.temporary_bytes or 0
        limits.append((Limit(f"{name}: temporary", largest, text=_bytes), temporary))
        if device == "cpu":  # the tables of a GPU are larger
            # Two floats and a double per matrix, three counters, and the table of tensors.
            limit = 16 * matrices + 24 + 64 * len(shapes) + 4
            limits.append((Limit(f"{name}: kept", limit, text=_bytes), timing.kept_bytes or 0))
    return limits


def _ratios(
    results: dict[str, Results], swept: dict[str, dict[int, dict[str, Timing]]]
) -> list[tuple[Limit, float]]:
    """Return the limits on steps on the CPU for all networks and for many tensors."""
    limits = []
    for (family, ours), maximum in zip(((ADAM, "AdamCPR"), (SGD, "SGDCPR")), MAXIMA):
        for name in results.keys() - {CHECKED}:
            title = f"{name}: {ours} / {BASE[family]}"
            limits.append((Limit(title, *maximum), results[name][family][ours].ratio))
        timings = swept["tensors"].get(_COUNTS[-1], {}) if swept else {}
        if ours in timings:
            title = f"{_COUNTS[-1]:,} tensors: {ours} / {BASE[family]}"
            limits.append((Limit(title, *MANY_TENSORS), timings[ours].ratio))
    limits += [
        (Limit(f"{name} / {BASE[ADAM]}", *maximum), results[CHECKED][ADAM][name].ratio)
        for name, maximum in HOOK.items()
    ]
    return limits


if __name__ == "__main__":
    app()
