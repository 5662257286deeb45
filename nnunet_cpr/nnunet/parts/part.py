"""Base class of the parts of a training: the moments at which they do something."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Part:
    """Part of a training. All of its moments are empty here, in the order in which they come.

    A part refuses by a :class:`~nnunet_cpr.refusals.Refusal`, with which the training ends in one line.

    Args:
        trainer: nnU-Net's trainer.
        parts: all of its parts, a :class:`~nnunet_cpr.nnunet.parts.parts.Parts`.
    """

    def __init__(self, trainer: Any, parts: Any) -> None:
        self.trainer, self.parts = trainer, parts

    def before(self, arguments: dict[str, Any]) -> None:
        """Act before ``__init__`` of nnU-Net's trainer, with its arguments."""

    def begin(self) -> None:
        """Act after ``__init__``."""

    def initialized(self) -> None:
        """Act after the network, the optimizer and the schedule were built."""

    def check(self) -> None:
        """Refuse a training that is about to start, before nnU-Net does anything for it."""

    def start(self) -> None:
        """Act before the first epoch of this process."""

    def start_epoch(self) -> None:
        """Act before nnU-Net starts an epoch."""

    def start_iteration(self, iteration: int) -> None:
        """Act before an iteration of an epoch, counted from 0."""

    def end_epoch(self) -> None:
        """Act after the validation of an epoch, before nnU-Net counts it and saves."""

    def draw(self) -> None:
        """Act after nnU-Net has saved and drawn."""

    def end(self) -> None:
        """Act after the training."""

    def continue_as_begun(self, arguments: dict[str, Any]) -> None:
        """Take over how a training began from ``init_args`` of its checkpoint, before it is loaded."""

    def differences(self, checkpoint: dict[str, Any]) -> Iterator[str]:
        """Yield each difference between this training and that of a checkpoint."""
        yield from ()

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Load from a checkpoint what nnU-Net does not know of, after the rest."""

    @property
    def name(self) -> str:
        """Class name of the trainer."""
        return type(self.trainer).__name__

    def log(self, message: str) -> None:
        """Write a message to nnU-Net's log and to stdout."""
        self.trainer.print_to_log_file(message)

    def warn(self, message: str) -> None:
        """Write a message of rank 0 to the log and in one line to stderr."""
        warn(self.trainer, message)


def warn(trainer: Any, message: str) -> None:
    """Write a message of rank 0 to the log and in one line to stderr."""
    if getattr(trainer, "local_rank", 0) == 0:
        if hasattr(trainer, "log_file"):  # not yet, amid another trainer's __init__
            trainer.print_to_log_file(f"WARNING! {message}", also_print_to_console=False)
        print(f"nnunet-cpr: {message}", file=sys.stderr)


def unwrapped(network: Any) -> nn.Module:
    """Return a network without the wrappers of distributed training and ``torch.compile``."""
    if isinstance(network, DistributedDataParallel):
        network = network.module
    return getattr(network, "_orig_mod", network)
