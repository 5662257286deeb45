"""Leaks and slowdowns of long trainings and of their history: ``python -m benchmarks.long_runs``."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from benchmarks.limits import CheckOption, Limit, check_limits
from benchmarks.measure import machine
from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaWS
from nnunet_cpr.nnunet.history import CSV_NAME, History
from nnunet_cpr.nnunet.progress_figure import FIGURE_NAME, draw_progress

WINDOW = 1000
"""Number of steps before the measurement, and of each compared window."""
_OVERFLOW_EVERY = 10

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Case:
    """Optimizer to test; with ``scaled``, a GradScaler skips every tenth step.

    With ``fused=True`` the step itself skips instead.
    """

    build: Callable[[nn.Module], Optimizer]
    scaled: bool = False


def _attached(model: nn.Module, **settings: Any) -> Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0)
    return CPR(model, **settings).attach(optimizer)


CASES = {
    "SGDCPR": Case(lambda model: SGDCPR(model, 1e-3, momentum=0.9, kappa=KappaWS(100))),
    "AdamCPR": Case(lambda model: AdamCPR(model, 1e-2, kappa=KappaWS(100))),
    "CPR on AdamW": Case(lambda model: _attached(model, kappa=KappaWS(100))),
    "SGDCPR, Kappa-IP, GradScaler": Case(
        lambda model: SGDCPR(model, 1e-3, momentum=0.9, kappa=KappaIP(10), fused=True), scaled=True
    ),
    "AdamCPR, adaptive, GradScaler": Case(
        lambda model: AdamCPR(model, 1e-2, kappa=KappaWS(100), adaptive=True, fused=True),
        scaled=True,
    ),
    "CPR on AdamW, Kappa-IP, adaptive, GradScaler": Case(
        lambda model: _attached(model, kappa=KappaIP(10), adaptive=True), scaled=True
    ),
}


@dataclass
class LongRun:
    """Cost of many optimizer steps, without the first :data:`WINDOW`."""

    first: float
    """Median processor time of the first thousand steps, in seconds."""
    last: float
    """Median of the last thousand steps."""
    aged: float
    """Median of a thousand further steps, interleaved with those of a new optimizer."""
    new: float
    """Median of the steps of the new optimizer."""
    tensors: int
    """Growth of the number of live tensors, twice that of the half with the smaller growth."""
    blocks: int
    """Growth of the number of Python's allocated memory blocks."""
    rss: int
    """Growth of the resident memory in bytes."""

    def limits(self, name: str) -> list[tuple[Limit, float]]:
        """Return the limits, which a leak or a slowdown exceeds.

        The new optimizer separates a slowdown of the optimizer from one of the machine.
        """
        return [
            (Limit(f"{name}: aged / new", 1.1), self.aged / self.new),
            (Limit(f"{name}: last / first", 2.0), self.last / self.first),
            (Limit(f"{name}: tensors", 0, text="{:.0f}".format), self.tensors),
            # Caches of Python and torch add up to 350 in 20,000 steps, and nothing after 50,000.
            (Limit(f"{name}: blocks", 500, text="{:.0f}".format), self.blocks),
            (Limit(f"{name}: MB", 4), self.rss / 1e6),
        ]


def training(case: Case) -> tuple[Optimizer, Callable[[], float]]:
    """Return an optimizer of a small network, and a function that steps and returns the seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 1))
    params = list(model.parameters())
    targets = [2 * torch.randn_like(p) for p in params]
    optimizer = case.build(model)
    # The scale grows once between two overflows, so that it stays the same.
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=1.0, growth_interval=_OVERFLOW_EVERY - 1, enabled=case.scaled
    )
    scaler.scale(torch.zeros(()))  # initializes the scaler
    done = 0

    def step() -> float:
        nonlocal done
        done += 1
        gradients = torch._foreach_sub([p.detach() for p in params], targets)
        if case.scaled and done % _OVERFLOW_EVERY == 0:
            gradients[0].fill_(torch.inf)
        for p, gradient in zip(params, gradients):
            p.grad = gradient
        start = time.thread_time()
        scaler.step(optimizer)
        scaler.update()
        return time.thread_time() - start

    return optimizer, step


def long_run(begin: Callable[[], Callable[[], float]], steps: int) -> LongRun:
    """Measure a long training.

    Args:
        begin: function that starts a new training and returns the step of :func:`training`.
        steps: number of steps, at least :data:`WINDOW`.
    """
    aged = begin()
    for _ in range(WINDOW):
        aged()
    times = np.zeros(steps)
    _footprint()  # the first call allocates memory of its own
    footprints = [_footprint()]
    for half in np.array_split(np.arange(steps), 2):
        for i in half:
            times[i] = aged()
        footprints.append(_footprint())
    # A leak grows in both halves; growth in one half is temporary.
    tensors, blocks, rss = (2 * min(b - a, c - b) for a, b, c in zip(*footprints))
    new = begin()
    for _ in range(WINDOW):
        new()
    in_turn = np.median([(aged(), new()) for _ in range(WINDOW)], axis=0)
    return LongRun(
        first=float(np.median(times[:WINDOW])),
        last=float(np.median(times[-WINDOW:])),
        aged=float(in_turn[0]),
        new=float(in_turn[1]),
        tensors=tensors,
        blocks=blocks,
        rss=rss,
    )


def _footprint() -> tuple[int, int, int]:
    """Return the numbers of tensors, of Python's memory blocks and of resident bytes."""
    gc.collect()
    tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    return tensors, sys.getallocatedblocks(), _rss()


def _rss() -> int:
    """Return the resident memory in bytes; 0 without /proc."""
    if not os.path.exists("/proc/self/statm"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Record:
    """Cost of the history of a long training at its end."""

    csv_bytes: int
    figure_bytes: int
    epoch: float
    """Processor time of the last epoch's rows and figure, in seconds."""
    resuming: float
    rss: int
    """Growth of the resident memory in bytes."""

    def limits(self) -> list[tuple[Limit, float]]:
        return [
            (Limit("cpr_history.csv, MB", 50), self.csv_bytes / 1e6),
            (Limit("cpr_progress.png, MB", 5), self.figure_bytes / 1e6),
            (Limit("record of the last epoch, s", 5), self.epoch),
            (Limit("resuming, s", 5), self.resuming),
            (Limit("record in memory, MB", 200), self.rss / 1e6),
        ]


def record(folder: Path, epochs: int = 1000, matrices: int = 300) -> Record:
    """Write and draw the history of a training with one step per epoch."""
    names = [
        f"encoder.stages.{i // 40}.blocks.{i % 40}.conv2.all_modules.0.weight" for i in range(matrices)
    ]
    torch.manual_seed(0)
    params = [(name, nn.Parameter(torch.randn(2, 2))) for name in names]
    for _, p in params:
        p.grad = torch.randn(2, 2)
    optimizer = SGDCPR(params, lr=1e-3, kappa=KappaWS(3))
    history = History.resume(folder, 0, names)
    before = _rss()

    def epoch() -> None:
        optimizer.step()
        history.append(len(history.epochs), optimizer.cpr)

    for _ in range(epochs - 1):
        epoch()
    last = _seconds(epoch) + _seconds(lambda: draw_progress(history))
    resuming = _seconds(lambda: History.resume(folder, epochs, names))
    return Record(
        csv_bytes=(folder / CSV_NAME).stat().st_size,
        figure_bytes=(folder / FIGURE_NAME).stat().st_size,
        epoch=last,
        resuming=resuming,
        rss=_rss() - before,
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


@app.command()
def main(
    case: Annotated[
        list[str] | None, typer.Option(help="Only this case; may be given several times.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2 * WINDOW, help="Number of steps of each case.")] = 100_000,
    checks: CheckOption = False,
) -> None:
    """Measure many optimizer steps, and the history of 1,000 epochs with 300 matrices."""
    console = Console(width=110)
    unknown = set(case or []) - set(CASES)
    if unknown:
        raise typer.BadParameter(f"unknown case {unknown.pop()!r}; choose from {'; '.join(CASES)}")
    console.print(", ".join(f"{key} {value}" for key, value in machine("cpu").items()))
    limits: list[tuple[Limit, float]] = []
    for name in case or CASES:
        run = long_run(lambda: training(CASES[name])[1], steps)  # noqa: B023
        console.print(
            f"{name}: {steps:,} steps, from {1e6 * run.first:.1f} to {1e6 * run.last:.1f} us each, "
            f"{run.aged / run.new:.3f} times those of a new optimizer; {run.tensors:+} tensors, "
            f"{run.blocks:+} blocks, {run.rss / 1e6:+.1f} MB"
        )
        limits += run.limits(name)
    if not case:
        with TemporaryDirectory() as folder:
            limits += record(Path(folder)).limits()
    if not check_limits(limits, console) and checks:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
