"""Polynomial learning-rate schedule with warm-up, as in the paper's segmentation runs."""

from __future__ import annotations

from torch.optim import Optimizer


def warmup_poly(iteration: int, lr: float, warmup: int, total: int) -> float:
    """Return the learning rate of an iteration: linear warm-up, then polynomial decay to 0.

    Args:
        iteration: index of the iteration, starting at 0.
        lr: the highest learning rate, reached in the last iteration of the warm-up.
        warmup: number of warm-up iterations.
        total: number of iterations of the training.

    Example:
        >>> [warmup_poly(i, lr=0.1, warmup=2, total=4) for i in (0, 1, 2)]
        [0.05, 0.1, 0.1]
    """
    if iteration < warmup:
        return lr * (iteration + 1) / warmup
    return lr * (1 - (iteration - warmup) / (total - warmup)) ** 0.9


class WarmupPolyLRScheduler:
    """Learning-rate scheduler that sets :func:`warmup_poly` at every iteration.

    nnU-Net calls ``step(epoch)`` when an epoch starts. Steps that the gradient scaler skips are made up
    for there. It has no state to save, since trainings are resumed at the start of an epoch.
    """

    def __init__(
        self, optimizer: Optimizer, lr: float, warmup: int, epochs: int, iterations_per_epoch: int
    ) -> None:
        self.optimizer = optimizer
        self.lr = lr
        self.warmup = warmup
        self.total = epochs * iterations_per_epoch
        self.iterations_per_epoch = iterations_per_epoch
        self._next = 0

    def step(self, epoch: int) -> None:
        """Set the learning rate of the epoch's first iteration."""
        self._next = epoch * self.iterations_per_epoch
        self._set()

    def step_iteration(self) -> None:
        """Set the learning rate of the next iteration."""
        self._set()
        self._next += 1

    def _set(self) -> None:
        lr = warmup_poly(min(self._next, self.total - 1), self.lr, self.warmup, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
