"""Handwritten digits of scikit-learn: real data for a CPU, without a download."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from nnunet_cpr.vision.task import Setup, Task
from nnunet_cpr.vision.tasks.in_memory import accuracy_on, shuffled_batches

_TRAIN = 200
"""Number of training images out of 1,797; few, so that regularization matters."""
_BATCH = 50


def _setup(data: Path | None, device: torch.device) -> Setup:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16 - 0.5  # [N, 1, 8, 8] in [-0.5, 0.5]
    labels = torch.from_numpy(digits.target).long()
    # Every run has the same split: the seed changes the run, not the task.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:_TRAIN], order[_TRAIN:]
    return Setup(
        model=_network(),
        batches=shuffled_batches((images[train], labels[train]), _BATCH),
        evaluate=accuracy_on((images[test], labels[test]), size=512),
    )


def _network(width: int = 32) -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    return nn.Sequential(
        *block(1, width),
        *block(width, width),
        nn.MaxPool2d(2),
        *block(width, 2 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


DIGITS = Task(
    name="digits",
    setup=_setup,
    steps=400,
    warmup=20,
    lr={"adam": 1e-2, "sgd": 0.1, "muon": 1e-2, "amos": 1e-2},
    betas=(0.9, 0.98),
    weight_decay={"adam": 1e-2, "sgd": 1e-3},
    epochs_between=5,
)
