"""Data, network and evaluation of each task."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.names.run_name import parse_run_name
from nnunet_cpr.vision.task import CannotTrain
from nnunet_cpr.vision.tasks import TASKS, cifar10, cifar100, text
from nnunet_cpr.vision.tasks.cifar100 import CORRUPTIONS
from nnunet_cpr.vision.tasks.in_memory import crop
from nnunet_cpr.vision.training import train
from tests.helpers import ROOT
from tests.helpers.examples import examples
from tests.helpers.tiny_data import (
    BATCH,
    TEST,
    TRAIN,
    images,
    labels,
    write_cifar10,
    write_cifar100,
    write_corrupted,
)

CPU = torch.device("cpu")
TEXT = b"To be, or not to be, that is the question: " * 200
COMMANDS = sorted(
    {
        line.strip()
        for line in (ROOT / "docs/reference/vision/cifar100.md").read_text().splitlines()
        if line.strip().startswith("nnunet-cpr vision run ")
    }
)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_cifar100(tmp_path / "data", monkeypatch)
    return tmp_path / "data"


@pytest.fixture
def small_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_cifar10(tmp_path / "images", monkeypatch)
    return tmp_path / "images"


@pytest.fixture
def folder_of_text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "1.txt").write_bytes(TEXT[:5000])
    (folder / "2.txt").write_bytes(TEXT[5000:])
    (folder / ".hidden.txt").write_text("other")
    return folder


# In memory


@examples(5, search=50)
@given(seed=st.integers(0, 2**32 - 1))
def test_training_image_is_a_crop_of_the_padded_image(seed: int) -> None:
    torch.manual_seed(seed)
    original = torch.from_numpy(images(4, 7))
    padded = nn.functional.pad(original, (0, 0, 4, 4, 4, 4))
    for image, window in zip(padded, crop(padded, 4)):
        assert window.shape == (32, 32, 3)
        assert any(
            torch.equal(window, candidate)
            for top in range(9)
            for left in range(9)
            for part in [image[top : top + 32, left : left + 32]]
            for candidate in (part, part.flip(1))
        )


def test_crops_cover_all_offsets_and_mirror_half() -> None:
    torch.manual_seed(0)
    # The value of a pixel is its position, so the first pixels of a row identify the crop.
    places = torch.arange(40 * 40).reshape(1, 40, 40, 1).expand(4000, 40, 40, 3)
    first = crop(places, 4)[:, 0, :2, 0]
    top, left = first[:, 0] // 40, first.min(1).values % 40
    mirrored = first[:, 1] < first[:, 0]
    counts = torch.bincount(top * 9 + torch.where(mirrored, left - 30, left), minlength=81)
    assert len(counts) == 81 and counts.min() > 20
    assert 0.45 < mirrored.float().mean() < 0.55


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_epoch_does_not_synchronize_the_gpu(data: Path) -> None:
    prepared = cifar100._setup(data, torch.device("cuda"))
    list(prepared.batches())  # copies the mean and standard deviation once
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(prepared.batches())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_finished_run_frees_gpu_memory(data: Path, tmp_path: Path) -> None:
    task, allocated = dataclasses.replace(TASKS["cifar100"], steps=7, warmup=2), []
    for seed in (1, 2):
        run = parse_run_name(f"AdamCPR_ws2_seed{seed}")
        train(task, run, tmp_path, data, torch.device("cuda"))
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] <= allocated[0]


def test_network_is_resnet18_for_small_images() -> None:
    network = cifar100._network()
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: shapes.update({name: tuple(output.shape)})

    for name in ("conv1", "layer1", "layer4"):
        getattr(network, name).register_forward_hook(note(name))
    network.eval()
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 100)
    assert shapes == {"conv1": (1, 64, 32, 32), "layer1": (1, 64, 32, 32), "layer4": (1, 512, 4, 4)}
    assert sum(p.numel() for p in network.parameters()) == 11_220_132


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
    write_corrupted(data / "CIFAR-100-C")
    evaluate = cifar100._setup(data, CPU).evaluate_last
    assert evaluate is not None
    expected = {
        f"accuracy_{name}": 100 * float((images(5 * TEST, 100 + i)[:, 0, 0, 0] % 2 == 0).mean())
        for i, name in enumerate(CORRUPTIONS)
    }
    mean = np.mean(list(expected.values()))
    assert evaluate(ParityModel()) == pytest.approx({**expected, "corrupted_accuracy": mean})


def test_missing_corruption_is_reported_before_training(data: Path) -> None:
    write_corrupted(data / "CIFAR-100-C")
    (data / "CIFAR-100-C" / "fog.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"fog\.npy does not exist; download CIFAR-100-C from"):
        cifar100._setup(data, CPU)


def test_damaged_cifar100_is_reported(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "cifar-100-python" / "test").unlink()
    monkeypatch.setattr(cifar100_class(), "download", lambda self: None)
    with pytest.raises(OSError, match=r"not found or corrupted.*; delete what is damaged, or unpack"):
        cifar100._setup(data, CPU)


def cifar100_class() -> type:
    from torchvision.datasets import CIFAR100

    return CIFAR100


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_command_trains(command: str, data: Path, tmp_path: Path) -> None:
    write_corrupted(data / "CIFAR-100-C")
    arguments = shlex.split(command)[1:]
    arguments = [str(data) if word == "DIR" else word for word in arguments]
    names = [word for word in arguments if word.startswith(("Adam", "SGD"))]
    for name in names:
        small = name.replace("ws1000", "ws2").replace("ip50", "ip1")
        arguments[arguments.index(name)] = f"{small}_warmup1_3steps"
    results = ["--device", "cpu", "--results", str(tmp_path / "results"), "--seeds", "1"]
    done = CliRunner().invoke(app, [*arguments, *results])
    assert done.exit_code == 0, done.output
    assert len(pd.read_csv(tmp_path / "results" / "cifar100.csv")) == len(names)


# CIFAR-10


def test_cifar10_reads_small_images_of_both_parts(small_images: Path) -> None:
    batches = list(cifar10._setup(small_images, CPU).batches())
    assert [(tuple(x.shape), len(labels)) for x, labels in batches] == [((64, 3, 16, 16), 64)]
    gray = torch.tensor(cifar10._STD) * batches[0][0][:, :, 8, 8] + torch.tensor(cifar10._MEAN)
    expected = (25 / 255 * batches[0][1].float())[:, None].expand(-1, 3)
    torch.testing.assert_close(gray, expected)


def test_cifar10_learns_and_reports_validation_images(small_images: Path, tmp_path: Path) -> None:
    name = parse_run_name("SGDCPR_ws10_60steps_warmup5")
    result = train(TASKS["cifar10"], name, tmp_path / "results", small_images)
    assert result["accuracy"] > 50 and result["validation_accuracy"] > 50


def test_cifar10_names_missing_folders_and_images(small_images: Path) -> None:
    with pytest.raises(CannotTrain, match="train/CLASS"):
        cifar10._setup(None, CPU)
    with pytest.raises(CannotTrain, match="expected 10 folders of classes with at least 1000"):
        cifar10._images(small_images / "train", 1000)


# Text


def test_windows_of_a_text_are_followed_by_their_targets(folder_of_text: Path) -> None:
    held_out = int(0.05 * len(TEXT))
    inputs, targets = next(text._setup(folder_of_text, CPU).batches())
    assert inputs.shape == targets.shape == (32, 64)
    for before, after in zip(inputs, targets):
        window = bytes([*before.tolist(), after[-1].item()])
        assert torch.equal(before[1:], after[:-1])
        assert window in TEXT[: len(TEXT) - 2 * held_out]


def test_prediction_of_a_byte_depends_on_earlier_ones_only() -> None:
    torch.manual_seed(0)
    model = text._Transformer().eval()
    first = torch.randint(256, (1, 64))
    second = first.clone()
    second[0, 40:] = torch.randint(256, (24,))
    with torch.no_grad():
        one, two = model(first), model(second)
    torch.testing.assert_close(one[:, :, :40], two[:, :, :40])
    assert not torch.allclose(one[:, :, 40:], two[:, :, 40:])


def test_evaluation_of_a_text_is_the_mean_over_its_bytes(folder_of_text: Path) -> None:
    setup = text._setup(folder_of_text, CPU)
    held_out = int(0.05 * len(TEXT))
    end = torch.tensor(list(TEXT[-held_out:]))
    model = setup.model.eval()
    with torch.no_grad():
        found = setup.evaluate(model)
        losses, correct = [], []
        for start in range(0, held_out - 64, 64):
            window = end[start : start + 65]
            logits = model(window[None, :-1])[0].T.double()
            losses.append(functional.cross_entropy(logits, window[1:], reduction="none"))
            correct.append(logits.argmax(1) == window[1:])
    assert found["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx(100 * torch.cat(correct).double().mean().item())


def test_text_is_learned(folder_of_text: Path, tmp_path: Path) -> None:
    name = parse_run_name("AdamCPR_ws20_60steps_warmup10")
    result = train(TASKS["text"], name, tmp_path / "results", folder_of_text)
    assert result["accuracy"] > 50  # the text repeats one sentence


def test_text_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match=r"expected \.txt files"):
        text._setup(tmp_path, CPU)
    (tmp_path / "a.txt").write_bytes(TEXT[:1000])
    with pytest.raises(CannotTrain, match="expected at least 1300 bytes of text, got 1000"):
        text._setup(tmp_path, CPU)
