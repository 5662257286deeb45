"""State of a run from its files, its lock and its processes."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nnunet_cpr.nnunet.fold_files import RESOURCES
from nnunet_cpr.nnunet.processes import StopRequest
from nnunet_cpr.nnunet.run_record import RunRecord
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies.state import (
    Stage,
    StudyPaths,
    add_seconds,
    claim,
    record_process,
    state_of,
    stop_command,
)
from nnunet_cpr.studies.status import steps_left, time_left
from nnunet_cpr.studies.study import Run
from nnunet_cpr.studies.worker import Worker
from tests.reports.folds import write_json, write_log


@pytest.fixture
def fold(run: Run, paths: StudyPaths) -> Path:
    folder = run.folder(paths.results)
    (folder / "validation").mkdir(parents=True)
    return folder


def finish(fold: Path, dice: float = 0.5, cases: tuple[str, ...] = ("a", "b")) -> None:
    torch.save({"a": torch.zeros(10)}, fold / "checkpoint_final.pth")
    values = [
        {"prediction_file": f"/there/{case}.nii.gz", "metrics": {"1": {"Dice": dice}}} for case in cases
    ]
    summary = {"foreground_mean": {"Dice": dice}, "metric_per_case": values}
    (fold / "validation" / "summary.json").write_text(json.dumps(summary))


def set_age(path: Path, seconds: float) -> None:
    os.utime(path, (1e9 - seconds, 1e9 - seconds))


def test_new_run_is_waiting_or_queued(run: Run, paths: StudyPaths) -> None:
    assert state_of(run, paths).stage is Stage.WAITING
    assert state_of(run, paths, frozenset({run.key})).stage is Stage.QUEUED
    assert state_of(run, paths).epochs == 10


def test_progress_is_that_of_the_log(run: Run, paths: StudyPaths, fold: Path) -> None:
    write_log(fold, {epoch: (-0.1, -0.2, 0.1 * epoch, 12.0) for epoch in range(2)})
    with claim(run, paths) as ours:
        assert ours
        state = state_of(run, paths)
    assert (state.stage, state.progress) == (Stage.RUNNING, "2/10")
    assert state.pseudo_dice == pytest.approx(0.1)
    assert state_of(run, paths).stage is Stage.STOPPED


def test_whole_result_is_done_without_checkpoints(run: Run, paths: StudyPaths, fold: Path) -> None:
    finish(fold, 0.75)
    assert state_of(run, paths).dice == 0.75
    (fold / "checkpoint_final.pth").unlink()
    assert state_of(run, paths).dice == 0.75
    result = fold / "validation" / "summary.json"
    result.write_bytes(result.read_bytes()[:-9])
    assert state_of(run, paths).stage is not Stage.DONE
    finish(fold, math.nan)  # of a class that is in neither the reference nor the prediction
    assert state_of(run, paths).stage is Stage.DONE


@pytest.mark.parametrize(
    ("checkpoints", "is_done"),
    [
        ({"latest": 10}, True),  # seconds before the validation
        ({"latest": -10}, False),
        ({"best": -10}, False),
        ({"latest": -10, "final": 10}, True),
        ({"final": -10}, True),  # which nnU-Net would validate again
        ({"torn final": -10}, False),
        ({"torn final": 10}, True),
        ({"latest": -10, "torn final": 10}, False),
    ],
)
def test_result_before_a_checkpoint_of_an_unfinished_training_is_not_done(
    run: Run, paths: StudyPaths, fold: Path, checkpoints: dict[str, float], is_done: bool
) -> None:
    finish(fold)
    set_age(fold / "validation" / "summary.json", 0)
    whole = (fold / "checkpoint_final.pth").read_bytes()
    (fold / "checkpoint_final.pth").unlink()
    for name, seconds in checkpoints.items():
        path = fold / f"checkpoint_{name.removeprefix('torn ')}.pth"
        path.write_bytes(whole[:-30] if name.startswith("torn") else whole)
        set_age(path, seconds)
    assert (state_of(run, paths).stage is Stage.DONE) == is_done


@pytest.mark.parametrize("place", ["record", "nnU-Net", "neither"])
def test_result_without_all_cases_of_the_fold_is_not_done(
    run: Run, paths: StudyPaths, fold: Path, place: str, tmp_path: Path
) -> None:
    """The study's record of the splits comes before nnU-Net's file, which may have changed since."""
    paths = replace(paths, preprocessed=tmp_path / "preprocessed")
    splits = [{"train": ["d"], "val": ["a", "b", "c"]}]
    if place == "record":
        write_json(paths.splits, {run.dataset: splits})
        splits = [{"train": ["d"], "val": ["a", "b"]}]
    if place != "neither":
        write_json(paths.preprocessed / run.dataset / "splits_final.json", splits)
    finish(fold)
    assert (state_of(run, paths).stage is Stage.DONE) == (place == "neither")
    finish(fold, cases=("a", "b", "c"))
    assert state_of(run, paths).stage is Stage.DONE


def test_results_without_checkpoints_are_neither_trained_nor_changed(
    run: Run, paths: StudyPaths, fold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were copied from where they were trained."""
    finish(fold)
    (fold / "checkpoint_final.pth").unlink()
    result = (fold / "validation" / "summary.json").read_bytes()
    monkeypatch.setattr(Worker, "_run_nnunet", lambda *arguments: pytest.fail("trains"))
    assert Worker(run, paths, "cpu")()
    assert (fold / "validation" / "summary.json").read_bytes() == result


def test_damaged_checkpoint_and_earlier_result_are_set_aside(
    run: Run,
    paths: StudyPaths,
    fold: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    finish(fold, 0.5)
    checkpoint, options = fold / "checkpoint_final.pth", []
    whole, result = checkpoint.read_bytes(), fold / "validation" / "summary.json"
    set_age(result, 10)
    earlier = result.read_bytes()
    checkpoint.write_bytes(whole[:-30])

    def train(self: Worker, request: StopRequest, option: str) -> None:
        options.append(option)
        assert not checkpoint.exists() or option == "--val"
        checkpoint.write_bytes(whole)
        if option == "--val":
            finish(fold, 0.75)

    monkeypatch.setattr(Worker, "_run_nnunet", train)
    assert Worker(run, paths, "cpu")()
    assert options == ["--c", "--val"] and state_of(run, paths).dice == 0.75
    assert (fold / "checkpoint_final.pth.set-aside-1").read_bytes() == whole[:-30]
    assert (fold / "validation" / "summary.json.set-aside-1").read_bytes() == earlier
    assert "summary.json: set aside as summary.json.set-aside-1" in capsys.readouterr().out


def test_checkpoints_that_cannot_be_read_are_kept(
    run: Run, paths: StudyPaths, fold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the disk or the network says nothing about the file."""
    finish(fold)
    (fold / "validation" / "summary.json").unlink()

    def fail(path: Path, *arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("zipfile.is_zipfile", lambda file: False)  # as it answers then
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match=r"Input/output error.*checkpoint_final\.pth"):
        Worker(run, paths)()
    assert (fold / "checkpoint_final.pth").exists()
    assert "Input/output error" in state_of(run, paths).reason


def test_only_one_process_claims_a_run(run: Run, paths: StudyPaths) -> None:
    with claim(run, paths) as ours, claim(run, paths) as second:
        assert ours and not second
        assert not Worker(run, paths)()
    with claim(run, paths) as ours:
        assert ours


def test_training_of_killed_worker_is_running(run: Run, paths: StudyPaths, fold: Path) -> None:
    code = "import time; time.sleep(600)"
    training = subprocess.Popen([sys.executable, "-c", code, run.trainer])
    other = subprocess.Popen([sys.executable, "-c", code])  # has the process number now
    try:
        record_process(run, paths, training.pid)
        assert state_of(run, paths).stage is Stage.RUNNING
        with claim(run, paths) as ours:
            assert not ours
        record_process(run, paths, other.pid)
        assert state_of(run, paths).stage is Stage.WAITING
        record_process(run, paths, training.pid)
    finally:
        for process in (training, other):
            process.kill()
            process.wait()
    assert state_of(run, paths).stage is Stage.WAITING
    record = json.loads((fold / ".study_running.json").read_text())
    assert record["host"] == socket.gethostname()


def test_failure_keeps_the_end_of_its_log(run: Run, paths: StudyPaths, training: Callable) -> None:
    training("echo reading; echo 'out of memory' >&2; exit 3")
    with pytest.raises(Refusal, match="nnUNetv2_train failed"):
        Worker(run, paths, "cpu")()
    state = state_of(run, paths)
    assert state.stage is Stage.FAILED and state.reason.endswith("reading | out of memory")


def test_worker_records_the_time_of_all_attempts(
    run: Run, paths: StudyPaths, fold: Path, training: Callable
) -> None:
    Path("done/validation").mkdir(parents=True)
    finish(Path("done"), 0.9)
    training(f"echo $CUDA_VISIBLE_DEVICES: $@; sleep 1; cp -r done/* {fold}")
    worker = Worker(run, paths, "cuda", {"CUDA_VISIBLE_DEVICES": "3"})
    assert worker() and state_of(run, paths).dice == 0.9
    seconds = state_of(run, paths).seconds
    assert seconds is not None and seconds >= 1
    said = paths.log(run).read_text().strip()
    expected = f"3: {run.dataset} 3d_fullres 0 --c -tr {run.trainer} -p nnUNetPlans -device cuda"
    assert said == expected
    (fold / "validation" / "summary.json").unlink()
    assert worker()
    assert "--val" in paths.log(run).read_text() and "--c " not in paths.log(run).read_text()
    assert (state_of(run, paths).seconds or 0) > seconds


@pytest.mark.parametrize("seconds", ["NaN", "1e999", "null"])
def test_time_that_is_no_number_is_unknown(
    run: Run, paths: StudyPaths, fold: Path, seconds: str
) -> None:
    finish(fold)
    (fold / RESOURCES).write_text(f'{{"seconds": {seconds}}}')
    states = [state_of(each, paths) for each in (run, replace(run, fold=1))]
    assert [state.stage for state in states] == [Stage.DONE, Stage.WAITING]
    assert time_left({run: states[0], replace(run, fold=1): states[1]}, 1) is None


@pytest.mark.parametrize(
    ("trained", "planned", "shown"), [(3, 10, "3/10"), (None, 10, "10/10"), (None, 30, "30/30")]
)
def test_training_that_was_ended_early_shows_its_epochs(
    run: Run, paths: StudyPaths, trained: int | None, planned: int, shown: str
) -> None:
    """By its record; a class may have a length of its own."""
    run = replace(run, trainer="nnUNetTrainerCPR_anytime_10epochs")
    folder = run.folder(paths.results)
    (folder / "validation").mkdir(parents=True)
    finish(folder)
    add_seconds(folder, 6.0)
    RunRecord(training={"epochs": planned}, finished_after=trained).write(folder)
    state = state_of(run, paths)
    assert (state.progress, state.seconds) == (shown, 6.0)
    assert steps_left(run, state) == 0


def test_command_of_a_study_is_stopped(run: Run, paths: StudyPaths, fold: Path) -> None:
    """Also one that ignores Ctrl-C, as shells let commands in the background do."""
    code = (
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from pathlib import Path\n"
        "from nnunet_cpr.studies.state import StudyPaths, running_command\n"
        "with running_command(StudyPaths(Path(sys.argv[1]), Path(sys.argv[2]))):\n"
        "    print('runs', flush=True); time.sleep(60)\n"
    )
    paths.study.mkdir(parents=True)
    assert list(stop_command([run], paths)) == []
    command = [sys.executable, "-c", code, str(paths.results), str(paths.study)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "runs\n"
        assert list(stop_command([run], paths)) == [f"stopping the command with process {process.pid}"]
        assert process.wait(timeout=30) == -signal.SIGTERM
    assert list(stop_command([run], paths)) == [] and not list(paths.study.iterdir())


def test_trainings_of_a_killed_command_are_stopped(run: Run, paths: StudyPaths, fold: Path) -> None:
    """Those of another command are named, as that command would take the signal for a failure."""
    paths.study.mkdir(parents=True)
    code = "import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, run.trainer]) as training:
        try:
            with claim(run, paths):
                record_process(run, paths, training.pid)
                with pytest.raises(Refusal, match=f"{run.key}.*end it: kill {os.getpid()}"):
                    list(stop_command([run], paths))
                assert training.poll() is None
            record_process(run, paths, training.pid)  # as if the command had not removed it
            record = fold / ".study_running.json"
            record.write_text(record.read_text().replace('"started": "', '"started": "2'))
            assert list(stop_command([run], paths)) == []  # another process has the number now
            record_process(run, paths, training.pid)
            assert str(training.pid) in "".join(stop_command([run], paths))
            assert training.wait(timeout=30) == -signal.SIGTERM
        finally:
            training.kill()
    assert list(stop_command([run], paths)) == []
