"""Cost of logging, recording and drawing an epoch: ``python -m benchmarks.epoch_overhead``."""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import time
from collections.abc import Callable
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

TRAINER = "nnUNetTrainerCPR_ws1"
MAXIMUM = 20.0
"""Milliseconds of the training process for metrics, history and drawing, without TensorBoard."""
_LOGGED = ("lrs", "mean_fg_dice", "val_losses", "epoch_start_timestamps", "epoch_end_timestamps")

app = typer.Typer(add_completion=False)


class Epochs:
    """Ends of the epochs of a long training with nnU-Net's network of 31 M parameters.

    Args:
        folder: folder for nnU-Net's results.
        epochs: number of epochs before the first measured one.
        tensorboard: also log to TensorBoard.
    """

    def __init__(self, folder: Path, epochs: int, tensorboard: bool) -> None:
        from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

        from nnunet_cpr.nnunet.figure_process import FigureProcess

        os.environ["nnUNet_tensorboard_enabled"] = "1" if tensorboard else "0"
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
        trainer.history.append(0, trainer.cpr)
        for epoch in range(1, epochs):
            values = (getattr(trainer.history, name)[0] for name in ("measure", "kappa", "multiplier"))
            trainer.history._add(epoch, 250 * epoch, *values)
        trainer.history._written = epochs  # their lines are not written again
        for key, logged in trainer.logger.get_checkpoint().items():
            is_list = key == "dice_per_class_or_region"
            logged[:] = [2 * [np.float64(0.5)] if is_list else np.float32(0.5)] * epochs
        trainer.current_epoch = epochs
        # Each measured epoch starts a process, as one every minute does in a training.
        self._figures = trainer.figures = FigureProcess(folder, self._fail, interval=0)
        trainer.logger.plot_progress_png = lambda _: self._figures.draw(trainer.logger.get_checkpoint())
        self._trainer = trainer

    @staticmethod
    def _fail(message: str) -> None:
        raise RuntimeError(message)

    def run(self, clock: Callable[[], float]) -> tuple[float, float]:
        """End an epoch and return the seconds of its metrics and history, and of drawing."""
        trainer, logger = self._trainer, self._trainer.logger
        begin = clock()
        trainer.on_train_epoch_end([{"loss": np.float32(0.5)}] * 250)
        recorded = clock()
        for key in _LOGGED:  # as nnU-Net does
            logger.log(key, np.float64(0.5), trainer.current_epoch)
        logger.log("dice_per_class_or_region", [np.float64(0.5)] * 2, trainer.current_epoch)
        logged = clock()
        logger.plot_progress_png(trainer.output_folder)
        end = clock()
        trainer.current_epoch += 1
        self._figures._wait(600)
        return recorded - begin, end - logged


@app.command()
def main(
    epochs: Annotated[int, typer.Option(min=10, help="Epochs before the first measured one.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="Number of measured epochs.")] = 10,
    checks: CheckOption = False,
) -> None:
    """Measure the processor time that the end of an epoch takes from the training process."""
    console = Console(width=110)
    console.print(", ".join(f"{key} {value}" for key, value in machine("cpu").items()))
    table = Table(
        title=f"End of an epoch after {epochs} epochs, median of {repeats}, ms of processor time"
    )
    for heading in ("", "metrics and history", "starting the drawing", "sum"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    total = {}
    with TemporaryDirectory() as folder:
        set_environment(Path(folder), compiled=False)
        for name, tensorboard in (("default", False), ("with TensorBoard", True)):
            with contextlib.redirect_stdout(io.StringIO()):
                ends = Epochs(Path(folder), epochs, tensorboard)
                measured = [ends.run(time.process_time) for _ in range(repeats)]
            parts = [1e3 * statistics.median(part) for part in zip(*measured)]
            total[name] = sum(parts)
            table.add_row(name, *(f"{value:.1f}" for value in (*parts, total[name])))
    console.print(table)
    if not check_limits([(Limit("ms an epoch", MAXIMUM), total["default"])], console) and checks:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
