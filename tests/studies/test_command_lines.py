"""``nnunet-cpr study commands`` and the command that its lines run."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nnunet_cpr.cli import app
from nnunet_cpr.nnunet.commands import CommandStopped
from nnunet_cpr.nnunet.processes import StopRequest
from nnunet_cpr.studies.state import StudyPaths
from nnunet_cpr.studies.study import Run
from nnunet_cpr.studies.worker import Worker
from tests.helpers.workspace import PLANS
from tests.studies.study_run import StudyRun

SGD, CPR = "nnUNetTrainerSGD_1epochs_2iters_seed5", "nnUNetTrainerCPR_ws1_1epochs_2iters_seed5"


@pytest.fixture
def mine(study: Callable[..., StudyRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyRun:
    """Return a study with a results folder of its own."""
    mine: StudyRun = study("lines", [SGD, CPR], [0, 1])
    mine.environment["nnUNet_results"] = str(tmp_path / "results with a space")
    for name, value in mine.environment.items():
        if name.startswith("nnUNet_"):
            monkeypatch.setenv(name, value)
    return mine


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["study", *arguments])


def test_lines_are_the_unfinished_runs(mine: StudyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = next(iter(mine.study().runs()))
    monkeypatch.setattr(
        "nnunet_cpr.studies.finished", lambda run, paths: run if run == finished else None
    )
    lines = invoke("commands", str(mine.file)).stdout.splitlines()
    assert len(lines) == 3
    variables, _, line = lines[-1].partition("nnunet-cpr study ")
    assert f"'nnUNet_results={mine.environment['nnUNet_results']}'" in variables
    assert line == f"run-one lines {mine.space.dataset} 3d_fullres 1 -tr {CPR} -p {PLANS}"
    assert len(invoke("commands", str(mine.file), "--all").stdout.splitlines()) == 4


def test_lines_run_the_study_s_runs(mine: StudyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = []

    def work(worker: Worker) -> bool:
        workers.append(worker)
        return True

    monkeypatch.setattr(Worker, "__call__", work)
    options = ("--device", "cpu", "--npz", "--gpus", "2")
    for line in invoke("commands", str(mine.file), *options).stdout.splitlines():
        words = shlex.split(line)
        assert invoke(*words[words.index("run-one") :]).exit_code == 0
    assert [worker.run.key for worker in workers] == [run.key for run in mine.study().runs()]
    for worker in workers:
        assert worker.paths == StudyPaths.of("lines", mine.environment)
        assert (worker.device, worker.options) == ("cpu", ("--npz", "-num_gpus", "2"))


def test_signalled_run_has_the_signal_s_status(mine: StudyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Worker, request: StopRequest) -> None:
        signal.raise_signal(signal.SIGUSR2)
        raise CommandStopped

    monkeypatch.setattr(Worker, "train", stop)
    run = Run(mine.space.dataset, "3d_fullres", PLANS, 0, SGD)
    done = invoke("run-one", "lines", run.dataset, "3d_fullres", "0", "-tr", SGD, "-p", PLANS)
    assert done.exit_code == 128 + signal.SIGUSR2
    assert len(done.stderr.splitlines()) == 1 and "stopped; run the same command" in done.stderr
