"""Tasks by name. torchvision, timm and the data are loaded when a task is set up."""

from __future__ import annotations

from nnunet_cpr.vision.task import Task
from nnunet_cpr.vision.tasks.cifar100 import CIFAR100, CIFAR100_C
from nnunet_cpr.vision.tasks.digits import DIGITS
from nnunet_cpr.vision.tasks.grokking import GROKKING
from nnunet_cpr.vision.tasks.imagenet import CLIP_VIT_B32, DEIT_BASE, DEIT_SMALL

TASKS: dict[str, Task] = {
    task.name: task
    for task in (DIGITS, GROKKING, CIFAR100, CIFAR100_C, DEIT_SMALL, DEIT_BASE, CLIP_VIT_B32)
}
"""All tasks by name."""
