"""Learning-rate schedules: nnU-Net's, and those that are set at every iteration.

The latter have a linear warm-up and one of three shapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from torch.optim import Optimizer

from nnunet_cpr.names.suffixes import Cooldown
from nnunet_cpr.nnunet.parts.part import Part


class Schedule(Part):
    """Learning-rate schedule of the name, if it has one.

    nnU-Net's own is set every epoch, that of the paper, with a learning-rate warm-up, every iteration.
    """

    def build(self, optimizer: Optimizer, lr: float) -> Any:
        """Return the schedule with a highest rate."""
        training = self.trainer.training
        length = training.warmup, training.epochs, training.iterations
        if isinstance(training.schedule, Cooldown):
            return CooldownLRScheduler(optimizer, lr, *length, training.schedule.percent)
        if training.schedule == "poly" and training.warmup:
            return WarmupPolyLRScheduler(optimizer, lr, *length)
        if training.schedule == "poly":
            return PolyLRScheduler(optimizer, lr, training.epochs)
        return ConstantLRScheduler(optimizer, lr, *length)

    def start_iteration(self, iteration: int) -> None:
        if isinstance(schedule := self.trainer.lr_scheduler, IterationLRScheduler):
            schedule.step(self.trainer.current_epoch, iteration)


@dataclass(eq=False, repr=False)
class IterationLRScheduler(ABC):
    """Base class of learning-rate schedulers that set the rate of every iteration.

    The rate follows from epoch and iteration alone, so that there is no state to save. nnU-Net calls
    ``step(epoch)`` when an epoch starts, :class:`Schedule` before each of its iterations.

    Args:
        optimizer: optimizer whose groups all get the rate.
        lr: the highest learning rate, reached in the last iteration of the warm-up.
        warmup: number of warm-up iterations.
        epochs: number of epochs of the training.
        iterations_per_epoch: number of iterations in each.
    """

    optimizer: Optimizer
    lr: float
    warmup: int
    epochs: int
    iterations_per_epoch: int

    def __post_init__(self) -> None:
        self.total = self.epochs * self.iterations_per_epoch

    @abstractmethod
    def share(self, iteration: int) -> float:
        """Return the learning rate after the warm-up as a share of the highest one."""

    def rate(self, iteration: int) -> float:
        """Return the learning rate of an iteration; the first one is 0."""
        if iteration < self.warmup:
            return self.lr * (iteration + 1) / self.warmup
        return self.lr * self.share(iteration)

    def step(self, epoch: int, iteration: int = 0) -> None:
        """Set the learning rate of an iteration of an epoch; after the last one it stays."""
        rate = self.rate(min(epoch * self.iterations_per_epoch + iteration, self.total - 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate


class WarmupPolyLRScheduler(IterationLRScheduler):
    """Polynomial decay to 0, as in the paper's segmentation runs.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        >>> schedule = WarmupPolyLRScheduler(optimizer, 0.1, warmup=2, epochs=1, iterations_per_epoch=4)
        >>> [schedule.rate(i) for i in (0, 1, 2)]
        [0.05, 0.1, 0.1]
    """

    def share(self, iteration: int) -> float:
        return (1 - (iteration - self.warmup) / (self.total - self.warmup)) ** 0.9


class ConstantLRScheduler(IterationLRScheduler):
    """The highest learning rate until the end, whenever that is."""

    def share(self, iteration: int) -> float:
        return 1.0


@dataclass(eq=False, repr=False)
class CooldownLRScheduler(IterationLRScheduler):
    """The highest learning rate, which falls linearly to 0 at the end of the training.

    Args:
        percent: share of the training in which it falls, above 0 and below 100.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        >>> schedule = CooldownLRScheduler(optimizer, 0.1, 0, 1, iterations_per_epoch=8, percent=50)
        >>> [round(schedule.rate(i), 3) for i in (3, 4, 5, 6, 7)]
        [0.1, 0.1, 0.075, 0.05, 0.025]
    """

    percent: float

    def share(self, iteration: int) -> float:
        return min(1.0, (self.total - iteration) / (self.total * self.percent / 100))
