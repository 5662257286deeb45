"""Whether long trainings, and their record, leak or slow down: ``python -m benchmarks.long_runs``."""

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

from benchmarks.bars import Bar, check
from benchmarks.measure import machine
from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaWS
from nnunet_cpr.nnunet.history import CSV_NAME, History
from nnunet_cpr.nnunet.progress_figure import FIGURE_NAME, draw_progress

WINDOW = 1000
"""Steps of the warm-up, and of each end whose times are compared."""
_OVERFLOW_EVERY = 10

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Case:
    """What takes the steps; with a GradScaler, every tenth of them overflows and is skipped.

    Only an explicit ``fused=True`` leaves that to the step.
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
    """What many steps of an optimizer have cost, those of its warm-up aside."""

    first: float
    """Median seconds, of the processor's time, of the first thousand steps."""
    last: float
    """Of the last thousand."""
    aged: float
    """Of a thousand more, taken in turn with those of a new optimizer."""
    new: float
    """Of the new one's, after its warm-up."""
    tensors: int
    """How many more live at the end than at the start, by the half in which they grew less."""
    blocks: int
    """The same for Python's small blocks of memory."""
    rss: int
    """The same for the bytes that the process has in memory."""

    def bars(self, name: str) -> list[tuple[Bar, float]]:
        """What leaks or slows down by the step does not keep these.

        A machine may become slower by itself between the first step and the last; hence the new one.
        """
        return [
            (Bar(f"{name}: aged / new", 1.1), self.aged / self.new),
            (Bar(f"{name}: last / first", 2.0), self.last / self.first),
            (Bar(f"{name}: tensors", 0, number="{:.0f}".format), self.tensors),
            (Bar(f"{name}: blocks", 150, number="{:.0f}".format), self.blocks),
            (Bar(f"{name}: MB", 4), self.rss / 1e6),
        ]


def training(case: Case) -> tuple[Optimizer, Callable[[], float]]:
    """A small network, and a step of its training that returns its optimizer's seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 1))
    params = list(model.parameters())
    targets = [2 * torch.randn_like(p) for p in params]
    optimizer = case.build(model)
    # Between two overflows it grows once, so that it stays where it is.
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=1.0, growth_interval=_OVERFLOW_EVERY - 1, enabled=case.scaled
    )
    scaler.scale(torch.zeros(()))  # from the first loss on it can be used
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
    """Take so many steps after the warm-up.

    Args:
        begin: a training, as the step that :func:`training` gives; another one at each call.
        steps: at least :data:`WINDOW`.
    """
    aged = begin()
    for _ in range(WINDOW):
        aged()
    times = np.zeros(steps)
    _footprint()  # its own first call leaves something behind
    footprints = [_footprint()]
    for half in np.array_split(np.arange(steps), 2):
        for i in half:
            times[i] = aged()
        footprints.append(_footprint())
    # A leak grows in both halves; what grows in one alone has come to rest, or has yet to.
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
    """Tensors, Python's blocks, bytes in memory."""
    gc.collect()
    tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    return tensors, sys.getallocatedblocks(), _rss()


def _rss() -> int:
    """Bytes in memory; 0 where the system does not say it in this way."""
    if not os.path.exists("/proc/self/statm"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Record:
    """What the record of a long training costs at its end."""

    csv_bytes: int
    figure_bytes: int
    epoch: float
    """Seconds of processor time that the last epoch's rows and picture take."""
    resuming: float
    rss: int
    """Bytes in memory more than before."""

    def bars(self) -> list[tuple[Bar, float]]:
        return [
            (Bar("cpr_history.csv, MB", 50), self.csv_bytes / 1e6),
            (Bar("cpr_progress.png, MB", 5), self.figure_bytes / 1e6),
            (Bar("record of the last epoch, s", 5), self.epoch),
            (Bar("resuming, s", 5), self.resuming),
            (Bar("record in memory, MB", 200), self.rss / 1e6),
        ]


def record(folder: Path, epochs: int = 1000, matrices: int = 300) -> Record:
    """Write and draw the record of a training whose epochs have one step each."""
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
    steps: Annotated[int, typer.Option(min=2 * WINDOW, help="Of every case.")] = 100_000,
    checks: Annotated[bool, typer.Option("--check", help="Exit with 1 if a bar is missed.")] = False,
) -> None:
    """Take many optimizer steps, and keep the record of 1,000 epochs with 300 matrices."""
    console = Console(width=110)
    unknown = set(case or []) - set(CASES)
    if unknown:
        raise typer.BadParameter(f"no case is named {unknown.pop()!r}; there are: {'; '.join(CASES)}")
    console.print(", ".join(f"{key} {value}" for key, value in machine("cpu").items()))
    bars: list[tuple[Bar, float]] = []
    for name in case or CASES:
        run = long_run(lambda: training(CASES[name])[1], steps)  # noqa: B023
        console.print(
            f"{name}: {steps:,} steps, from {1e6 * run.first:.1f} to {1e6 * run.last:.1f} us each, "
            f"{run.aged / run.new:.3f} times a new one's; {run.tensors:+} tensors, "
            f"{run.blocks:+} blocks, {run.rss / 1e6:+.1f} MB"
        )
        bars += run.bars(name)
    if not case:
        with TemporaryDirectory() as folder:
            bars += record(Path(folder)).bars()
    if not check(bars, console) and checks:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
