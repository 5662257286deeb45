"""Signals to the processes of a study, with a shell script in place of nnUNetv2_train."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil
import pytest

from nnunet_cpr.nnunet.commands import CommandStopped
from nnunet_cpr.nnunet.commands import run as run_command
from nnunet_cpr.nnunet.processes import record_stop_signals
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies.local_and_slurm import Local
from nnunet_cpr.studies.state import Stage, StudyPaths, claim, is_running, state_of
from nnunet_cpr.studies.study import Run
from nnunet_cpr.studies.worker import Worker
from tests.studies.study_run import wait_for

SAVING = """
sleep 1000 &
echo $! > child
trap 'sleep 0.3; echo saved > state; exit 143' TERM
echo > started
while :; do sleep 0.05; done
"""


EPOCH = """
stamp='2026-01-02 03:04:05.678901:'
printf "$stamp Epoch 0 \\n$stamp Epoch time: 5 s \\n" > '{}/training_log_2026_1_2.txt'
"""


@contextmanager
def signals_when(condition: Callable[[], bool], *numbers: signal.Signals) -> Iterator[None]:
    """Send signals to this process once a condition holds."""

    def send() -> None:
        wait_for(condition)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def child_runs(tmp_path: Path) -> bool:
    try:
        child = psutil.Process(int((tmp_path / "child").read_text()))
        return child.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("executor", "number"),
    [
        ("job", signal.SIGTERM),
        ("job", signal.SIGUSR2),
        ("pool", signal.SIGTERM),
        ("pool", signal.SIGINT),
    ],
)
def test_signal_waits_for_the_state_of_the_training(
    run: Run, paths: StudyPaths, training: Callable, tmp_path: Path, executor: str, number: int
) -> None:
    training(SAVING)
    before = signal.getsignal(number)
    with signals_when((tmp_path / "started").exists, number):
        if executor == "job":
            with pytest.raises(SystemExit) as stopped:
                Worker(run, paths, "cpu")()
            assert stopped.value.code == 128 + number
        else:
            stopping = []
            with pytest.raises(KeyboardInterrupt) as interrupted:
                Local(device="cpu").run([run], paths, {}, lambda: None, lambda: stopping.append(1))
            assert getattr(interrupted.value, "status", 130) == 128 + number and stopping == [1]
    assert (tmp_path / "state").exists()
    wait_for(lambda: not child_runs(tmp_path))
    assert not is_running(run, paths) and state_of(run, paths).stage is not Stage.FAILED
    assert signal.getsignal(number) is before


def test_stubborn_command_is_killed_by_a_second_interrupt(training: Callable, tmp_path: Path) -> None:
    training("trap '' TERM; echo > started; while :; do sleep 0.05; done")
    start, log = time.monotonic(), tmp_path / "log"
    with (
        signals_when((tmp_path / "started").exists, signal.SIGINT, signal.SIGINT),
        record_stop_signals() as request,
        pytest.raises(CommandStopped),
    ):
        run_command(["nnUNetv2_train"], log, os.environ, request=request, stop_seconds=500)
    assert time.monotonic() - start < 400


def test_killed_command_leaves_no_processes(training: Callable, tmp_path: Path) -> None:
    training("sleep 1000 & echo $! > child; echo Epoch 3; kill -9 $$")
    with pytest.raises(
        Refusal, match=r"was killed, perhaps out of memory, see .*; its last lines: Epoch 3"
    ):
        run_command(["nnUNetv2_train"], tmp_path / "log", os.environ)
    assert not child_runs(tmp_path)


def test_ranks_that_outlive_the_command_save_their_state(
    run: Run, paths: StudyPaths, training: Callable, tmp_path: Path
) -> None:
    training("(echo > started; sleep 1; echo saved > state; sleep 0.2) & trap 'exit 143' TERM; wait")
    worker = Worker(run, paths, "cpu", options=("-num_gpus", "2"))
    with signals_when((tmp_path / "started").exists, signal.SIGTERM), pytest.raises(SystemExit):
        worker()
    assert (tmp_path / "state").exists()


class Requeued(BaseException):
    """Raised in place of submitit's exit after it has requeued a job."""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Return a function that sets the state of this Slurm job; submitit's handler is replaced."""

    def requeue(number: int, frame: FrameType | None) -> None:
        raise Requeued

    def set_state(state: str) -> None:
        program = tmp_path / "slurm" / "squeue"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\n[ "$3" = --jobs=7 ] && echo {state}\n')
        program.chmod(0o755)

    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", f"{tmp_path / 'slurm'}:{os.environ['PATH']}")
    before = signal.signal(signal.SIGUSR2, requeue)
    yield set_state
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    ("numbers", "state", "end"),
    [
        ((signal.SIGUSR2,), "", Requeued),
        ((signal.SIGTERM,), "RUNNING", Requeued),
        ((signal.SIGTERM,), "", SystemExit),
    ],
)
def test_slurm_job_requeues_unless_cancelled(
    run: Run, paths: StudyPaths, training: Callable, slurm: Callable, tmp_path: Path, numbers, state, end
) -> None:
    training(SAVING)
    slurm(state)
    with signals_when((tmp_path / "started").exists, *numbers), pytest.raises(end):
        Worker(run, paths, "cpu")()
    assert (tmp_path / "state").exists()
    with claim(run, paths) as ours:
        assert ours


@pytest.mark.parametrize(("epoch", "end"), [("", Refusal), (EPOCH, Requeued)])
def test_second_job_without_progress_at_its_limit_has_failed(
    run: Run, paths: StudyPaths, training: Callable, slurm: Callable, tmp_path: Path, epoch: str, end
) -> None:
    worker = Worker(run, paths, "cpu")
    for expected in (Requeued, end):
        (tmp_path / "started").unlink(missing_ok=True)
        training(epoch.format(run.folder(paths.results)) + SAVING)
        epoch = epoch.replace("Epoch 0", "Epoch 1").replace("2.txt", "3.txt")
        with signals_when((tmp_path / "started").exists, signal.SIGUSR2), pytest.raises(expected):
            worker()
        worker = worker.checkpoint().function
    has_failed = state_of(run, paths).stage is Stage.FAILED
    assert has_failed == (end is Refusal)
    assert has_failed == ("give a longer --time" in state_of(run, paths).reason)


def test_refused_requeue_is_the_reason_of_the_failure(
    run: Run, paths: StudyPaths, training: Callable, slurm: Callable, tmp_path: Path
) -> None:
    training(SAVING)
    signal.signal(signal.SIGUSR2, lambda *_: subprocess.run(["false"], check=True))
    refused = pytest.raises(subprocess.CalledProcessError)
    with signals_when((tmp_path / "started").exists, signal.SIGUSR2), refused:
        Worker(run, paths, "cpu")()
    state = state_of(run, paths)
    assert state.stage is Stage.FAILED and "'false'" in state.reason
