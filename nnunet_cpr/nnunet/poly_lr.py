"""The learning-rate schedule of the paper's segmentation runs."""

from __future__ import annotations

from torch.optim import Optimizer

EXPONENT = 0.9


def warmup_poly(iteration: int, lr: float, warmup: int, total: int) -> float:
    """Learning rate of an iteration: a linear warm-up, then polynomial decay to 0.

    Args:
        iteration: 0 for the first optimizer step of the training.
        lr: the highest learning rate, reached at the warm-up's last iteration.
        warmup: iterations of the warm-up.
        total: iterations of the whole training.
    """
    if iteration < warmup:
        return lr * (iteration + 1) / warmup
    return lr * (1 - (iteration - warmup) / (total - warmup)) ** EXPONENT


class WarmupPolyLRScheduler:
    """Sets :func:`warmup_poly` at every iteration.

    nnU-Net calls ``step(epoch)`` when an epoch starts; the trainer calls ``step_iteration()`` before
    each iteration. There is no state: a resumed training starts an epoch like any other.
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
        """Start an epoch: its first iteration's learning rate is set."""
        self._next = epoch * self.iterations_per_epoch
        self._set()

    def step_iteration(self) -> None:
        """Set the learning rate of the iteration that comes now."""
        self._set()
        self._next += 1

    def _set(self) -> None:
        lr = warmup_poly(min(self._next, self.total - 1), self.lr, self.warmup, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]
