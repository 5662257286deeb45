"""Data sets of a few random images, in the layout of the real data sets."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torchvision
from PIL import Image

from nnunet_cpr.vision.tasks import cifar10, cifar100
from nnunet_cpr.vision.tasks.cifar100 import CORRUPTIONS

TRAIN, TEST, BATCH = 26, 10, 8


def images(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def labels(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100, count).tolist()


def write_split(path: Path, count: int, seed: int) -> None:
    """Write a file of cifar-100-python: a row is an image, one channel after the other."""
    rows = images(count, seed).transpose(0, 3, 1, 2).reshape(count, 3 * 32 * 32)
    path.write_bytes(pickle.dumps({"fine_labels": labels(count, seed), "data": rows}, protocol=2))


def write_cifar100(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a few images in the published format, and patch torchvision to accept any checksum."""
    python = folder / "cifar-100-python"
    python.mkdir(parents=True)
    write_split(python / "train", TRAIN, seed=1)
    write_split(python / "test", TEST, seed=2)
    (python / "meta").write_bytes(pickle.dumps({"fine_label_names": ["a"]}, protocol=2))
    real = torchvision.datasets.CIFAR100
    monkeypatch.setattr(real, "train_list", [["train", None]])
    monkeypatch.setattr(real, "test_list", [["test", None]])
    monkeypatch.setattr(real, "meta", {**real.meta, "md5": None})
    monkeypatch.setattr(cifar100, "_BATCH", BATCH)


def write_corrupted(folder: Path) -> None:
    folder.mkdir()
    for number, name in enumerate(CORRUPTIONS):
        np.save(folder / f"{name}.npy", images(5 * TEST, 100 + number))
    np.save(folder / "labels.npy", np.array(labels(TEST, 2) * 5))


def write_cifar10(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write images of ten classes, of which each has its own gray."""
    monkeypatch.setattr(cifar10, "_TRAIN", 80)
    monkeypatch.setattr(cifar10, "_VALIDATION", 40)
    for part, count in (("train", 12), ("test", 3)):
        for label in range(10):
            (folder / part / f"class{label}").mkdir(parents=True)
            for number in range(count):
                pixels = np.full((32, 32, 3), 25 * label, np.uint8)
                Image.fromarray(pixels).save(folder / part / f"class{label}" / f"{number}.png")
