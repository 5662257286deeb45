"""Preparation of a study's data."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies import data as study_data
from nnunet_cpr.studies.study import Study, TrainerEntry


def test_two_studies_do_not_prepare_a_data_set_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {n: str(tmp_path / n) for n in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")}
    raw, home = (tmp_path / n / "Dataset001_A" for n in ("nnUNet_raw", "nnUNet_preprocessed"))
    for folder in (raw, home / "gt_segmentations", home / "nnUNetPlans_2d"):
        folder.mkdir(parents=True)
    for folder in (raw, home):
        (folder / "dataset.json").write_text('{"file_ending": ".nii.gz"}')
    running: list[str] = []
    commands: list[str] = []

    def run(command: Sequence[str], *_: Any) -> None:
        running.append(command[0])
        assert running == [command[0]]
        commands.append(command[0])
        time.sleep(0.2)
        plans = {"configurations": {"2d": {"data_identifier": "nnUNetPlans_2d"}}}
        (home / "nnUNetPlans.json").write_text(json.dumps(plans))
        for case in "abcdefghij" if command[0] == "nnUNetv2_preprocess" else "abcdef":
            (home / "gt_segmentations" / f"{case}.nii.gz").touch()
            for suffix in (".b2nd", "_seg.b2nd", ".pkl"):
                (home / "nnUNetPlans_2d" / f"{case}{suffix}").touch()
        running.clear()

    monkeypatch.setattr(study_data, "run", run)
    study = Study("s", ["Dataset001_A"], [TrainerEntry("nnUNetTrainer")], "nnUNetTrainer", (0,), ("2d",))
    with ThreadPoolExecutor(3) as pool:
        args = study, folders, tmp_path / "logs", 1
        for future in [pool.submit(study_data.prepare_study_data, *args) for _ in range(3)]:
            future.result()
    assert commands == ["nnUNetv2_plan_and_preprocess"]
    (home / "nnUNetPlans_2d" / "a.pkl").unlink()  # as if the preprocessing had been killed
    study_data.prepare_study_data(*args)
    assert commands[1:] == ["nnUNetv2_preprocess"]
    assert len(json.loads((home / "splits_final.json").read_text())) == 5


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """Return nnU-Net's folders with a preprocessed data set of four cases."""
    folders = {n: str(tmp_path / n) for n in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")}
    home = tmp_path / "nnUNet_preprocessed" / "Dataset001_A"
    for name in ("gt_segmentations/{}.nii.gz", "nnUNetPlans_2d/{}.pkl"):
        for case in "abcd":
            file = home / name.format(case)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    plans = {"2d": {"inherits_from": "base"}, "base": {"data_identifier": "nnUNetPlans_2d"}}
    (home / "nnUNetPlans.json").write_text(json.dumps({"configurations": plans}))
    return folders


def study_of(trainer: str, **options: Any) -> Study:
    return Study("s", ["Dataset001_A"], [trainer], folds=(0, 1), configurations=("2d",), **options)


@pytest.mark.parametrize(
    ("trainer", "hint"),
    [
        ("nnUNetTrainer", "write nnUNetTrainerSGD); the study appends _seed<N>;"),
        ("nnUNetTrainerDA5", "write nnUNetTrainerSGD_on_nnUNetTrainerDA5)"),
        ("nnUNetTrainerCPR_seed1", "_seed1 and _seed3 contradict each other"),
    ],
)
def test_trainers_that_take_no_seed_are_refused(data: dict[str, str], trainer: str, hint: str) -> None:
    with pytest.raises(Refusal, match=re.escape(hint)):
        study_data.check_study_data(study_of(trainer, seeds=(1, 2, 3)), data, 1)


def test_data_set_without_enough_cases_needs_a_split_of_its_own(
    data: dict[str, str], tmp_path: Path
) -> None:
    study, logs = study_of("nnUNetTrainer"), tmp_path / "logs"
    with pytest.raises(Refusal, match=r"at least 5 training cases for .* got 4; write a split"):
        study_data.prepare_study_data(study, data, logs, 1)
    splits = tmp_path / "nnUNet_preprocessed" / "Dataset001_A" / "splits_final.json"
    splits.write_text(json.dumps([{"train": ["a", "b"], "val": ["c", "d"]}] * 2))
    study_data.prepare_study_data(study, data, logs, 1)
    splits.write_text(json.dumps([{"train": ["a", "b"], "val": ["c", "d"]}]))
    with pytest.raises(Refusal, match="fold 1: Dataset001_A has folds 0 to 0 only"):
        study_data.check_study_data(study, data, 1)


def test_too_few_cases_are_refused_before_preprocessing(tmp_path: Path) -> None:
    folders = {n: str(tmp_path / n) for n in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")}
    raw, home = (tmp_path / n / "Dataset001_A" for n in ("nnUNet_raw", "nnUNet_preprocessed"))
    for folder in (raw, home):
        folder.mkdir(parents=True)
    (raw / "dataset.json").write_text(json.dumps({"numTraining": 4}))
    study = study_of("nnUNetTrainer")
    with pytest.raises(Refusal, match=r"at least 5 training cases for .* got 4; write a split"):
        study_data.check_study_data(study, folders, 1)
    (home / "splits_final.json").write_text(json.dumps([{"train": ["a", "b"], "val": ["c"]}] * 2))
    assert study_data.check_study_data(study, folders, 1)[0][0] == "nnUNetv2_plan_and_preprocess"


def test_changed_splits_are_refused(data: dict[str, str], tmp_path: Path) -> None:
    splits = tmp_path / "nnUNet_preprocessed" / "Dataset001_A" / "splits_final.json"
    study, record = study_of("nnUNetTrainer"), tmp_path / "splits.json"
    split = [{"train": ["a", "b"], "val": ["c", "d"]}, {"train": ["c", "d"], "val": ["a", "b"]}]
    for _ in range(2):
        splits.write_text(json.dumps(split))
        study_data.check_splits(study, data, record)
    splits.write_text(json.dumps(split[::-1]))
    with pytest.raises(Refusal, match=r"splits_final\.json: has changed since study s began"):
        study_data.check_splits(study, data, record)


def test_notes_name_trainers_that_never_regularize_and_missing_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(study_data.notes(study_of("nnUNetTrainerCPR"))) == []
    assert list(study_data.notes(study_of("nnUNetTrainerSGD_2epochs_5iters"))) == []
    assert list(study_data.notes(study_of("nnUNetTrainerCPR_2epochs_5iters"))) == []
    (note,) = study_data.notes(study_of("nnUNetTrainerCPR_ws1000_2epochs_5iters"))
    assert "would be set at step 1,000, but it trains 10 steps: no matrix is regularized" in note
    monkeypatch.setattr(study_data, "find_spec", lambda name: None)
    (note,) = study_data.notes(study_of("nnUNetTrainerSGD", metrics=("dice", "hd95")))
    assert note.endswith("run: pip install 'nnunet-cpr[surface]'")


@pytest.mark.parametrize(
    ("trainers", "same"),
    [
        (["nnUNetTrainerCPR", "nnUNetTrainerCPR_ws1000"], True),
        (["nnUNetTrainerCPR_mu2_ws1000_seed1", "nnUNetTrainerCPR_l2_mu2_1000epochs_seed1"], True),
        (["nnUNetTrainerAdamW_warmup2000", "nnUNetTrainerAdamW_lr1en2"], True),
        (["nnUNetTrainerCPR", "nnUNetTrainerCPR_ws2000"], False),
        (["nnUNetTrainerCPR_seed1", "nnUNetTrainerCPR_seed2"], False),
        (["nnUNetTrainerCPR_100epochs_50iters", "nnUNetTrainerCPR_50epochs_100iters"], False),
        (["nnUNetTrainerSGD", "nnUNetTrainerCPR"], False),
        (
            ["nnUNetTrainerCPR_on_nnUNetTrainerDA5", "nnUNetTrainerCPR_1000epochs_on_nnUNetTrainerDA5"],
            True,
        ),
        (
            [
                "nnUNetTrainerCPR_on_nnUNetTrainer_5epochs",
                "nnUNetTrainerCPR_1000epochs_on_nnUNetTrainer_5epochs",
            ],
            False,
        ),
    ],
)
def test_two_spellings_of_a_training_are_noted(trainers: list[str], same: bool) -> None:
    study = Study("mine", ["Dataset001_A"], [TrainerEntry(name) for name in trainers])
    notes = [note for note in study_data.notes(study) if "spelled" in note]
    expected = f"{trainers[1]}: the same training as {trainers[0]}, spelled differently; leave one out"
    assert notes == ([expected] if same else [])
