"""Does the end of an epoch cost a nnU-Net user time? ``python -m benchmarks.epoch_overhead``."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.limits import CheckOption, Limit, check_limits
from benchmarks.measure import machine
from benchmarks.train_step import Iteration, set_environment
from nnunet_cpr.nnunet.base_trainer import parts_of

TRAINER = "nnUNetTrainerCPR_ws1"
AIM, MAXIMUM = 50.0, 75.0
"""Milliseconds: 0.5 % of epochs of 10 and 15 seconds."""

app = typer.Typer(add_completion=False)


class Epochs:
    """Ends of the epochs of a long training with nnU-Net's network of 31 M parameters.

    Args:
        epochs: number of epochs before the first measured one.
    """

    def __init__(self, epochs: int) -> None:
        from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

        trainer: Any = Iteration(TRAINER, "cpu", 64).trainer
        for parameter in trainer.network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(3):  # sets the bounds
            trainer.optimizer.step()

        start, nnUNetTrainer.on_train_start = nnUNetTrainer.on_train_start, lambda self: None
        try:
            trainer.on_train_start()
        finally:
            nnUNetTrainer.on_train_start = start
        trainer.num_epochs = 10 * epochs
        history = parts_of(trainer).progress.history
        assert history is not None
        history.append(0, trainer.cpr)
        for epoch in range(1, epochs):
            values = (getattr(history, name)[0] for name in ("measure", "kappa", "multiplier"))
            history.add(epoch, 250 * epoch, *values)
        for key, logged in trainer.logger.get_checkpoint().items():
            is_list = key == "dice_per_class_or_region"
            logged[:] = [2 * [np.float64(0.5)] if is_list else np.float32(0.5)] * epochs
        trainer.current_epoch = epochs
        self._trainer, self._parts = trainer, parts_of(trainer)

    def run(self) -> tuple[float, float]:
        """End an epoch and return the seconds of its metrics and history, and of the state's copy."""
        begin = time.perf_counter()
        self._parts.progress.end_epoch()
        recorded = time.perf_counter()
        self._parts.saves.keep_start_of_epoch()
        end = time.perf_counter()
        for logged in self._trainer.logger.get_checkpoint().values():
            del logged[self._trainer.current_epoch :]
        return recorded - begin, end - recorded

    def write(self) -> float:
        """Write the copy as at SIGTERM and return the seconds."""
        begin = time.perf_counter()
        self._parts.saves.policy.end()
        return time.perf_counter() - begin


@app.command()
def main(
    epochs: Annotated[int, typer.Option(min=10, help="Epochs before the first measured one.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="Number of measured epochs.")] = 10,
    checks: CheckOption = False,
) -> None:
    """Measure the time that the end of an epoch takes from the training, apart from the figures.

    Those take at most 0.5 % of it by their schedule.
    """
    console = Console(width=110)
    console.print(", ".join(f"{key} {value}" for key, value in machine("cpu").items()))
    table = Table(title=f"End of an epoch after {epochs} epochs, median of {repeats}, ms")
    for heading in ("metrics and history", "copy of the state", "sum", "checkpoint at SIGTERM"):
        table.add_column(heading, justify="right")
    with TemporaryDirectory() as folder:
        set_environment(Path(folder), compiled=False)
        with contextlib.redirect_stdout(io.StringIO()):
            ends = Epochs(epochs)
            ends.run()  # allocates the memory
            measured = [ends.run() for _ in range(repeats)]
            writing = 1e3 * ends.write()
    parts = [1e3 * statistics.median(part) for part in zip(*measured)]
    table.add_row(*(f"{value:.1f}" for value in (*parts, sum(parts), writing)))
    console.print(table)
    if not check_limits([(Limit("ms an epoch", MAXIMUM, AIM), sum(parts))], console) and checks:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
