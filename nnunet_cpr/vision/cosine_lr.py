"""The learning-rate schedule of the paper's vision runs."""

from __future__ import annotations

import math

from nnunet_cpr.vision.task import Task


def warmup_cosine(step: int, warmup: int, total: int, first: float = 0.0, final: float = 0.1) -> float:
    """Learning rate of a step as a multiple of the highest: a linear warm-up, then half a cosine.

    Args:
        step: 0 for the first.
        warmup: steps of the warm-up; its last has the highest rate.
        total: steps of the training; the last one is just above ``final``.
        first: where the warm-up begins.
        final: where the cosine ends.
    """
    if step < warmup:
        return first + (1 - first) * (step + 1) / warmup
    done = (step - warmup) / (total - warmup)
    return final + (1 - final) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def learning_rate(task: Task, lr: float, step: int, warmup: int, total: int) -> float:
    """The learning rate of a step of a task's run."""
    return lr * warmup_cosine(step, warmup, total, task.first_lr, task.final_lr)
