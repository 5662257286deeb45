from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from nnunet_cpr.names.run_name import RunName, parse_run_name
from nnunet_cpr.vision import engine
from nnunet_cpr.vision.engine import train
from nnunet_cpr.vision.folder import run_folder
from nnunet_cpr.vision.heatmaps import draw_sweep
from nnunet_cpr.vision.sweeps import Sweep, grid
from nnunet_cpr.vision.task import CannotTrain, Options, Task
from nnunet_cpr.vision.tasks import TASKS, cifar100
from nnunet_cpr.vision.tasks.cifar100 import CIFAR100, CIFAR100_C, CORRUPTIONS
from nnunet_cpr.vision.tasks.in_memory import crop
from tests.helpers.examples import examples
from tests.helpers.tiny_data import (
    BATCH,
    EXTRA,
    TEST,
    TRAIN,
    images,
    labels,
    write_cifar100,
    write_corrupted,
)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    write_cifar100(folder, monkeypatch)
    return folder


def narrow() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=4, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 100),
    )


@pytest.fixture
def is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar100, "_network", narrow)


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the figure, which takes half of the time of a short run."""
    monkeypatch.setattr(engine, "draw_dynamics", lambda runs, path: None)


# Data


def test_images_and_labels_are_read(data: Path) -> None:
    found, found_labels = cifar100._dataset(Options(data=data), train=False)
    assert found.dtype == torch.uint8
    assert np.array_equal(found, images(TEST, 2))
    assert found_labels.tolist() == labels(TEST, 2)


def test_normalization_is_torchvisions(data: Path) -> None:
    from torchvision.transforms import v2

    reference = v2.Compose(
        [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(cifar100._MEAN, cifar100._STD),
        ]
    )
    expected = torch.stack([reference(image) for image in images(3, 5)])
    torch.testing.assert_close(cifar100._normalize(torch.from_numpy(images(3, 5))), expected)


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
    left = torch.where(mirrored, left - 30, left)
    counts = torch.bincount(top * 9 + left, minlength=81)
    assert len(counts) == 81
    assert counts.min() > 20
    assert 0.45 < mirrored.float().mean() < 0.55


@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_depends_on_torchs_seed_only(data: Path, is_narrow: None, workers: int) -> None:
    prepared = CIFAR100.setup(Options(data=data, workers=workers))

    def epoch(seed: int) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(seed)
        return list(prepared.epoch(0))

    first, again, other = epoch(1), epoch(1), epoch(2)
    assert len(first) == TRAIN // BATCH
    assert [tuple(x.shape) for x, _ in first] == [(BATCH, 3, 32, 32)] * 3
    assert all(torch.equal(a, b) for x, y in zip(first, again) for a, b in zip(x, y))
    assert not torch.equal(first[0][0], other[0][0])


def test_epoch_has_every_image_once(data: Path, is_narrow: None) -> None:
    prepared = CIFAR100.setup(Options(data=data))
    seen = torch.cat([y for _, y in prepared.epoch(0)]).tolist()
    left = labels(TRAIN, 1)
    for label in seen:
        left.remove(label)
    assert len(left) == TRAIN % BATCH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": None}, "--data is missing"),
        ({"settings": {"download": "maybe"}}, "--set download: expected yes or no, got 'maybe'"),
    ],
)
def test_wrong_option_is_one_line(data: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CannotTrain, match=message) as error:
        CIFAR100.setup(Options(**{"data": data, **options}))
    assert "\n" not in str(error.value)


def test_missing_data_set_names_the_download(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--set download=yes, or unpack https://") as error:
        CIFAR100.setup(Options(data=tmp_path))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_damaged_data_set_is_reported(data: Path) -> None:
    (data / "cifar-100-python" / "test").unlink()
    with pytest.raises(OSError, match="incomplete or damaged"):
        CIFAR100.setup(Options(data=data))


def test_fewer_images_than_a_batch_are_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar100, "_BATCH", TRAIN + 1)
    with pytest.raises(CannotTrain, match=f"expected at least {TRAIN + 1} training images, got {TRAIN}"):
        CIFAR100.setup(Options(data=data))


def test_download_is_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = []

    def download(self: Any) -> None:
        urls.append(self.url)
        raise RuntimeError("File not found or corrupted.")

    monkeypatch.setattr(torchvision.datasets.CIFAR100, "download", download)
    with pytest.raises(OSError, match="incomplete or damaged"):
        CIFAR100.setup(Options(data=tmp_path, settings={"download": "yes"}))
    assert urls == ["https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"]


def test_batches_equal_a_plain_loop(data: Path, is_narrow: None) -> None:
    """Order, crops and mirroring are drawn on the CPU, which a resumed run repeats."""
    prepared = CIFAR100.setup(Options(data=data))
    torch.manual_seed(3)
    found = list(prepared.epoch(0))
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
def test_epoch_does_not_synchronize_the_gpu(data: Path, is_narrow: None) -> None:
    prepared = CIFAR100.setup(Options(data=data, device=torch.device("cuda")))
    list(prepared.epoch(0))  # copies the mean and standard deviation once
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(prepared.epoch(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_finished_run_frees_gpu_memory(
    data: Path, is_narrow: None, without_figures: None, tmp_path: Path
) -> None:
    options = Options(data=data, device=torch.device("cuda"))
    train(short(CIFAR100), parse_run_name("AdamCPR_ws2"), tmp_path, options)
    after_one = torch.cuda.memory_allocated()
    train(short(CIFAR100), parse_run_name("AdamCPR_ws2_seed2"), tmp_path, options)
    assert torch.cuda.memory_allocated() <= after_one


# Model


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


# CIFAR-100-C


class ParityModel(nn.Module):
    """Model that is correct if the first pixel of an image is even."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))  # gives the model a device

    def forward(self, batch: Tensor) -> Tensor:
        value = batch[:, 0, 0, 0] * cifar100._STD[0] + cifar100._MEAN[0]
        even = (value * 255).round().long() % 2 == 0
        correct = torch.tensor(labels(TEST, 2))
        answers = torch.where(even, correct, (correct + 1) % 100)
        return nn.functional.one_hot(answers, 100).float()


def test_accuracy_on_corrupted_images(data: Path, is_narrow: None, tmp_path: Path) -> None:
    write_corrupted(tmp_path / "noise")
    options = Options(data=data, settings={"corrupted": str(tmp_path / "noise")})
    evaluate = CIFAR100.setup(options).evaluate_last
    assert evaluate is not None
    numbers = evaluate(ParityModel())
    expected = {
        f"accuracy_{name}": 100 * float((images(5 * TEST, 100 + i)[:, 0, 0, 0] % 2 == 0).mean())
        for i, name in enumerate([*CORRUPTIONS, EXTRA])
    }
    mean = np.mean([expected[f"accuracy_{name}"] for name in CORRUPTIONS])
    assert numbers == pytest.approx({**expected, "corrupted_accuracy": mean})
    assert CIFAR100.setup(Options(data=data)).evaluate_last is None


def spoil_missing(folder: Path) -> None:
    (folder / "fog.npy").unlink()


def spoil_shape(folder: Path) -> None:
    np.save(folder / "fog.npy", images(TEST, 0))


def spoil_file(folder: Path) -> None:
    (folder / "fog.npy").write_bytes(b"no array")


def spoil_labels(folder: Path) -> None:
    (folder / "labels.npy").unlink()


@pytest.mark.parametrize("spoil", [spoil_missing, spoil_shape, spoil_file, spoil_labels])
def test_unusable_corrupted_images_are_reported_before_training(
    data: Path, is_narrow: None, spoil: Callable[[Path], None]
) -> None:
    write_corrupted(data / "CIFAR-100-C")
    CIFAR100_C.setup(Options(data=data))
    spoil(data / "CIFAR-100-C")
    with pytest.raises(OSError, match=r"(fog|labels)\.npy.*; download CIFAR-100-C from") as error:
        CIFAR100_C.setup(Options(data=data))
    assert "\n" not in str(error.value)


# Runs


def short(task: Task, steps: int = 7) -> Task:
    return dataclasses.replace(task, steps=steps, warmup=2)


class Stop(KeyboardInterrupt):
    pass


def files(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    del result["seconds"]
    tables = {name: (folder / name).read_text() for name in ("history.csv", "dynamics.csv")}
    return {**tables, "result": result}


def test_resumed_resnet_run_equals_uninterrupted_run(data: Path, tmp_path: Path) -> None:
    task, name, options = (
        short(CIFAR100, steps=4),
        parse_run_name("AdamCPR_ws3_seed1"),
        Options(data=data),
    )
    whole = train(task, name, tmp_path / "whole", options)
    assert whole["step"] == 4
    assert 0 <= whole["accuracy"] <= 100

    def stop(done: int, total: int) -> None:
        if done == 4:  # one step after the checkpoint of the first epoch
            raise Stop

    stopped = run_folder(tmp_path / "parts", task, name)
    with pytest.raises(Stop):
        train(task, name, tmp_path / "parts", options, stop)
    assert (stopped / "checkpoint.pt").exists()
    train(task, name, tmp_path / "parts", options)
    assert files(stopped) == files(run_folder(tmp_path / "whole", task, name))
    assert not (stopped / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    "text",
    [
        "AdamCPR_k0p005",
        "AdamCPR_ki0x4_ada_mu0p1",
        "AdamCPR_ip1_std",
        "SGDCPR_ws2_l1",
        "AdamCPR_ws2_huber",
        "AdamW_wd0p1",
        "SGD_lr0p01_wd1en3",
        "AdamW_adadecay4_wd0p1",
        "AdamW_awd_wd0p01",
        "AdamW_cosine0p1_wd0p1",
        "AdamW_rescale2",
        "AMOS_wd0p01",
    ],
)
def test_every_method_trains_and_resumes(
    data: Path, is_narrow: None, without_figures: None, tmp_path: Path, text: str
) -> None:
    if text.startswith("AMOS"):
        pytest.importorskip("pytorch_optimizer")
    task, name, options = short(CIFAR100), parse_run_name(text), Options(data=data)

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise Stop

    train(task, name, tmp_path / "whole", options)
    with pytest.raises(Stop):
        train(task, name, tmp_path / "parts", options, stop)
    train(task, name, tmp_path / "parts", options)
    whole, parts = (files(run_folder(tmp_path / at, task, name)) for at in ("whole", "parts"))
    assert parts == whole


def test_corrupted_images_are_evaluated_only_at_the_end(
    data: Path, is_narrow: None, tmp_path: Path
) -> None:
    write_corrupted(data / "CIFAR-100-C")
    result = train(short(CIFAR100_C), parse_run_name("AdamW"), tmp_path, Options(data=data))
    assert result["metric"] == "corrupted_accuracy"
    assert {f"accuracy_{name}" for name in CORRUPTIONS} < set(result)
    history = pd.read_csv(tmp_path / "cifar100-c" / "AdamW_seed1" / "history.csv")
    assert history["step"].tolist() == [3, 6, 7]
    assert history["accuracy"].notna().all()
    assert history["corrupted_accuracy"].notna().tolist() == [False, False, True]
    assert history["corrupted_accuracy"].iloc[-1] == pytest.approx(result["corrupted_accuracy"])


def test_other_corrupted_images_are_refused(data: Path, is_narrow: None, tmp_path: Path) -> None:
    noise = data / "CIFAR-100-C"
    write_corrupted(noise)
    results = tmp_path / "results"
    train(short(CIFAR100_C), parse_run_name("AdamW"), results, Options(data=data))
    train(short(CIFAR100_C), parse_run_name("AdamW"), results, Options(data=data))
    np.save(noise / "brightness.npy", images(5 * TEST, 7))
    with pytest.raises(CannotTrain, match="use other --results"):
        train(short(CIFAR100_C), parse_run_name("AdamW"), results, Options(data=data))


def test_sweep_trains_and_draws(
    data: Path,
    is_narrow: None,
    without_figures: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = short(CIFAR100, steps=3)
    monkeypatch.setitem(TASKS, "cifar100", task)
    decays = ("weight decay", {"0": {"weight_decay": 0.0}, "0.1": {"weight_decay": 0.1}})
    rates = ("learning rate", {"0.001": {"lr": 1e-3}, "0.01": {"lr": 1e-2}})
    sweep = Sweep("tiny", "Tiny", "cifar100", (grid("AdamW", decays, rates, "AdamW"),), seeds=(1, 2))
    for run in sweep.runs():
        train(task, run, tmp_path, Options(data=data))
    summary = draw_sweep(sweep, tmp_path, tmp_path / "tiny.png")
    assert summary["n"].tolist() == [2] * 4
    assert summary["run"].tolist()[1] == str(RunName("AdamW", lr=1e-2, weight_decay=0.0))
    assert (tmp_path / "tiny.png").stat().st_size > 10_000
    assert len(pd.read_csv(tmp_path / "tiny.csv")) == 4
