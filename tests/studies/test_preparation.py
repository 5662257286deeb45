"""Preparation of a study's data."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nnunet_cpr.studies import preparation
from nnunet_cpr.studies.definition import Study, StudyError, TrainerEntry


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
        if command[0] == "nnUNetv2_plan_experiment":
            plans = {"configurations": {"2d": {"data_identifier": "nnUNetPlans_2d"}}}
            (home / "nnUNetPlans.json").write_text(json.dumps(plans))
        if command[0] == "nnUNetv2_preprocess":
            for case in "abcdefghij":
                (home / "gt_segmentations" / f"{case}.nii.gz").touch()
                for suffix in (".b2nd", "_seg.b2nd", ".pkl"):
                    (home / "nnUNetPlans_2d" / f"{case}{suffix}").touch()
        running.clear()

    monkeypatch.setattr(preparation, "run", run)
    study = Study("s", ["Dataset001_A"], [TrainerEntry("nnUNetTrainer")], "nnUNetTrainer", (0,), ("2d",))
    with ThreadPoolExecutor(3) as pool:
        args = study, folders, tmp_path / "logs", 1
        for future in [pool.submit(preparation.prepare_study_data, *args) for _ in range(3)]:
            future.result()
    commands = [command.removeprefix("nnUNetv2_") for command in commands]
    assert commands == [
        "extract_fingerprint",
        "plan_experiment",
        "preprocess",
    ]
    assert len(json.loads((home / "splits_final.json").read_text())) == 5


def test_trainers_without_a_seed_and_metrics_without_library_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {n: str(tmp_path / n) for n in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")}
    for folder in folders.values():
        Path(folder).mkdir()
    other = TrainerEntry("nnUNetTrainerDA5")
    study = Study("s", ["Dataset001_A"], [other], other.trainer, (0,), ("2d",), seeds=(1, 2, 3))
    with pytest.raises(StudyError, match="use nnUNetTrainerSGD_on_nnUNetTrainerDA5"):
        preparation.check_study_data(study, folders, 1)
    monkeypatch.setattr(preparation, "find_spec", lambda _: None)
    study = Study("s", ["Dataset001_A"], [other], other.trainer, (0,), ("2d",), metrics=("dice", "nsd"))
    with pytest.warns(UserWarning, match="the report needs MONAI for nsd"), pytest.raises(StudyError):
        preparation.check_study_data(study, folders, 1)  # has no data


@pytest.mark.parametrize("layout", ["listed in dataset.json", "more labels", "without raw data"])
def test_too_few_training_cases_are_refused_before_preprocessing(layout: str, tmp_path: Path) -> None:
    folders = {n: str(tmp_path / n) for n in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")}
    raw, home = (tmp_path / n / "Dataset001_A" for n in ("nnUNet_raw", "nnUNet_preprocessed"))
    description: dict[str, Any] = {"file_ending": ".nii.gz"}
    if layout == "without raw data":
        plans = {"configurations": {"2d": {"data_identifier": "nnUNetPlans_2d"}}}
        files = [home / "gt_segmentations" / f"{case}.nii.gz" for case in "abcd"]
        files += [home / "nnUNetPlans_2d" / f"{case}.pkl" for case in "abcd"]
    else:
        plans = {}
        files = [raw / "labelsTr" / f"{case}.nii.gz" for case in "abcdef"]
        files += [raw / "imagesTr" / f"{case}_000{i}.nii.gz" for case in "abcd" for i in range(2)]
    if layout == "listed in dataset.json":
        description["dataset"] = {case: {"images": [], "label": ""} for case in "abcd"}
        files = [raw / "images" / "a_0000.nii.gz"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    home.mkdir(parents=True, exist_ok=True)
    (home if plans else raw).joinpath("dataset.json").write_text(json.dumps(description))
    if plans:
        (home / "nnUNetPlans.json").write_text(json.dumps(plans))
    entry = TrainerEntry("nnUNetTrainer")
    study = Study("s", ["Dataset001_A"], [entry], entry.trainer, (0, 1), ("2d",))
    with pytest.raises(StudyError, match=r"at least 5 training cases for .* got 4; write a split"):
        preparation.check_study_data(study, folders, 1)
    splits = [{"train": ["a", "b"], "val": ["c", "d"]}, {"train": ["c", "d"], "val": ["a", "b"]}]
    (home / "splits_final.json").write_text(json.dumps(splits))
    preparation.check_study_data(study, folders, 1)
    (home / "splits_final.json").write_text(json.dumps(splits[:1]))
    with pytest.raises(StudyError, match="fold 1: Dataset001_A has folds 0 to 0 only"):
        preparation.check_study_data(study, folders, 1)
