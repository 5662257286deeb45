"""Data sets of a few random images, in the layout of the real data sets."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torchvision
from PIL import Image

from nnunet_cpr.vision.tasks import cifar100
from nnunet_cpr.vision.tasks.cifar100 import CORRUPTIONS

# CIFAR-100

TRAIN, TEST, BATCH = 26, 10, 8
EXTRA = "speckle_noise"


def images(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def labels(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100, count).tolist()


def write_split(path: Path, count: int, seed: int) -> None:
    """Write a file of cifar-100-python: a row is an image, one channel after the other."""
    rows = images(count, seed).transpose(0, 3, 1, 2).reshape(count, 3 * 32 * 32)
    entry = {
        "filenames": [f"image_{i}.png" for i in range(count)],
        "batch_label": f"{path.name} batch 1 of 1",
        "fine_labels": labels(count, seed),
        "coarse_labels": [0] * count,
        "data": rows,
    }
    path.write_bytes(pickle.dumps(entry, protocol=2))


def write_cifar100(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a few images in the published format, and patch torchvision to accept any checksum."""
    python = folder / "cifar-100-python"
    python.mkdir(parents=True)
    write_split(python / "train", TRAIN, seed=1)
    write_split(python / "test", TEST, seed=2)
    meta = {
        "fine_label_names": [f"fine {i}" for i in range(100)],
        "coarse_label_names": [f"coarse {i}" for i in range(20)],
    }
    (python / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    real = torchvision.datasets.CIFAR100
    monkeypatch.setattr(real, "train_list", [["train", None]])
    monkeypatch.setattr(real, "test_list", [["test", None]])
    monkeypatch.setattr(real, "meta", {**real.meta, "md5": None})
    monkeypatch.setattr(cifar100, "_BATCH", BATCH)


def write_corrupted(folder: Path) -> None:
    folder.mkdir()
    for number, name in enumerate([*CORRUPTIONS, EXTRA]):
        np.save(folder / f"{name}.npy", images(5 * TEST, 100 + number))
    np.save(folder / "labels.npy", np.array(labels(TEST, 2) * 5))


# ImageNet

CLASSES = ["n01440764", "n01443537"]


def write_imagenet(folder: Path) -> None:
    """Write two classes with five training images (two batches of two) and six validation images."""
    generator = np.random.default_rng(0)
    for split, counts in {"train": (2, 3), "val": (4, 2)}.items():
        for name, count in zip(CLASSES, counts):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (40 + 8 * number, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{name}_{number}.JPEG")
