"""Runs of a study that were made from something else, by their records."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from nnunet_cpr.nnunet.run_record import RunRecord, read_record
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.studies import data as study_data
from nnunet_cpr.studies.plans_and_weights import record_run
from nnunet_cpr.studies.state import StudyPaths
from nnunet_cpr.studies.study import Study, TrainerEntry
from tests.reports.folds import DATASET, study, write_fold

A, B = "nnUNetTrainerCPR_seed1", "nnUNetTrainerSGD_seed1"
CASES = [f"case{number}" for number in range(10)]
SPLITS = [
    {"train": CASES[5:], "val": CASES[:5]},
    {"train": CASES[:5], "val": CASES[5:]},
]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """Folders of nnU-Net with two validated folds of two trainers, without records."""
    folders = {n: str(tmp_path / n) for n in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")}
    home = tmp_path / "nnUNet_preprocessed" / DATASET
    (home / "gt_segmentations").mkdir(parents=True)
    (home / "dataset.json").write_text(json.dumps({"file_ending": ".nii.gz"}))
    for case in (*CASES, "scan_0.5mm"):
        (home / "gt_segmentations" / f"{case}.nii.gz").touch()
    write_splits(tmp_path, SPLITS)
    for trainer in (A, B):
        for fold, split in enumerate(SPLITS):
            write_fold(
                Path(folders["nnUNet_results"]),
                trainer,
                fold,
                scores(split["val"]),
            )
    return folders


def scores(cases: Iterable[str]) -> dict[str, dict[str, float]]:
    return {case: {"1": 0.5, "2": 0.6} for case in cases}


def write_splits(tmp_path: Path, splits: object) -> None:
    file = tmp_path / "nnUNet_preprocessed" / DATASET / "splits_final.json"
    file.write_text(json.dumps(splits))


def fold_of(folders: dict[str, str], trainer: str, fold: int) -> Path:
    model = f"{trainer}__nnUNetPlans__3d_fullres"
    return Path(folders["nnUNet_results"]) / DATASET / model / f"fold_{fold}"


def flaws(of: Study, folders: dict[str, str]) -> list[str]:
    results, home = (Path(folders[name]) for name in ("nnUNet_results", "nnUNet_preprocessed"))
    return [f"{flaw.run.fold}: {flaw.warning}" for flaw in read_results(of, results, None, home).flaws]


def test_runs_on_other_cases_are_refused_and_have_no_verdict(
    folders: dict[str, str], tmp_path: Path
) -> None:
    of = study(A, B)
    study_data.check_cases(of, folders)  # nothing is known
    assert flaws(of, folders) == []
    for fold, split in enumerate(SPLITS):
        RunRecord(A, DATASET, split=split).write(fold_of(folders, A, fold))
    study_data.check_cases(of, folders)
    assert flaws(of, folders) == []
    write_splits(tmp_path, [{"train": split["train"][:2], "val": split["val"]} for split in SPLITS])
    with pytest.raises(
        Refusal, match=r"its cases are not those of .*: training cases: expected 2, got 5"
    ):
        study_data.check_cases(of, folders)
    assert flaws(of, folders) == [
        f"{fold}: training cases: expected 2, got 5 of its fold" for fold in (0, 1)
    ]


def test_weights_that_have_seen_validation_cases_are_told_and_have_no_verdict(
    folders: dict[str, str], tmp_path: Path
) -> None:
    """Also before a run begins, from the record beside the weights."""
    for fold, split in enumerate(SPLITS):
        RunRecord(A, DATASET, split=split).write(fold_of(folders, A, fold))
    weights = fold_of(folders, A, 0) / "checkpoint_final.pth"
    of = Study("s", [DATASET], [TrainerEntry(B, pretrained=str(weights))], folds=[0, 1])
    paths = StudyPaths.of("s", folders)
    (line,) = study_data.seen_cases(of, paths)
    assert "fold_1: its" in line and "trained on 5 of the 5 validation cases, such as case5" in line
    run = next(run for run in of.runs() if run.fold == 1)
    weights.touch()
    record_run(run, paths)
    record = read_record(run.folder(paths.results))
    assert record is not None and record.leaked == CASES[5:] and record.split == SPLITS[1]
    write_fold(paths.results, run.trainer, 1, scores(SPLITS[1]["val"]))
    (flaw,) = flaws(of, folders)
    assert flaw.startswith("1: its pretrained weights were trained on 5 of the 5 validation cases")


def test_validation_of_another_checkpoint_has_no_verdict(folders: dict[str, str]) -> None:
    fold, validated = fold_of(folders, A, 0), {"checkpoint": "checkpoint_best.pth", "epochs": 3}
    RunRecord(A, DATASET, split=SPLITS[0], validated=validated).write(fold)
    assert flaws(study(A, B), folders) == ["0: validated with checkpoint_best.pth of 3 epochs"]
    RunRecord(A, DATASET, validated={**validated, "checkpoint": "checkpoint_final.pth"}).write(fold)
    assert flaws(study(A, B), folders) == []


@pytest.mark.parametrize(
    ("fold", "words"),
    [
        (
            {"train": ["case0.nii.gz"], "val": ["case1"]},
            "unknown case, such as case0.nii.gz; write",
        ),
        (
            {"train": CASES, "val": ["case1"]},
            "1 of the 1 validation cases are trained on, such",
        ),
        ({"train": CASES, "val": []}, "the fold has no validation cases"),
        ({"train": CASES}, "expected train and val of fold 0, got KeyError"),
        ({"train": CASES[1:], "val": ["case0", "scan_0.5mm"]}, ""),
    ],
)
def test_folds_that_are_written_wrongly_are_refused(
    fold: dict[str, list[str]], words: str, folders: dict[str, str], tmp_path: Path
) -> None:
    write_splits(tmp_path, [fold])
    of = study(A, folds=(0,))
    if not words:
        study_data._check_folds(of, DATASET, folders)
        return
    with pytest.raises(Refusal, match=words):
        study_data._check_folds(of, DATASET, folders)


def test_class_that_has_changed_between_runs_is_told(folders: dict[str, str]) -> None:
    for fold, lr in enumerate((0.01, 0.02)):
        RunRecord(A, DATASET, training={"lr": lr, "seed": fold}).write(fold_of(folders, A, fold))
    assert flaws(study(A, B), folders) == ["1: it differs from other runs of its trainer in lr"]


def test_runs_with_other_given_plans_are_told(folders: dict[str, str]) -> None:
    """Plans that a trainer changes in memory, which nnU-Net keeps, are not compared."""
    given = {"patch_size": [8, 8, 8]}
    for trainer, patch in ((A, [8, 8, 8]), (B, [16, 16, 16])):
        for fold in (0, 1):
            kept = {"configurations": {"3d_fullres": {"patch_size": patch}}}
            (fold_of(folders, trainer, fold).parent / "plans.json").write_text(json.dumps(kept))
            RunRecord(trainer, DATASET, plans=given).write(fold_of(folders, trainer, fold))
    assert flaws(study(A, B), folders) == []
    RunRecord(B, DATASET, plans={"patch_size": [9, 9, 9]}).write(fold_of(folders, B, 1))
    assert flaws(study(A, B), folders) == [
        "1: its nnUNetPlans differ from those of other runs in patch_size"
    ]
