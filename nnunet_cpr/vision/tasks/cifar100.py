"""CIFAR-100 with a ResNet-18, and CIFAR-100-C, its corrupted test images.

The settings are those of the paper's table on CIFAR-100.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nnunet_cpr.vision.task import CannotTrain, Options, Setup, Task
from nnunet_cpr.vision.tasks.in_memory import (
    Pairs,
    accuracy_of,
    cropped_batches,
    cross_entropy,
    normalize,
)

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
_SEVERITIES = 5
_CORRUPTED = "CIFAR-100-C"  # folder of the published archive

# Per channel over the training images, scaled to [0, 1].
_MEAN = (0.5071, 0.4865, 0.4409)
_STD = (0.2673, 0.2564, 0.2762)


def _setup(options: Options) -> Setup:
    train, test = _dataset(options, train=True), _dataset(options, train=False)
    corrupted = options.settings.get("corrupted")
    return Setup(
        model=_network(),
        epoch=cropped_batches(train, _BATCH, _PADDING, _normalize),
        loss=cross_entropy,
        evaluate=accuracy_of((_normalize(test[0]), test[1])),
        evaluate_last=None if corrupted is None else _evaluate_corrupted(Path(corrupted), len(test[1])),
    )


def _setup_corrupted(options: Options) -> Setup:
    """Set up :data:`CIFAR100_C`, whose images are beside CIFAR-100 unless ``corrupted`` is set."""
    settings = dict(options.settings)
    if options.data is not None:
        settings.setdefault("corrupted", str(options.data / _CORRUPTED))
    return _setup(dataclasses.replace(options, settings=settings))


# Data


def _dataset(options: Options, train: bool) -> Pairs:
    """Return images, uint8 ``[N, 32, 32, 3]``, and labels ``[N]`` on the device, read by torchvision."""
    from torchvision import datasets

    dataset_class = datasets.CIFAR100
    download = options.settings.get("download", "no")
    if download not in ("yes", "no"):
        raise CannotTrain(f"--set download: expected yes or no, got {download!r}")
    folder = options.data
    if folder is None:
        raise CannotTrain("--data is missing: name the folder of CIFAR-100, or one to download it to")
    advice = f"download it with --set download=yes, or unpack {dataset_class.url} in {folder}"
    if download == "no" and not (folder / dataset_class.base_folder).is_dir():
        raise FileNotFoundError(f"{folder / dataset_class.base_folder} does not exist; {advice}")
    try:
        images = dataset_class(folder, train, download=download == "yes")
    except RuntimeError as error:  # wrong checksum
        path = folder / dataset_class.base_folder
        raise OSError(f"{path} is incomplete or damaged; delete it, then {advice}") from error
    if len(images) < _BATCH and train:
        raise CannotTrain(f"{folder}: expected at least {_BATCH} training images, got {len(images)}")
    pixels = torch.from_numpy(np.ascontiguousarray(images.data))
    return pixels.to(options.device), torch.tensor(images.targets, device=options.device)


def _normalize(images: Tensor) -> Tensor:
    return normalize(images, _MEAN, _STD)


# CIFAR-100-C


def _evaluate_corrupted(folder: Path, test_images: int) -> Callable[[nn.Module], dict[str, float]]:
    """Return a function that evaluates a model on the published format of CIFAR-100-C.

    The file of a corruption holds all test images at the first severity, then all at the second, and so
    on; ``labels.npy`` holds a label for each.
    """
    # The files are checked before the first step, not after the last one.
    labels = _open_array(folder / "labels.npy", (_SEVERITIES * test_images,))
    shape = (_SEVERITIES * test_images, 32, 32, 3)
    extra = sorted(path.stem for path in folder.glob("*.npy") if path.stem != "labels")
    names = [*CORRUPTIONS, *(name for name in extra if name not in CORRUPTIONS)]
    for name in names:
        _open_array(folder / f"{name}.npy", shape)

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        targets = torch.from_numpy(labels.astype(np.int64)).split(test_images)
        numbers = {}
        for name in names:
            images = _open_array(folder / f"{name}.npy", shape)
            # One severity at a time: all five take most of a gigabyte as float32.
            parts = (
                (_normalize(torch.from_numpy(np.array(part)).to(device)), target)
                for part, target in zip(np.split(images, _SEVERITIES), targets)
            )
            by_severity = [accuracy_of(part)(model)["accuracy"] for part in parts]
            numbers[f"accuracy_{name}"] = float(np.mean(by_severity))
        mean = float(np.mean([numbers[f"accuracy_{name}"] for name in CORRUPTIONS]))
        return numbers | {"corrupted_accuracy": mean}

    return evaluate


def _open_array(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return a memory-mapped array of this shape.

    Raises:
        OSError: the file does not exist, is damaged or has another shape.
    """
    advice = "download CIFAR-100-C from https://zenodo.org/records/3555552"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; {advice}")
    try:
        array = np.load(path, mmap_mode="r")
    except ValueError as error:
        raise OSError(f"{path} is damaged; {advice}") from error
    if array.shape != shape:
        raise OSError(f"{path}: expected shape {shape}, got {array.shape}; {advice}")
    return array


# Model


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
    about="CIFAR-100, ResNet-18, 20,000 steps; a quarter of an hour on a GPU",
    setup=_setup,
    steps=20_000,
    warmup=500,
    lr={"adam": 1e-3, "sgd": 0.1, "amos": 1e-3},
    final_lr=0.1,
    betas=(0.9, 0.98),
    weight_decay={"adam": 0.1, "sgd": 5e-4},
    settings=("download", "corrupted"),
    settings_without_effect=("download",),
    path_settings=("corrupted",),
)

_CORRUPTED_FIELDS: dict[str, Any] = {
    "name": "cifar100-c",
    "about": "trained as cifar100, evaluated on CIFAR-100-C",
    "setup": _setup_corrupted,
    "metric": "corrupted_accuracy",
    "data_folders": (_CORRUPTED,),  # torchvision verifies CIFAR-100 by its checksum
}
# A task of its own, because the runs of a sweep keep no model to evaluate later.
CIFAR100_C = dataclasses.replace(CIFAR100, **_CORRUPTED_FIELDS)
