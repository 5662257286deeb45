"""Cost of the copies and background checkpoints of nnU-Net's 31 M parameters.

Run ``python -m benchmarks.checkpointing --help``.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.limits import CheckOption, Limit, check_limits
from benchmarks.measure import machine, require_device
from benchmarks.train_step import Iteration, set_environment
from nnunet_cpr._files import atomic_write

TRAINER = "nnUNetTrainerCPR_ki0x0p5_mu1en3"
STEPS = 250
"""Training steps of an epoch of nnU-Net; its 50 validation steps are not counted."""
LIMIT = 0.01
"""Largest accepted share of an epoch."""

app = typer.Typer(add_completion=False)


@dataclass
class Costs:
    """Measured times, each a median, in seconds.

    Attributes:
        step: training step.
        copy: copy of the state at the start of an epoch.
        write: checkpoint of the copy, as at SIGTERM, until it is on the disk.
        write_processor: processor time of this write.
        steps_of_a_write: number of training steps that cover a write.
        slowdown: additional time of these steps while a checkpoint is written in the background.
        file_bytes: size of the checkpoint.
    """

    step: float
    copy: float
    write: float
    write_processor: float
    steps_of_a_write: int
    slowdown: float
    file_bytes: int

    def share(self, interval: float, cost_of_a_write: float) -> float:
        """Return the cost of the copy and the writes relative to an epoch of :data:`STEPS` steps.

        Args:
            interval: save interval in seconds. An epoch has at most one write, and shorter epochs have
                at most two in an interval.
            cost_of_a_write: time in seconds that a write takes from the training.
        """
        epoch = STEPS * self.step
        writes = min(1.0, 2 * epoch / interval) if interval else 1.0
        return (self.copy + writes * cost_of_a_write) / epoch


def measure(device: str, edge: int, rounds: int) -> Costs:
    """Measure the costs on one batch of noise with two patches."""
    from nnunet_cpr.nnunet.checkpoint_writer import CheckpointWriter

    iteration = Iteration(TRAINER, device, edge)
    trainer: Any = iteration.trainer
    path = Path(trainer.output_folder) / "checkpoint_latest.pth"
    waiting = CheckpointWriter(path, math.inf, print)
    writing = CheckpointWriter(path, 0.0, print)

    def copy(writer: CheckpointWriter, epoch: int) -> float:
        """Return the seconds of a copy, after which ``writing`` begins to write it."""
        trainer.__dict__["checkpoint_writer"] = writer
        start = _now(device)
        writer.start_epoch(trainer.save_checkpoint, epoch)
        return _now(device) - start

    def run(steps: int) -> float:
        """Return the seconds of some training steps."""
        start = _now(device)
        for _ in range(steps):
            iteration.run()
        return _now(device) - start

    run(2)
    for writer in (waiting, writing):  # the first copies allocate the memory and are not written
        copy(writer, 0)
    copies, writes, processor = [], [], []
    for epoch in range(1, rounds + 1):
        copies.append(copy(waiting, epoch))
        start, start_processor = time.perf_counter(), time.thread_time()
        waiting.write()
        writes.append(time.perf_counter() - start)
        processor.append(time.thread_time() - start_processor)
    count = math.ceil(statistics.median(writes) / run(1))
    alone, together = [], []
    for epoch in range(1, rounds + 1):
        alone.append(run(count))
        copy(writing, epoch)
        together.append(run(count))
        writing.wait()
    return Costs(
        step=statistics.median(alone) / count,
        copy=statistics.median(copies),
        write=statistics.median(writes),
        write_processor=statistics.median(processor),
        steps_of_a_write=count,
        slowdown=statistics.median(b - a for a, b in zip(alone, together)),
        file_bytes=path.stat().st_size,
    )


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@app.command()
def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements of each.")] = 7,
    patch: Annotated[int, typer.Option(help="Side of the patch; 0: 64 on a CPU, 128 on a GPU.")] = 0,
    compiled: Annotated[bool, typer.Option(help="torch.compile the network, as nnU-Net does.")] = True,
    checks: CheckOption = False,
    output: Annotated[Path | None, typer.Option(help="Folder for checkpointing_<device>.json.")] = None,
) -> None:
    """Measure what the state's copy at the start of each epoch and its writing cost a training."""
    from nnunet_cpr.nnunet.checkpoint_writer import DEFAULT_SAVE_MINUTES

    console = Console(width=110)
    require_device(device)
    edge = patch or (64 if device == "cpu" else 128)
    machine_info = machine(device)
    console.print(", ".join(f"{key} {value}" for key, value in machine_info.items()))
    with tempfile.TemporaryDirectory() as folder:
        set_environment(Path(folder), compiled)
        with contextlib.redirect_stdout(io.StringIO()):
            costs = measure(device, edge, rounds)
    console.print(
        f"training step, 2 patches of {edge}^3: {costs.step:.3f} s, so {STEPS} take "
        f"{STEPS * costs.step:.0f} s\n"
        f"copy at the start of an epoch: {costs.copy:.3f} s\n"
        f"checkpoint at SIGTERM: {costs.write:.2f} s ({costs.write_processor:.2f} s of a processor), "
        f"{costs.file_bytes:,} bytes\n"
        f"slowdown of {costs.steps_of_a_write} steps by a background write: {costs.slowdown:+.3f} s"
    )
    # On a CPU the time of a step varies by more than a write costs; a training that uses all cores loses
    # at most the processor time of the write.
    cost = costs.write_processor if device == "cpu" else max(0.0, costs.slowdown)
    shares = {
        name: costs.share(interval, cost)
        for name, interval in (("every 10 minutes", 60 * DEFAULT_SAVE_MINUTES), ("every epoch", 0.0))
    }
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        document = {"machine": machine_info, "patch": edge, **asdict(costs), "shares": shares}
        file = output / f"checkpointing_{device}.json"
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")
        console.print(f"written: {file}", soft_wrap=True)
    limits = [
        (Limit(f"share of an epoch, saved {name}", LIMIT, text="{:.4%}".format), share)
        for name, share in shares.items()
    ]
    if not check_limits(limits, console) and checks:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
