"""Plans of the runs of a study, which must not change between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies.plans_and_weights import check_plans
from nnunet_cpr.studies.study import Study

DATA = "Dataset001_A"


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    return {name: str(tmp_path / name) for name in ("nnUNet_results", "nnUNet_preprocessed")}


def write_plans(file: Path, **settings: Any) -> None:
    low = {"batch_size": 2, "patch_size": [32], **settings}
    file.parent.mkdir(parents=True, exist_ok=True)
    plans = {"configurations": {"3d_fullres": {"inherits_from": "low"}, "low": low, "2d": settings}}
    file.write_text(json.dumps(plans))


@pytest.mark.parametrize(
    ("settings", "epoch", "changed"),
    [
        ({}, "latest", ""),
        ({"only_in_this_version": 1}, "latest", ""),
        ({"patch_size": [16], "batch_size": 4}, "latest", "batch_size, patch_size"),
        ({"patch_size": [16]}, "final", "patch_size"),
        ({"patch_size": [16]}, "", ""),  # nothing has begun
    ],
)
def test_plans_that_have_changed_since_a_run_began_are_refused(
    settings: dict[str, Any], epoch: str, changed: str, folders: dict[str, str]
) -> None:
    study = Study("s", [DATA], ["nnUNetTrainerSGD"], folds=[0, 1], seeds=[1, 2])
    fold = next(study.runs()).folder(Path(folders["nnUNet_results"]))
    write_plans(fold.parent / "plans.json")
    fold.mkdir()
    if epoch:
        torch.save({}, fold / f"checkpoint_{epoch}.pth")
    write_plans(Path(folders["nnUNet_preprocessed"]) / DATA / "nnUNetPlans.json", **settings)
    if not changed:
        check_plans(study, folders)
        return
    expected = rf"nnUNetPlans\.json: {changed} of 3d_fullres changed since nnUNetTrainerSGD_seed1__"
    with pytest.raises(Refusal, match=expected):
        check_plans(study, folders)


def test_finished_study_may_have_plans_that_have_changed(folders: dict[str, str]) -> None:
    study = Study("s", [DATA], ["nnUNetTrainerSGD"], folds=[0])
    fold = next(study.runs()).folder(Path(folders["nnUNet_results"]))
    write_plans(fold.parent / "plans.json")
    (fold / "validation").mkdir(parents=True)
    cases = [{"prediction_file": "a.nii.gz", "metrics": {"1": {"Dice": 0.8}}}]
    (fold / "validation" / "summary.json").write_text(json.dumps({"metric_per_case": cases}))
    write_plans(Path(folders["nnUNet_preprocessed"]) / DATA / "nnUNetPlans.json", patch_size=[16])
    check_plans(study, folders)
