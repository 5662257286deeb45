"""Learning-rate schedules that are set at every iteration: a linear warm-up and one of three shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch.optim import Optimizer


@dataclass(eq=False, repr=False)
class IterationLRScheduler(ABC):
    """Base class of learning-rate schedulers that set the rate of every iteration.

    nnU-Net calls ``step(epoch)`` when an epoch starts. Steps that the gradient scaler skips are made up
    for there. It has no state to save, since trainings are resumed at the start of an epoch.

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
        self._next = 0

    @abstractmethod
    def share(self, iteration: int) -> float:
        """Return the learning rate after the warm-up as a share of the highest one."""

    def rate(self, iteration: int) -> float:
        """Return the learning rate of an iteration; the first one is 0."""
        if iteration < self.warmup:
            return self.lr * (iteration + 1) / self.warmup
        return self.lr * self.share(iteration)

    def step(self, epoch: int) -> None:
        """Set the learning rate of the epoch's first iteration."""
        self._next = epoch * self.iterations_per_epoch
        self._set()

    def step_iteration(self) -> None:
        """Set the learning rate of the next iteration."""
        self._set()
        self._next += 1

    def _set(self) -> None:
        rate = self.rate(min(self._next, self.total - 1))
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
