"""Learning-rate schedule of the paper's vision runs."""

from __future__ import annotations

import math

from nnunet_cpr.vision.task import Task


def warmup_cosine(step: int, warmup: int, total: int, first: float = 0.0, final: float = 0.1) -> float:
    """Return the learning rate of a step as a multiple of the highest learning rate.

    The learning rate rises linearly during the warm-up and then follows a cosine.

    Args:
        step: index of the step, from 0.
        warmup: number of warm-up steps; the last one has the highest learning rate.
        total: number of steps of the run; the last one is just above ``final``.
        first: multiple at which the warm-up begins.
        final: multiple at which the cosine ends.

    Example:
        >>> [warmup_cosine(step, warmup=2, total=4) for step in range(4)]
        [0.5, 1.0, 1.0, 0.55]
    """
    if step < warmup:
        return first + (1 - first) * (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    return final + (1 - final) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def learning_rate(task: Task, lr: float, step: int, warmup: int, total: int) -> float:
    """Return the learning rate of a step of a run with highest learning rate ``lr``."""
    return lr * warmup_cosine(step, warmup, total, task.first_lr, task.final_lr)
