"""Tasks by name. torchvision and the data are loaded when a task is set up."""

from __future__ import annotations

from nnunet_cpr.refusals import Refusal
from nnunet_cpr.vision.task import Task
from nnunet_cpr.vision.tasks.cifar10 import CIFAR10
from nnunet_cpr.vision.tasks.cifar100 import CIFAR100
from nnunet_cpr.vision.tasks.digits import DIGITS
from nnunet_cpr.vision.tasks.grokking import GROKKING
from nnunet_cpr.vision.tasks.text import TEXT

TASKS: dict[str, Task] = {task.name: task for task in (DIGITS, GROKKING, TEXT, CIFAR10, CIFAR100)}
"""All tasks by name."""


def find_task(name: str) -> Task:
    """Return the task of this name.

    Raises:
        Refusal: there is none.
    """
    if name not in TASKS:
        raise Refusal(f"unknown task {name!r}", f"choose from {', '.join(TASKS)}")
    return TASKS[name]
