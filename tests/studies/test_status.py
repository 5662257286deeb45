"""Table, training steps and time left of a study, and ``nnunet-cpr study run --dry-run``."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from nnunet_cpr.studies.definition import Run, Study, TrainerEntry
from nnunet_cpr.studies.run_state import Stage, State, StudyPaths, claim
from nnunet_cpr.studies.status import states, status_table, steps_left, summary, time_left
from tests.helpers.study_run import StudyRun
from tests.helpers.workspace import PLANS

SGD = "nnUNetTrainerSGD_10epochs_4iters_seed77"
CPR = "nnUNetTrainerCPR_ws4_10epochs_4iters_seed77"
LOG = "2026-01-01 10:00:00.0: Epoch {epoch}\n2026-01-01 10:00:00.0: Epoch time: 12.0 s\n"
WAITING, DONE = State(Stage.WAITING, epochs=10), State(Stage.DONE, 10, 10, epoch_seconds=60.0)


def run(fold: int, trainer: str = "nnUNetTrainerSGD_10epochs", dataset: str = "Dataset001_A") -> Run:
    return Run(dataset, "3d_fullres", "nnUNetPlans", fold, trainer)


def test_time_left_is_measured_by_finished_runs() -> None:
    running = State(Stage.RUNNING, 4, 10, epoch_seconds=1.0)
    assert time_left({run(0): running, run(1): WAITING}, 1) is None, "no run has finished"
    found = {run(0): DONE, run(1): running, run(2): WAITING}
    assert time_left(found, 1) == timedelta(minutes=16)
    assert time_left(found, 2) == timedelta(minutes=8)
    assert time_left({run(0): DONE}, 1) is None
    with_validation = replace(DONE, seconds=1200.0)
    assert time_left({**found, run(0): with_validation}, 1) == timedelta(minutes=32)
    # The time counts for each training step, and for the same data only.
    fewer_steps = run(3, "nnUNetTrainerCPR_10epochs_25iters")
    assert time_left({run(0): DONE, fewer_steps: WAITING}, 1) == timedelta(minutes=1)
    assert time_left({**found, run(0, dataset="Dataset002_B"): WAITING}, 1) is None


def test_steps_left_are_those_of_unfinished_runs() -> None:
    assert steps_left(run(0), DONE) == 0
    assert steps_left(run(0), State(Stage.RUNNING, 4, 10)) == 6 * 250
    assert steps_left(run(0, "nnUNetTrainerSGD_4epochs_25iters"), State(Stage.FAILED, 1, 4)) == 3 * 25
    assert steps_left(run(0, "Theirs"), State(Stage.STOPPED, 3, None)) is None


def test_table_shows_the_columns_that_differ_and_the_reasons_of_failures(paths: StudyPaths) -> None:
    study = Study("s", ["Dataset001_A"], [TrainerEntry(SGD, "with [CPR]")], SGD, folds=[0, 1])
    paths.logs.mkdir(parents=True)
    paths.failure(next(study.runs())).write_text("nnUNetv2_train failed: out of [memory]\n")
    found = states(study, paths)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(status_table(study, found))
    text = console.export_text()
    assert "0 of 2 done, 1 failed" in text and "out of [memory]" in text and "with [CPR]" in text
    assert "fold" in text and "configuration" not in text
    assert summary(found.values()) == "0 of 2 done, 1 failed"


def test_narrow_terminal_shows_one_line_for_each_trainer() -> None:
    study = Study("s", ["Dataset001_A"], [SGD, CPR], folds=[0, 1], seeds=())
    found = dict.fromkeys(study.runs(), WAITING)
    first, second, third, _ = found
    found[first] = DONE
    found[second] = State(Stage.RUNNING, 10, 10, validated=7)
    found[third] = State(Stage.FAILED, reason="out of memory")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(status_table(study, found, width=80, started=datetime.now() - timedelta(days=2)))
    text = console.export_text()
    assert "1 of 4 done, 1 running, 1 failed" in text and "2 days, 0:0" in text
    rows = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row[1:-1]] for row in rows]
    assert [row[:3] for row in cells] == [
        ["SGD", "1/2", "1 failed"],
        ["CPR_ws4", "0/2", "1 running; fold 0: validating, 7 cases"],
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(status_table(study, found, width=120))
    assert "validating, 7 cases" in console.export_text()


# Dry run


@pytest.fixture
def mine(study: Callable[..., StudyRun], tmp_path: Path) -> StudyRun:
    """Return a study with a results folder of its own, which does not exist yet."""
    mine: StudyRun = study("previewed", [SGD, CPR], [0, 1])
    mine.environment["nnUNet_results"] = str(tmp_path / "results")
    return mine


def test_dry_run_changes_no_file(mine: StudyRun) -> None:
    before = {path: path.stat().st_mtime_ns for path in mine.space.folder.rglob("*")}
    said = mine.run("--dry-run", "--device", "cpu").splitlines()
    assert {path: path.stat().st_mtime_ns for path in mine.space.folder.rglob("*")} == before
    assert not Path(mine.environment["nnUNet_results"]).exists()
    runs, last = said[:-1], said[-1]
    assert len(runs) == 4 and all(line.endswith(": waiting, epoch 0 of 10") for line in runs)
    assert runs[1].startswith(f"nnUNetv2_train {mine.space.dataset} 3d_fullres 0 -tr {CPR} -p {PLANS}:")
    assert last == "0 of 4 done; 160 training steps left"


def test_dry_run_shows_the_state_of_each_run(mine: StudyRun, tmp_path: Path) -> None:
    results = Path(mine.environment["nnUNet_results"])
    paths = StudyPaths(results, results / "studies" / "previewed")
    first, *_, last = mine.study().runs()
    folder = last.folder(results)
    folder.mkdir(parents=True)
    log = "".join(LOG.format(epoch=epoch) for epoch in range(4))
    (folder / "training_log_2026_1_1_10_00_00.txt").write_text(log)
    paths.logs.mkdir(parents=True)
    paths.failure(last).write_text("out of memory\n")
    with claim(first, paths):
        said = mine.preview()
    assert said.count("waiting, epoch 0 of 10") == 2
    assert "running, epoch 0 of 10" in said and "failed, epoch 4 of 10" in said
    assert "0 of 4 done, 1 running, 1 failed; 144 training steps left" in said  # 36 epochs


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


def test_unprepared_data_set_shows_the_first_command(mine: StudyRun, tmp_path: Path) -> None:
    mine.environment["nnUNet_preprocessed"] = str(tmp_path / "preprocessed")
    said = mine.preview("--plans", "nnUNetPlans")
    commands = [line.split()[1] for line in said.splitlines() if line.startswith("first: ")]
    assert commands == ["nnUNetv2_plan_and_preprocess"]
    assert not (tmp_path / "preprocessed").exists()


def test_dry_run_refuses_what_run_refuses(mine: StudyRun) -> None:
    assert "fold 9: Dataset901_Phantoms has folds 0 to 4 only" in mine.refusal(
        "--dry-run", "--folds", "9-9"
    )
    assert "data set 77: expected one" in mine.refusal("--dry-run", "-d", "77")
    assert "unknown configuration 2d_x" in mine.refusal("--dry-run", "-c", "2d_x")
