"""``nnunet-cpr study run --dry-run``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nnunet_cpr.studies.run_state import StudyPaths, claim
from tests.helpers.study_run import StudyRun
from tests.helpers.workspace import PLANS

SGD = "nnUNetTrainerSGD_10epochs_4iters_seed77"
CPR = "nnUNetTrainerCPR_ws4_10epochs_4iters_seed77"
LOG = "2026-01-01 10:00:00.0: Epoch {epoch}\n2026-01-01 10:00:00.0: Epoch time: 12.0 s\n"


def snapshot(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def mine(study: Callable[..., StudyRun], tmp_path: Path) -> StudyRun:
    """Return a study with a results folder of its own, which does not exist yet."""
    mine: StudyRun = study("previewed", [SGD, CPR], [0, 1])
    mine.environment["nnUNet_results"] = str(tmp_path / "results")
    return mine


def write_fold(mine: StudyRun, trainer: str, fold: int, epochs: int) -> None:
    """Write the log of a stopped training."""
    model = f"{trainer}__{PLANS}__3d_fullres"
    folder = Path(mine.environment["nnUNet_results"]) / mine.space.dataset / model / f"fold_{fold}"
    folder.mkdir(parents=True)
    lines = "".join(LOG.format(epoch=epoch) for epoch in range(epochs))
    (folder / "training_log_2026_1_1_10_00_00.txt").write_text(lines)


def test_dry_run_changes_no_file(mine: StudyRun) -> None:
    before = snapshot(mine.space.folder)
    said = mine.run("--dry-run", "--device", "cpu").splitlines()
    assert snapshot(mine.space.folder) == before
    assert not Path(mine.environment["nnUNet_results"]).exists()
    runs, last = said[:-1], said[-1]
    assert len(runs) == 4 and all(line.endswith(": waiting, epoch 0 of 10") for line in runs)
    assert runs[1] == (
        f"nnUNetv2_train {mine.space.dataset} 3d_fullres 0 -tr {CPR} -p {PLANS}: waiting, epoch 0 of 10"
    )
    assert last == "0 of 4 done; 160 training steps left"


def test_dry_run_shows_the_state_of_each_run_and_the_time_left(mine: StudyRun) -> None:
    write_fold(mine, SGD, 0, epochs=5)
    write_fold(mine, CPR, 1, epochs=4)
    results = Path(mine.environment["nnUNet_results"])
    paths = StudyPaths(results, results / "studies" / "previewed")
    by_trainer = {(run.trainer, run.fold): run for run in mine.study().runs()}
    paths.logs.mkdir(parents=True)
    paths.failure(by_trainer[CPR, 1]).write_text("out of memory\n")
    with claim(by_trainer[SGD, 0], paths):
        said = mine.preview()
    assert said.count("waiting, epoch 0 of 10") == 2
    assert "running, epoch 5 of 10" in said and "failed, epoch 4 of 10" in said
    assert "0 of 4 done, 1 running, 1 failed; 124 training steps left" in said  # 31 epochs
    assert "about 0:06:12 of training left (1 run at a time, validation not included)" in said
    assert "about 0:03:12 of training left (2 runs at a time" in mine.preview("--jobs", "2")


def test_runs_without_a_number_of_epochs_are_counted(mine: StudyRun, tmp_path: Path) -> None:
    code = (
        "from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer\n"
        "class Theirs(nnUNetTrainer): pass\n"
    )
    (tmp_path / "theirs.py").write_text(code)
    mine.environment["nnUNet_extTrainer"] = str(tmp_path)
    mine.set_trainers(["Theirs"])
    said = mine.run("--dry-run")
    assert "0 training steps left, without 2 runs whose number of epochs is unknown" in said


def test_unprepared_data_set_shows_the_first_commands(mine: StudyRun, tmp_path: Path) -> None:
    mine.environment["nnUNet_preprocessed"] = str(tmp_path / "preprocessed")
    said = mine.preview("--plans", "nnUNetPlans")
    commands = [line.split()[1] for line in said.splitlines() if line.startswith("first: ")]
    expected = ["extract_fingerprint", "plan_experiment", "preprocess"]
    assert commands == [f"nnUNetv2_{name}" for name in expected]
    assert not (tmp_path / "preprocessed").exists()


def test_dry_run_refuses_what_run_refuses(mine: StudyRun, tmp_path: Path) -> None:
    assert "fold 9: Dataset901_Phantoms has folds 0 to 4 only" in mine.refusal(
        "--dry-run", "--folds", "9"
    )
    assert "data set 77: expected one" in mine.refusal("--dry-run", "-d", "77")
    assert "unknown configuration 2d_x" in mine.refusal("--dry-run", "-c", "2d_x")
    raw = tmp_path / "raw" / mine.space.dataset
    shutil.copytree(Path(mine.environment["nnUNet_raw"]) / mine.space.dataset, raw)
    next(iter((raw / "labelsTr").iterdir())).unlink()
    unprepared = {"nnUNet_raw": str(tmp_path / "raw"), "nnUNet_preprocessed": str(tmp_path / "none")}
    mine.environment.update(unprepared)
    said = mine.refusal("--dry-run", "--plans", "nnUNetPlans")
    assert "expected at least 5 training cases for nnU-Net's 5 folds, got 4" in said
