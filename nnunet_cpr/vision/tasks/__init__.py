"""Tasks by name. torchvision, timm and the data are loaded when a task is set up."""

from __future__ import annotations

from nnunet_cpr.vision.task import Task
from nnunet_cpr.vision.tasks.cifar10 import CIFAR10
from nnunet_cpr.vision.tasks.cifar100 import CIFAR100, CIFAR100_C
from nnunet_cpr.vision.tasks.digits import DIGITS
from nnunet_cpr.vision.tasks.grokking import GROKKING
from nnunet_cpr.vision.tasks.imagenet import CLIP_VIT_B32, DEIT_BASE, DEIT_SMALL
from nnunet_cpr.vision.tasks.text import TEXT

_SMALL = (DIGITS, GROKKING, CIFAR10, TEXT)
_PAPER = (CIFAR100, CIFAR100_C, DEIT_SMALL, DEIT_BASE, CLIP_VIT_B32)

TASKS: dict[str, Task] = {task.name: task for task in (*_SMALL, *_PAPER)}
"""All tasks by name."""
