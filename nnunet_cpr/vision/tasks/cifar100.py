"""CIFAR-100 on a ResNet-18, and CIFAR-100-C, its test images with noise, blur, weather and the like.

The settings are those of the paper's table on CIFAR-100.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nnunet_cpr._device import to_device
from nnunet_cpr.vision.task import CannotTrain, Options, Prepared, Task
from nnunet_cpr.vision.tasks.in_memory import Pairs, accuracy_of, cross_entropy, shuffled_batches

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
"""The benchmark's, over which its mean is taken; the four others of the archive are for development."""

_BATCH = 128
_CLASSES = 100
_PADDING = 4
_SEVERITIES = 5
_CORRUPTED = "CIFAR-100-C"  # the folder in the published archive

# Per channel over the training images, of 0 to 1.
_MEAN = (0.5071, 0.4865, 0.4409)
_STD = (0.2673, 0.2564, 0.2762)


def _prepare(options: Options) -> Prepared:
    train, test = _dataset(options, train=True), _dataset(options, train=False)
    corrupted = options.settings.get("corrupted")
    return Prepared(
        model=_network(),
        epoch=_augmented_batches(train),
        loss=cross_entropy,
        evaluate=accuracy_of((_normalised(test[0]), test[1])),
        evaluate_last=None if corrupted is None else _corrupted_accuracy(Path(corrupted), len(test[1])),
    )


def _prepare_corrupted(options: Options) -> Prepared:
    """As :func:`_prepare`, with CIFAR-100-C beside CIFAR-100 unless ``corrupted`` says where it is."""
    settings = dict(options.settings)
    if options.data is not None:
        settings.setdefault("corrupted", str(options.data / _CORRUPTED))
    return _prepare(dataclasses.replace(options, settings=settings))


# Data


def _dataset(options: Options, train: bool) -> Pairs:
    """Images, uint8 ``[N, 32, 32, 3]``, and labels ``[N]``, on the device; by torchvision's class."""
    try:
        from torchvision import datasets
    except ImportError as error:
        raise ImportError(
            "CIFAR-100 is read by torchvision; run: pip install 'nnunet-cpr[vision]'"
        ) from error
    kind = datasets.CIFAR100
    download = options.settings.get("download", "no")
    if download not in ("yes", "no"):
        raise CannotTrain(f"download={download} is neither yes nor no")
    folder = options.data
    if folder is None:
        raise CannotTrain("say where CIFAR-100 is, or is to be downloaded to: --data DIR")
    get = f"get it with --set download=yes, or unpack {kind.url} in {folder}"
    if download == "no" and not (folder / kind.base_folder).is_dir():
        raise FileNotFoundError(f"there is no folder {folder / kind.base_folder}; {get}")
    try:
        images = kind(folder, train, download=download == "yes")
    except RuntimeError as error:  # a checksum is wrong
        message = f"{folder / kind.base_folder} is incomplete or damaged; delete it, and {get}"
        raise OSError(message) from error
    if len(images) < _BATCH and train:
        raise CannotTrain(
            f"{folder} has {len(images)} images to train on, fewer than a batch of {_BATCH}"
        )
    pixels = torch.from_numpy(np.ascontiguousarray(images.data))
    return pixels.to(options.device), torch.tensor(images.targets, device=options.device)


def _augmented_batches(train: Pairs) -> Callable[[int], Iterator[Pairs]]:
    """Random windows of the padded images, half of them mirrored.

    A whole batch at a time and on the device, where all images lie: no other process is needed, and what
    is drawn is drawn by the CPU's generator, whatever the device.
    """
    images, labels = train
    padding = (0, 0, _PADDING, _PADDING, _PADDING, _PADDING)
    batches = shuffled_batches((nn.functional.pad(images, padding), labels), _BATCH)

    def epoch(number: int) -> Iterator[Pairs]:
        for padded, chosen_labels in batches(number):
            yield _normalised(_windows(padded)), chosen_labels

    return epoch


def _windows(padded: Tensor) -> Tensor:
    """One window without the padding's size from each image ``[N, H, W, 3]``, mirrored by chance."""
    count, height, width, _ = padded.shape
    places = 2 * _PADDING + 1
    top, left = torch.randint(places, (2, count, 1))
    mirrored = torch.rand(count, 1) < 0.5
    drawn = torch.cat((top, left, mirrored), 1).flatten().tolist()
    top, left, mirrored = to_device(drawn, torch.int64, padded.device).view(count, 3, 1).unbind(1)
    rows = top + torch.arange(height - places + 1, device=padded.device)  # [N, height of the window]
    columns = left + torch.arange(width - places + 1, device=padded.device)
    columns = torch.where(mirrored > 0, columns.flip(1), columns)
    image = torch.arange(count, device=padded.device)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]]


def _normalised(images: Tensor) -> Tensor:
    """From uint8 ``[N, H, W, 3]`` to float32 ``[N, 3, H, W]`` with about mean 0 and deviation 1."""
    mean, std = _moments(images.device)
    scaled = (images.float() / 255 - mean) / std
    return scaled.permute(0, 3, 1, 2).contiguous()


@functools.cache
def _moments(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation, copied to a device once."""
    return torch.tensor(_MEAN, device=device), torch.tensor(_STD, device=device)


# CIFAR-100-C


def _corrupted_accuracy(folder: Path, test_images: int) -> Callable[[nn.Module], dict[str, float]]:
    """An evaluation on a folder of the published format, which is checked now and read later.

    A file for each corruption holds all test images at the first severity, then all at the second, and
    so on; ``labels.npy`` holds as many labels.
    """
    # After hours of training it is too late to hear that a file is not there.
    labels = _opened(folder / "labels.npy", (_SEVERITIES * test_images,))
    shape = (_SEVERITIES * test_images, 32, 32, 3)
    extra = sorted(path.stem for path in folder.glob("*.npy") if path.stem != "labels")
    names = [*CORRUPTIONS, *(name for name in extra if name not in CORRUPTIONS)]
    for name in names:
        _opened(folder / f"{name}.npy", shape)

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        targets = torch.from_numpy(labels.astype(np.int64)).split(test_images)
        numbers = {}
        for name in names:
            images = _opened(folder / f"{name}.npy", shape)
            # A severity at a time; all five as float32 would be most of a gigabyte.
            parts = (
                (_normalised(torch.from_numpy(np.array(part)).to(device)), target)
                for part, target in zip(np.split(images, _SEVERITIES), targets)
            )
            by_severity = [accuracy_of(part)(model)["accuracy"] for part in parts]
            numbers[f"accuracy_{name}"] = float(np.mean(by_severity))
        mean = float(np.mean([numbers[f"accuracy_{name}"] for name in CORRUPTIONS]))
        return numbers | {"corrupted_accuracy": mean}

    return evaluate


def _opened(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The array of a file, of which is read what is used.

    Raises:
        OSError: it is not there, or is none of the wanted shape.
    """
    get = "CIFAR-100-C is at https://zenodo.org/records/3555552"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; {get}")
    try:
        array = np.load(path, mmap_mode="r")
    except ValueError as error:
        raise OSError(f"{path} is damaged; {get}") from error
    if array.shape != shape:
        raise OSError(f"{path} has the shape {array.shape}, not {shape}; {get}")
    return array


# Model


def _network() -> nn.Module:
    """The ResNet-18 of torchvision for small images: no stride and no pooling before its first block."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=_CLASSES)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    # As torchvision does with the convolutions of its own.
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


CIFAR100 = Task(
    name="cifar100",
    about="CIFAR-100, ResNet-18, 20,000 steps; a quarter of an hour on a GPU",
    prepare=_prepare,
    steps=20_000,
    warmup=500,
    lr={"adam": 1e-3, "sgd": 0.1, "amos": 1e-3},
    final_lr=0.1,
    betas=(0.9, 0.98),
    weight_decay={"adam": 0.1, "sgd": 5e-4},
    settings=("download", "corrupted"),
    settings_without_effect=("download",),
)

_CORRUPTED_FIELDS: dict[str, Any] = {
    "name": "cifar100-c",
    "about": "the same training, compared by the accuracy on CIFAR-100-C",
    "prepare": _prepare_corrupted,
    "metric": "corrupted_accuracy",
    "data_folders": (_CORRUPTED,),  # torchvision takes no other CIFAR-100 than the one
}
# A task of its own, because a run that is done leaves no model which could be evaluated later on.
CIFAR100_C = dataclasses.replace(CIFAR100, **_CORRUPTED_FIELDS)
