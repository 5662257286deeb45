"""Steps and time left of a study."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnunet_cpr.studies.definition import Run, Study
from nnunet_cpr.studies.estimates import (
    Measured,
    TimeLeft,
    iteration_seconds,
    steps_left,
    time_left,
)
from nnunet_cpr.studies.run_state import Stage, State

SGD, CPR = "nnUNetTrainerSGD_10epochs", "nnUNetTrainerCPR_10epochs"
LOG = "2026-01-01 10:00:00.0: Epoch {epoch}\n2026-01-01 10:00:00.0: Epoch time: {seconds} s\n"
NOTHING = Measured()


def run(fold: int, trainer: str = SGD, dataset: str = "Dataset001_A") -> Run:
    return Run(dataset, "3d_fullres", "nnUNetPlans", fold, trainer)


def running(epoch: int, seconds: float | None, epochs: int | None = 10) -> State:
    return State(Stage.RUNNING, epoch, epochs, epoch_seconds=seconds)


WAITING = State(Stage.WAITING, epochs=10)


def test_waiting_runs_take_as_long_as_running_ones() -> None:
    found = {run(0): running(4, 60.0), run(1): WAITING, run(2): WAITING}
    assert time_left(found, 1, NOTHING) == TimeLeft((6 + 10 + 10) * 60)
    assert time_left(found, 2, NOTHING) == TimeLeft((6 + 10) * 60)
    assert time_left(found, 3, NOTHING) == TimeLeft(10 * 60)
    assert str(time_left(found, 1, NOTHING)) == "about 0:26:00 of training left"


def test_same_trainer_is_preferred_to_others() -> None:
    done = State(Stage.DONE, 10, 10, epoch_seconds=1.0)
    found = {run(0, SGD): done, run(0, CPR): done, run(1, SGD): WAITING}
    found[run(0, CPR)] = State(Stage.DONE, 10, 10, epoch_seconds=100.0)
    assert time_left(found, 1, NOTHING).seconds == pytest.approx(10)
    found[run(2, f"{CPR}_seed3")] = WAITING  # another seed of the same trainer
    assert time_left(found, 1, NOTHING).seconds == pytest.approx(10 + 1000)


def test_other_trainers_are_scaled_by_their_iterations() -> None:
    found = {run(0): running(10, 50.0), run(1, "nnUNetTrainerSGD_4epochs_25iters"): WAITING}
    found[run(1, "nnUNetTrainerSGD_4epochs_25iters")] = State(Stage.WAITING, epochs=4)
    assert time_left(found, 1, NOTHING).seconds == pytest.approx(4 * 5)


def test_runs_without_an_estimate_are_counted() -> None:
    found = {run(0): running(4, 60.0), run(0, dataset="Dataset002_B"): WAITING}
    left = time_left(found, 1, NOTHING)
    assert left == TimeLeft(360, 1)
    assert str(left) == "about 0:06:00 of training left, 1 run without an estimate"
    assert str(time_left({run(0): WAITING, run(1): WAITING}, 1, NOTHING)) == "2 runs without an estimate"
    assert str(time_left({run(0): running(4, 60.0, None)}, 1, NOTHING)) == "1 run without an estimate"
    assert str(time_left({run(0): State(Stage.DONE, 10, 10)}, 1, NOTHING)) == ""


def test_number_of_epochs_of_finished_runs_is_used() -> None:
    found = {run(0, "Theirs"): State(Stage.DONE, 7, None, epoch_seconds=2.0)}
    found[run(1, "Theirs")] = State(Stage.WAITING)
    assert time_left(found, 1, NOTHING) == TimeLeft(14)


def test_steps_left_are_those_of_unfinished_runs() -> None:
    found = {run(0): State(Stage.DONE, 10, 10), run(1): running(4, 60.0), run(2, CPR): WAITING}
    assert steps_left(found) == ((6 + 10) * 250, 0)
    found[run(3, "nnUNetTrainerSGD_4epochs_25iters")] = State(Stage.FAILED, 1, 4)
    found[run(3, "Theirs")] = State(Stage.STOPPED, 3, None)
    assert steps_left(found) == ((6 + 10) * 250 + 3 * 25, 1)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e30, -1.0, 0.0])
def test_damaged_times_are_ignored(seconds: float) -> None:
    found = {run(0): running(4, seconds), run(1): State(Stage.STOPPED, 1, 10, epoch_seconds=3.0)}
    assert time_left(found, 1, NOTHING) == TimeLeft(27 + 18)


def write_fold(results: Path, of: Run, seconds: list[float]) -> None:
    fold = of.folder(results)
    fold.mkdir(parents=True)
    lines = (LOG.format(epoch=epoch, seconds=each) for epoch, each in enumerate(seconds))
    (fold / "training_log_2026_1_1_10_00_00.txt").write_text("".join(lines))


def test_logs_of_other_studies_are_used(tmp_path: Path) -> None:
    study = Study("s", ["Dataset001_A"], [SGD], folds=[0])
    write_fold(tmp_path, run(3, CPR), [20.0, 30.0, 100.0])
    write_fold(tmp_path, run(3, CPR, "Dataset002_B"), [1.0])
    other_plans = Run("Dataset001_A", "3d_fullres", "Others", 0, SGD)
    write_fold(tmp_path, other_plans, [1.0])
    earlier = iteration_seconds(study, tmp_path)
    assert time_left({run(0): WAITING}, 1, earlier).seconds == pytest.approx(300)
