"""CIFAR-10 in small: few images at 16 x 16 pixels and a small ResNet, for a CPU."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from nnunet_cpr.refusals import Refusal
from nnunet_cpr.vision.task import Pairs, Setup, Task
from nnunet_cpr.vision.tasks.in_memory import accuracy_on, cropped_batches, normalize

_TRAIN, _VALIDATION = 2000, 2000
"""Numbers of training images out of 50,000; few, so that regularization matters."""
_BATCH = 64
_SIZE = 16
_PADDING = 2
_CLASSES = 10
_WIDTHS = (16, 32, 64)

# Per channel over the training images, scaled to [0, 1].
_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.2470, 0.2435, 0.2616)


def _setup(data: Path | None, device: torch.device) -> Setup:
    if data is None:
        raise Refusal(
            "--data is missing: name the folder of CIFAR-10 as image files, with train/CLASS and "
            "test/CLASS"
        )
    # Every run has the same split: the seed changes the run, not the task.
    images, labels = (tensor.to(device) for tensor in _images(data / "train", _TRAIN + _VALIDATION))
    validation = images[_TRAIN:], labels[_TRAIN:]
    on_validation = accuracy_on(validation, normalize=_normalize)
    on_test = accuracy_on(_images(data / "test", None), normalize=_normalize)
    return Setup(
        _network(),
        cropped_batches((images[:_TRAIN], labels[:_TRAIN]), _BATCH, _PADDING, _normalize),
        lambda model: on_test(model) | {"validation_accuracy": on_validation(model)["accuracy"]},
    )


@functools.lru_cache(maxsize=2)  # the runs of a sweep share the images
def _images(folder: Path, count: int | None) -> Pairs:
    """Return images, uint8 ``[N, 16, 16, 3]``, and labels ``[N]``: all, or always the same ``count``."""
    from torchvision.datasets import ImageFolder

    def small(image: Image) -> np.ndarray:
        return np.array(image.convert("RGB").resize((_SIZE, _SIZE)))

    images = ImageFolder(str(folder), small)
    if len(images.classes) != _CLASSES or len(images) < (count or 1):
        raise Refusal(
            f"{folder}: expected {_CLASSES} folders of classes with at least {count or 1} images, got "
            f"{len(images.classes)} with {len(images)}"
        )
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count]
    pixels, labels = zip(*(images[i] for i in order.tolist()))
    return torch.from_numpy(np.stack(pixels)), torch.tensor(labels)


def _normalize(images: Tensor) -> Tensor:
    return normalize(images, _MEAN, _STD)


def _network() -> nn.Module:
    """Return a ResNet of torchvision's blocks, one for each width."""
    from torchvision.models.resnet import BasicBlock

    first = _WIDTHS[0]
    layers = [
        nn.Conv2d(3, first, 3, padding=1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        BasicBlock(first, first),
    ]
    for narrow, wide in itertools.pairwise(_WIDTHS):
        shortcut = nn.Sequential(nn.Conv2d(narrow, wide, 1, stride=2, bias=False), nn.BatchNorm2d(wide))
        layers.append(BasicBlock(narrow, wide, 2, shortcut))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_WIDTHS[-1], _CLASSES)]
    return nn.Sequential(*layers)


CIFAR10 = Task(
    name="cifar10",
    setup=_setup,
    steps=600,
    warmup=30,
    lr={"adam": 1e-2, "sgd": 0.1, "muon": 1e-2},
    final_lr=0.0,
    weight_decay={"adam": 0.1, "sgd": 5e-4, "muon": 0.1},
    epochs_between=20,
)
