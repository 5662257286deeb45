"""``nnunet-cpr study run --dry-run``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nnunet_cpr.studies import dry_run
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


def write_fold(mine: StudyRun, trainer: str, fold: int, epochs: int, checkpoint: int | None) -> Path:
    """Write the log of a stopped training, and a checkpoint of an earlier epoch."""
    model = f"{trainer}__{PLANS}__3d_fullres"
    folder = Path(mine.environment["nnUNet_results"]) / mine.space.dataset / model / f"fold_{fold}"
    folder.mkdir(parents=True)
    lines = "".join(LOG.format(epoch=epoch) for epoch in range(epochs))
    (folder / "training_log_2026_1_1_10_00_00.txt").write_text(lines)
    if checkpoint is not None:
        content = {"network_weights": {"a": torch.zeros(10)}, "current_epoch": checkpoint}
        torch.save(content, folder / "checkpoint_latest.pth")
    return folder


def test_dry_run_changes_no_file(mine: StudyRun) -> None:
    before = snapshot(mine.space.folder)
    said = mine.run("--dry-run", "--device", "cpu")
    assert snapshot(mine.space.folder) == before
    assert not Path(mine.environment["nnUNet_results"]).exists()
    assert said.count("new") == 4 and "4 runs, 0 of them exist already, 0 are done" in said
    assert "time: unknown; add --measure" in said
    assert "disk space: about" in said and "needed" in said


def test_dry_run_shows_what_each_run_would_do(mine: StudyRun) -> None:
    write_fold(mine, SGD, 0, epochs=5, checkpoint=3)
    write_fold(mine, CPR, 0, epochs=2, checkpoint=None)
    failed = write_fold(mine, CPR, 1, epochs=5, checkpoint=4)
    results = Path(mine.environment["nnUNet_results"])
    paths = StudyPaths(results, results / "studies" / "previewed")
    by_trainer = {(run.trainer, run.fold): run for run in mine.study().runs()}
    paths.logs.mkdir(parents=True)
    paths.failure(by_trainer[CPR, 1]).write_text("out of memory\n")
    with claim(by_trainer[SGD, 1], paths):
        said = mine.preview()
    for action in (
        *("continues from epoch 3", "starts again, no checkpoint", "failed, continues from epoch 4"),
        *("running, epoch 0", "4 runs, 4 of them exist already, 0 are done"),
    ):
        assert action in said
    # Epochs left: 7 of fold 0 and 10 of the others without a checkpoint, 6 of the failed run.
    assert "about 0:06:36 of training left (1 run at a time" in said
    assert "about 0:03:24 of training left (2 runs at a time" in mine.preview("--jobs", "2")
    shutil.copyfile(failed / "checkpoint_latest.pth", failed / "checkpoint_final.pth")
    assert "failed, validates" in mine.preview()


def test_many_runs_are_counted_by_trainer(mine: StudyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "_MOST_LINES", 3)
    write_fold(mine, SGD, 0, epochs=5, checkpoint=3)
    lines = [line.replace("┃", "│").split("│") for line in mine.preview().splitlines()]
    table = {line[1].strip(): [cell.strip() for cell in line[2:-1]] for line in lines if len(line) > 2}
    assert table == {"trainer": ["continues", "new"], SGD: ["1", "1"], CPR: ["0", "2"]}


def test_little_disk_space_is_a_warning(mine: StudyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "warning" not in mine.preview()
    monkeypatch.setattr(dry_run, "free_bytes", lambda folder: 1000)
    assert "warning: not enough disk space" in mine.preview()


@pytest.mark.slow
def test_measurement_gives_the_time_and_leaves_nothing(mine: StudyRun, tmp_path: Path) -> None:
    before = snapshot(mine.space.folder)
    (tmp_path / "tmp").mkdir()
    mine.environment["TMPDIR"] = str(tmp_path / "tmp")
    said = mine.run("--dry-run", "--measure", "--device", "cpu")
    assert "of training left (1 run at a time, validation not included)" in said
    assert "without an estimate" not in said and "--measure" not in said
    assert snapshot(mine.space.folder) == before
    assert not Path(mine.environment["nnUNet_results"]).exists()
    assert list((tmp_path / "tmp").glob("nnunet-cpr-*")) == []


def test_measurement_needs_a_dry_run(mine: StudyRun) -> None:
    assert "--measure: expected --dry-run as well" in mine.refusal("--measure")


def test_failed_measurement_is_reported_in_one_line(mine: StudyRun, tmp_path: Path) -> None:
    code = (
        "from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer\n"
        "class TheirBroken(nnUNetTrainer):\n"
        "    def initialize(self):\n        raise ValueError('broken on purpose')\n"
    )
    (tmp_path / "broken.py").write_text(code)
    mine.environment["nnUNet_extTrainer"] = str(tmp_path)
    mine.set_trainers(["TheirBroken"])
    said = mine.refusal("--dry-run", "--measure", "--device", "cpu")
    expected = f"nnunet-cpr: --measure: TheirBroken on {mine.space.dataset} failed: "
    assert said.strip() == f"{expected}ValueError: broken on purpose"


def test_unprepared_data_set_shows_the_first_commands(mine: StudyRun, tmp_path: Path) -> None:
    mine.environment["nnUNet_preprocessed"] = str(tmp_path / "preprocessed")
    said = mine.preview("--plans", "nnUNetPlans")
    commands = [line.split()[1] for line in said.splitlines() if line.startswith("first: ")]
    expected = ["extract_fingerprint", "plan_experiment", "preprocess"]
    assert commands == [f"nnUNetv2_{name}" for name in expected]
    assert "an estimate needs preprocessed data" in said and "disk space: unknown" in said
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
