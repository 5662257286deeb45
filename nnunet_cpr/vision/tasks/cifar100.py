"""CIFAR-100 with a ResNet-18, and CIFAR-100-C, its corrupted test images.

The settings are those of the paper's table on CIFAR-100.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nnunet_cpr.refusals import Refusal
from nnunet_cpr.vision.task import Metrics, Pairs, Setup, Task
from nnunet_cpr.vision.tasks.in_memory import accuracy_on, cropped_batches, normalize

CORRUPTIONS: tuple[str, ...] = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
"""Corruptions of the benchmark's mean; the other four of the archive are for development."""

_BATCH = 128
_CLASSES = 100
_PADDING = 4
_CORRUPTED = "CIFAR-100-C"  # folder of the published archive

# Per channel over the training images, scaled to [0, 1].
_MEAN = (0.5071, 0.4865, 0.4409)
_STD = (0.2673, 0.2564, 0.2762)


def _setup(data: Path | None, device: torch.device) -> Setup:
    if data is None:
        raise Refusal("--data is missing: name the folder of CIFAR-100, or one to download it to")
    train, test = _images(data, True, device), _images(data, False, device)
    corrupted = data / _CORRUPTED
    return Setup(
        model=_network(),
        batches=cropped_batches(train, _BATCH, _PADDING, _normalize),
        evaluate=accuracy_on(test, normalize=_normalize),
        evaluate_last=_accuracy_on_corrupted(corrupted) if corrupted.is_dir() else None,
    )


def _images(folder: Path, train: bool, device: torch.device) -> Pairs:
    """Return images, uint8 ``[N, 32, 32, 3]``, and labels ``[N]``, downloaded if they are missing."""
    from torchvision import datasets

    try:
        images = datasets.CIFAR100(folder, train, download=True)
    except RuntimeError as error:  # wrong checksum
        raise OSError(
            f"{folder}: {error}; delete what is damaged, or unpack {datasets.CIFAR100.url} there"
        ) from error
    pixels = torch.from_numpy(np.ascontiguousarray(images.data))
    return pixels.to(device), torch.tensor(images.targets, device=device)


def _normalize(images: Tensor) -> Tensor:
    return normalize(images, _MEAN, _STD)


def _accuracy_on_corrupted(folder: Path) -> Callable[[nn.Module], Metrics]:
    """Return a function that evaluates a model on the published format of CIFAR-100-C.

    The file of a corruption holds all test images at each of five severities, ``labels.npy`` their
    labels.
    """
    # The files are looked for before the first step, not after the last one.
    for name in (*CORRUPTIONS, "labels"):
        if not (folder / f"{name}.npy").is_file():
            raise FileNotFoundError(
                f"{folder / name}.npy does not exist; download CIFAR-100-C from "
                "https://zenodo.org/records/3555552"
            )

    def evaluate(model: nn.Module) -> Metrics:
        labels = torch.from_numpy(np.load(folder / "labels.npy").astype(np.int64))
        metrics = {}
        for name in CORRUPTIONS:
            images = torch.from_numpy(np.load(folder / f"{name}.npy"))
            on_images = accuracy_on((images, labels), normalize=_normalize)
            metrics[f"accuracy_{name}"] = on_images(model)["accuracy"]
        return metrics | {"corrupted_accuracy": float(np.mean(list(metrics.values())))}

    return evaluate


def _network() -> nn.Module:
    """Return torchvision's ResNet-18 without stride and pooling before the first block."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=_CLASSES)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    # torchvision initializes its own convolutions like this.
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


CIFAR100 = Task(
    name="cifar100",
    setup=_setup,
    steps=20_000,
    warmup=500,
    lr={"adam": 1e-3, "sgd": 0.1, "amos": 1e-3},
    betas=(0.9, 0.98),
    weight_decay={"adam": 0.1, "sgd": 5e-4},
)
