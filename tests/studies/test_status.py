"""Table, training steps and time left of a study, and ``nnunet-cpr study run --dry-run``."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from nnunet_cpr.studies.state import Stage, State, StudyPaths, claim
from nnunet_cpr.studies.status import dry_run_lines, states, status_table, summary, time_left
from nnunet_cpr.studies.study import Run, Study, TrainerEntry
from tests.reports.folds import write_log
from tests.studies.study_run import StudyRun

SGD = "nnUNetTrainerSGD_10epochs_4iters_seed77"
CPR = "nnUNetTrainerCPR_ws4_10epochs_4iters_seed77"
WAITING, DONE = State(Stage.WAITING, epochs=10), State(Stage.DONE, 10, 10, seconds=600.0)


def run(fold: int, trainer: str = "nnUNetTrainerSGD_10epochs", dataset: str = "Dataset001_A") -> Run:
    return Run(dataset, "3d_fullres", "nnUNetPlans", fold, trainer)


def test_one_validated_case_is_in_the_singular() -> None:
    assert State(Stage.RUNNING, 10, 10, validated=1).activity == "validating, 1 case"


def test_time_left_is_measured_by_finished_runs() -> None:
    running = State(Stage.RUNNING, 4, 10)
    assert time_left({run(0): running, run(1): WAITING}, 1) is None, "no run has finished"
    found = {run(0): DONE, run(1): running, run(2): WAITING}
    assert time_left(found, 1) == timedelta(minutes=16)
    assert time_left(found, 2) == timedelta(minutes=8)
    assert time_left({run(0): DONE}, 1) is None
    # The time counts for each training step, and for the same data only.
    fewer_steps = run(3, "nnUNetTrainerCPR_10epochs_25iters")
    assert time_left({run(0): DONE, fewer_steps: WAITING}, 1) == timedelta(minutes=1)
    assert time_left({**found, run(0, dataset="Dataset002_B"): WAITING}, 1) is None


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
        ["CPR_ws4", "0/2", "1 running; fold 0: epoch 10/10, validating, 7 cases"],
    ]


# Dry run


def test_dry_run_warns_of_bounds_after_the_end(paths: StudyPaths) -> None:
    study = Study("s", ["Dataset001_A"], ["nnUNetTrainerCPR_ws1000_2epochs_5iters"], folds=[0])
    first, *_ = dry_run_lines(study, paths, [])
    assert first.startswith("warning: ") and "would be set at step 1,000, but it trains 10" in first


@pytest.fixture
def mine(study: Callable[..., StudyRun], tmp_path: Path) -> StudyRun:
    """Return a study with a results folder of its own, which does not exist yet."""
    mine: StudyRun = study("previewed", [SGD, CPR], [0, 1])
    mine.environment["nnUNet_results"] = str(tmp_path / "results")
    return mine


def test_dry_run_shows_the_state_of_each_run(mine: StudyRun, tmp_path: Path) -> None:
    results = Path(mine.environment["nnUNet_results"])
    paths = StudyPaths(results, results / "studies" / "previewed")
    first, *_, last = mine.study().runs()
    write_log(last.folder(results), {epoch: (-0.1, -0.2, 0.5, 12.0) for epoch in range(4)})
    paths.logs.mkdir(parents=True)
    paths.failure(last).write_text("out of memory\n")
    with claim(first, paths):
        said = mine.command("run", "--dry-run")
    assert said.count("waiting, epoch 0/10") == 2
    assert "running, epoch 0/10" in said and "failed, epoch 4/10" in said
    assert "0 of 4 done, 1 running, 1 failed; 144 training steps left" in said  # 36 epochs
    assert "with 2 folds and 1 seed there is no verdict" in said
