"""Data, network and evaluation of each task."""

from __future__ import annotations

import pickle
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.names.run_name import parse_run_name
from nnunet_cpr.vision.tasks import TASKS, cifar10, cifar100, text
from nnunet_cpr.vision.tasks.cifar100 import CORRUPTIONS
from nnunet_cpr.vision.training import train
from tests.helpers import ROOT

TRAIN, TEST, BATCH = 26, 10, 8


def images(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def labels(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100, count).tolist()


def write_split(path: Path, count: int, seed: int) -> None:
    """Write a file of cifar-100-python: a row is an image, one channel after the other."""
    rows = images(count, seed).transpose(0, 3, 1, 2).reshape(count, 3 * 32 * 32)
    path.write_bytes(pickle.dumps({"fine_labels": labels(count, seed), "data": rows}, protocol=2))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a few images in the published format, and patch torchvision to accept any checksum."""
    python = tmp_path / "data" / "cifar-100-python"
    python.mkdir(parents=True)
    write_split(python / "train", TRAIN, seed=1)
    write_split(python / "test", TEST, seed=2)
    (python / "meta").write_bytes(pickle.dumps({"fine_label_names": ["a"]}, protocol=2))
    real = torchvision.datasets.CIFAR100
    monkeypatch.setattr(real, "train_list", [["train", None]])
    monkeypatch.setattr(real, "test_list", [["test", None]])
    monkeypatch.setattr(real, "meta", {**real.meta, "md5": None})
    monkeypatch.setattr(cifar100, "_BATCH", BATCH)
    return tmp_path / "data"


@pytest.fixture
def small_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write images of ten classes, of which each has its own gray."""
    folder = tmp_path / "images"
    monkeypatch.setattr(cifar10, "_TRAIN", 80)
    monkeypatch.setattr(cifar10, "_VALIDATION", 40)
    for part, count in (("train", 12), ("test", 3)):
        for label in range(10):
            (folder / part / f"class{label}").mkdir(parents=True)
            for number in range(count):
                pixels = np.full((32, 32, 3), 25 * label, np.uint8)
                Image.fromarray(pixels).save(folder / part / f"class{label}" / f"{number}.png")
    return folder


CPU = torch.device("cpu")
TEXT = b"To be, or not to be, that is the question: " * 200


@pytest.fixture
def folder_of_text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "1.txt").write_bytes(TEXT[:5000])
    (folder / "2.txt").write_bytes(TEXT[5000:])
    (folder / ".hidden.txt").write_text("other")
    return folder


# CIFAR-100 and CIFAR-100-C


def test_cifar100_batches_equal_a_plain_loop(data: Path) -> None:
    """Order, crops and mirroring are drawn on the CPU, which a resumed run repeats."""
    prepared = cifar100._setup(data, CPU)
    torch.manual_seed(3)
    found = list(prepared.batches())
    assert len(found) == TRAIN // BATCH
    torch.manual_seed(3)
    order = torch.randperm(TRAIN)
    padded = np.pad(images(TRAIN, 1), ((0, 0), (4, 4), (4, 4), (0, 0)))
    for number, (pixels, classes) in enumerate(found):
        chosen = order[number * BATCH : (number + 1) * BATCH].tolist()
        top, left = torch.randint(9, (2, BATCH, 1)).squeeze(2).tolist()
        mirrored = (torch.rand(BATCH, 1) < 0.5).squeeze(1).tolist()
        windows = [padded[i, t : t + 32, x : x + 32] for i, t, x in zip(chosen, top, left)]
        windows = [w[:, ::-1] if flip else w for w, flip in zip(windows, mirrored)]
        expected = (np.stack(windows) / 255 - cifar100._MEAN) / cifar100._STD
        torch.testing.assert_close(
            pixels, torch.tensor(expected.transpose(0, 3, 1, 2), dtype=torch.float32)
        )
        assert classes.tolist() == [labels(TRAIN, 1)[i] for i in chosen]


class ParityModel(nn.Module):
    """Model that is correct if the first pixel of an image is even."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))  # gives the model a device

    def forward(self, batch: Tensor) -> Tensor:
        value = batch[:, 0, 0, 0] * cifar100._STD[0] + cifar100._MEAN[0]
        even = (value * 255).round().long() % 2 == 0
        correct = torch.tensor(labels(TEST, 2) * 5)
        answers = torch.where(even, correct, (correct + 1) % 100)
        return nn.functional.one_hot(answers, 100).float()


def test_accuracy_on_corrupted_images(data: Path) -> None:
    assert cifar100._setup(data, CPU).evaluate_last is None
    (data / "CIFAR-100-C").mkdir()
    for number, name in enumerate(CORRUPTIONS):
        np.save(data / "CIFAR-100-C" / f"{name}.npy", images(5 * TEST, 100 + number))
    np.save(data / "CIFAR-100-C" / "labels.npy", np.array(labels(TEST, 2) * 5))
    evaluate = cifar100._setup(data, CPU).evaluate_last
    assert evaluate is not None
    expected = {
        f"accuracy_{name}": 100 * float((images(5 * TEST, 100 + i)[:, 0, 0, 0] % 2 == 0).mean())
        for i, name in enumerate(CORRUPTIONS)
    }
    mean = np.mean(list(expected.values()))
    assert evaluate(ParityModel()) == pytest.approx({**expected, "corrupted_accuracy": mean})


@pytest.mark.slow  # trains the real network
def test_documented_command_trains(data: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/vision.md").read_text().replace("\\\n", "")
    command = next(
        line for line in page.splitlines() if line.startswith("nnunet-cpr vision run cifar100 ")
    )
    small = command.replace("ws1000", "ws2").replace("ip50", "ip1").replace("DIR", str(data))
    words = shlex.split(re.sub(r"--seeds \S+", "--seeds 1-1", small))[1:]
    names = [word for word in words if word.startswith("Adam")]
    words = [f"{word}_warmup1_3steps" if word in names else word for word in words]
    done = CliRunner().invoke(app, [*words, "--device", "cpu", "--results", str(tmp_path / "results")])
    assert done.exit_code == 0, done.output
    assert len(pd.read_csv(tmp_path / "results" / "cifar100.csv")) == len(names) == 3


# CIFAR-10


def test_cifar10_learns_and_reports_validation_images(small_images: Path, tmp_path: Path) -> None:
    name = parse_run_name("SGDCPR_ws10_60steps_warmup5")
    result = train(TASKS["cifar10"], name, tmp_path / "results", small_images)
    assert result["accuracy"] > 50 and result["validation_accuracy"] > 50


# Text


def test_windows_of_a_text_are_followed_by_their_targets(folder_of_text: Path) -> None:
    held_out = int(0.05 * len(TEXT))
    inputs, targets = next(text._setup(folder_of_text, CPU).batches())
    assert inputs.shape == targets.shape == (32, 64)
    for before, after in zip(inputs, targets):
        window = bytes([*before.tolist(), after[-1].item()])
        assert torch.equal(before[1:], after[:-1])
        assert window in TEXT[: len(TEXT) - 2 * held_out]
