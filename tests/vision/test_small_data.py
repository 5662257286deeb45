"""CIFAR-10 and text in small, and the choice of settings on validation data."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import t
from torch.nn import functional

from nnunet_cpr.names.run_name import RunName, parse_run_name
from nnunet_cpr.vision.data_digest import data_digest
from nnunet_cpr.vision.engine import train
from nnunet_cpr.vision.folder import run_folder
from nnunet_cpr.vision.selection import compare_methods
from nnunet_cpr.vision.sweeps import Sweep
from nnunet_cpr.vision.sweeps.sweep import axis_values, grid
from nnunet_cpr.vision.task import CannotTrain, Options
from nnunet_cpr.vision.tasks import TASKS, cifar10, text

TEXT = b"To be, or not to be, that is the question: " * 200


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with images of ten classes, of which each has its own gray."""
    monkeypatch.setattr(cifar10, "_TRAIN", 80)
    monkeypatch.setattr(cifar10, "_VALIDATION", 40)
    for part, count in (("train", 12), ("test", 3)):
        for label in range(10):
            folder = tmp_path / "images" / part / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.full((32, 32, 3), 25 * label, np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "images"


@pytest.fixture
def folder_of_text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "1.txt").write_bytes(TEXT[:5000])
    (folder / "2.txt").write_bytes(TEXT[5000:])
    return folder


def test_cifar10_reads_small_images_of_both_parts(images: Path) -> None:
    setup = cifar10._setup(Options(data=images))
    batches = list(setup.epoch(0))
    assert [(tuple(x.shape), len(labels)) for x, labels in batches] == [((64, 3, 16, 16), 64)]
    gray = torch.tensor(cifar10._STD) * batches[0][0][:, :, 8, 8] + torch.tensor(cifar10._MEAN)
    expected = (25 / 255 * batches[0][1].float())[:, None].expand(-1, 3)
    torch.testing.assert_close(gray, expected)


def test_cifar10_learns_and_reports_validation_images(images: Path, tmp_path: Path) -> None:
    name = parse_run_name("SGDCPR_ws10_60steps_warmup5_seed1")
    result = train(TASKS["cifar10"], name, tmp_path / "results", Options(data=images))
    assert result["accuracy"] > 50
    assert result["validation_accuracy"] > 50


def test_cifar10_names_missing_folders_and_classes(images: Path) -> None:
    with pytest.raises(CannotTrain, match="train/CLASS"):
        cifar10._setup(Options())
    with pytest.raises(FileNotFoundError):
        cifar10._setup(Options(data=images / "train"))
    with pytest.raises(CannotTrain, match="expected 10 folders of classes with at least 1000"):
        cifar10._images(images / "train", 1000)


def test_windows_of_a_text_are_followed_by_their_targets(folder_of_text: Path) -> None:
    held_out = int(0.05 * len(TEXT))
    inputs, targets = next(text._setup(Options(data=folder_of_text)).epoch(0))
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
    assert one.shape == (1, 256, 64)
    torch.testing.assert_close(one[:, :, :40], two[:, :, :40])
    assert not torch.allclose(one[:, :, 40:], two[:, :, 40:])


def test_evaluation_of_a_text_is_the_mean_over_its_bytes(folder_of_text: Path) -> None:
    setup = text._setup(Options(data=folder_of_text))
    held_out = int(0.05 * len(TEXT))
    data = torch.tensor(list(TEXT[-held_out:]))
    model = setup.model.eval()
    with torch.no_grad():
        found = setup.evaluate(model)
        losses, correct = [], []
        for start in range(0, held_out - 64, 64):
            window = data[start : start + 65]
            logits = model(window[None, :-1])[0].T.double()
            losses.append(functional.cross_entropy(logits, window[1:], reduction="none"))
            correct.append(logits.argmax(1) == window[1:])
    assert found["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx(100 * torch.cat(correct).double().mean().item())


def test_text_is_learned(folder_of_text: Path, tmp_path: Path) -> None:
    name = parse_run_name("AdamCPR_ws20_60steps_warmup10_seed1")
    result = train(TASKS["text"], name, tmp_path / "results", Options(data=folder_of_text))
    assert result["accuracy"] > 50  # the text repeats one sentence


def test_text_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match="--data is missing"):
        text._setup(Options())
    with pytest.raises(CannotTrain, match=r"expected \.txt files"):
        text._setup(Options(data=tmp_path))
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_bytes(TEXT[:1000])
    with pytest.raises(CannotTrain, match="expected at least 1300 bytes of text, got 1000"):
        text._setup(Options(data=tmp_path / "short"))
    (tmp_path / "short" / "a.txt").write_bytes(TEXT[:1300])
    text._read.cache_clear()
    assert text._setup(Options(data=tmp_path / "short")).model is not None


def test_digest_of_a_text_is_that_of_the_files_it_reads(folder_of_text: Path) -> None:
    task = TASKS["text"]
    before = data_digest(folder_of_text, task.data_folders, task.data_suffix)
    length = len(text._read(folder_of_text))
    (folder_of_text / "vision-results").mkdir()
    for name in ("vision-results/history.csv", "notes.md", "._1.txt"):
        (folder_of_text / name).write_text("other")
    text._read.cache_clear()
    assert data_digest(folder_of_text, task.data_folders, task.data_suffix) == before
    assert len(text._read(folder_of_text)) == length
    (folder_of_text / "more").mkdir()
    (folder_of_text / "more" / "3.txt").write_text("more")
    text._read.cache_clear()
    assert data_digest(folder_of_text, task.data_folders, task.data_suffix) != before
    assert len(text._read(folder_of_text)) == length + 4


# Choice of settings

DECAYS = ("weight decay", axis_values("weight_decay", (0.1, 1.0)))
SWEEP = Sweep(
    "two",
    "two methods",
    "cifar10",
    (
        grid("AdamW", DECAYS, ("", {"": {}}), "AdamW", methods="panel"),
        grid("CPR", ("", {"default": {}}), ("", {"": {}}), "AdamCPR"),
    ),
    seeds=(1, 2, 3),
)


def write_results(results: Path, numbers: dict[str, list[tuple[float, float] | None]]) -> None:
    """Write validation and test accuracy of each run's seeds; None is a diverged run."""
    task = TASKS["cifar10"]
    for name, values in numbers.items():
        for seed, value in zip(SWEEP.seeds, values):
            run: RunName = dataclasses.replace(parse_run_name(name), seed=seed)
            folder = run_folder(results, task, run)
            folder.mkdir(parents=True)
            result = {"run": str(run), "settings": {}, "metric": "accuracy", "seconds": 1.0}
            if value is None:
                result["diverged"] = 3
            else:
                result |= {"validation_accuracy": value[0], "accuracy": value[1], "loss": 1.0, "step": 9}
            (folder / "result.json").write_text(json.dumps(result))


def test_setting_is_chosen_by_validation_and_compared_on_test_data(tmp_path: Path) -> None:
    tests, others = (70.0, 71.0, 73.0), (74.0, 75.0, 75.5)
    write_results(
        tmp_path,
        {
            "AdamW_wd0p1": [(80.0, value) for value in tests],  # best on validation, not on test data
            "AdamW_wd1": [(79.0, 90.0)] * 3,
            "AdamCPR": [(10.0, value) for value in others],
        },
    )
    table = compare_methods(SWEEP, tmp_path)
    assert table["method"].tolist() == ["AdamW", "CPR, default"]
    assert table["run"][0] == "AdamW_wd0p1"
    assert table["mean"].tolist() == pytest.approx([np.mean(tests), np.mean(others)])
    # Welch's interval for means, with the Welch-Satterthwaite degrees of freedom.
    v1, v2 = (np.var(x, ddof=1) / 3 for x in (tests, others))
    degrees = (v1 + v2) ** 2 / (v1**2 / 2 + v2**2 / 2)
    half = t.ppf(0.975, degrees) * math.sqrt(v1 + v2)
    difference = np.mean(others) - np.mean(tests)
    own = table.iloc[1]
    assert own["difference"] == pytest.approx(difference)
    assert (own["low"], own["high"]) == pytest.approx((difference - half, difference + half))
    assert own["p"] == pytest.approx(2 * t.sf(difference / math.sqrt(v1 + v2), degrees))
    assert table.iloc[0][["difference", "low", "high", "p"]].isna().all()


def test_setting_with_a_diverged_run_is_not_chosen(tmp_path: Path) -> None:
    write_results(
        tmp_path,
        {
            "AdamW_wd0p1": [(80.0, 70.0), (80.0, 71.0), (80.0, 72.0)],
            "AdamW_wd1": [(99.0, 70.0), (99.0, 71.0), None],
            "AdamCPR": [(80.0, 70.0), None, None],
        },
    )
    table = compare_methods(SWEEP, tmp_path)
    assert table["run"].tolist() == ["AdamW_wd0p1", ""]
    assert table["setting"].tolist() == ["0.1", "none"]
    assert table["n"].tolist() == [3, 0]
    assert table["p"].isna().all()


def test_setting_with_fewer_runs_is_not_chosen(tmp_path: Path) -> None:
    runs = {"AdamW_wd0p1": [(80.0, 70.0), (80.0, 71.0)], "AdamW_wd1": [(99.0, 70.0)]}
    write_results(tmp_path, runs)
    assert compare_methods(SWEEP, tmp_path)["run"][0] == "AdamW_wd0p1"


def test_methods_without_results_have_no_numbers(tmp_path: Path) -> None:
    table = compare_methods(SWEEP, tmp_path)
    assert table["n"].tolist() == [0, 0]
    assert table["mean"].isna().all()


def test_method_is_compared_with_the_one_it_names(tmp_path: Path) -> None:
    no_lines = ("", {"": {}})
    panels = (
        grid("SGD", DECAYS, no_lines, "SGD", methods="panel"),
        grid("AdamW", DECAYS, no_lines, "AdamW", methods="panel"),
        grid("CPR", no_lines, no_lines, "AdamCPR", methods="panel", compared_with="AdamW"),
    )
    sweep = Sweep("three", "three methods", "cifar10", panels, seeds=SWEEP.seeds)
    values = [(80.0, 70.0), (80.0, 71.0), (80.0, 72.0)]
    numbers = {"SGD_wd1": 50.0, "AdamW_wd1": 70.0, "AdamCPR": 73.0}
    write_results(
        tmp_path, {name: [(a, b - 71 + mean) for a, b in values] for name, mean in numbers.items()}
    )
    table = compare_methods(sweep, tmp_path).set_index("method")
    assert table["compared_with"].tolist() == ["", "SGD", "AdamW"]
    assert table["difference"].tolist()[1:] == pytest.approx([20, 3])
    with pytest.raises(ValueError, match="panel 'CPR': compared_with 'Muon' is no method of three"):
        dataclasses.replace(
            sweep, panels=(*panels[:2], dataclasses.replace(panels[2], compared_with="Muon"))
        )


def test_columns_are_methods_compared_with_the_same_column(tmp_path: Path) -> None:
    steps = ("steps", {"200": {"steps": 200}, "600": {}})
    panels = (
        grid("SGD", DECAYS, steps, "SGD", methods="columns", compared_with="SGD"),
        grid("CPR", ("", {"": {}}), steps, "SGDCPR", methods="columns", compared_with="SGD"),
    )
    sweep = Sweep("lengths", "two lengths", "cifar10", panels, seeds=SWEEP.seeds)
    means = {
        "SGD_wd0p1_200steps": 10.0,
        "SGD_wd1_200steps": 20.0,
        "SGD_wd0p1": 40.0,
        "SGD_wd1": 30.0,
        "SGDCPR_200steps": 21.0,
        "SGDCPR": 42.0,
    }
    write_results(tmp_path, {name: [(m, m - 1), (m, m), (m, m + 1)] for name, m in means.items()})
    table = compare_methods(sweep, tmp_path)
    methods = ["SGD, 200 steps", "SGD, 600 steps"]
    assert table["method"].tolist() == [*methods, "CPR, 200 steps", "CPR, 600 steps"]
    assert table["setting"].tolist() == ["1", "0.1", "", ""]
    assert table["compared_with"].tolist() == ["", "", *methods]
    assert table["difference"].tolist()[2:] == pytest.approx([1, 2])
    assert table["difference"].isna().tolist() == [True, True, False, False]
    assert table["p"][2] == pytest.approx(2 * 0.2879, abs=1e-3)  # two comparisons
    other = grid("CPR", ("", {"": {}}), ("steps", {"300": {}}), "SGDCPR", compared_with="SGD")
    with pytest.raises(ValueError, match="'SGD' is no method of lengths with the same columns"):
        dataclasses.replace(sweep, panels=(panels[0], other))
