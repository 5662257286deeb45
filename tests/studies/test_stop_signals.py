"""Signals to the processes of a study, with a shell script in place of nnUNetv2_train."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil
import pytest
import typer

from nnunet_cpr.cli._errors import report_errors
from nnunet_cpr.nnunet.commands import CommandFailed, CommandStopped
from nnunet_cpr.nnunet.commands import run as run_command
from nnunet_cpr.nnunet.stop_signals import (
    StopRequest,
    block_interrupts,
    raise_on_termination,
    record_stop_signals,
)
from nnunet_cpr.studies.definition import Run
from nnunet_cpr.studies.run_state import Stage, StudyPaths, claim, is_running, state_of
from nnunet_cpr.studies.worker import Worker

SAVING = """
sleep 1000 &
echo $! > child
trap 'sleep 0.3; echo saved > state; exit 143' TERM
echo > started
while :; do sleep 0.05; done
"""
STUBBORN = "trap '' TERM; echo > started; while :; do sleep 0.05; done"
EPOCH = r"2026-01-01 10:00:00.0: Epoch %s\n2026-01-01 10:00:00.0: Epoch time: 5 s\n"


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a shell script nnU-Net's command."""

    def install(script: str) -> None:
        program = tmp_path / "bin" / "nnUNetv2_train"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "bin"))
    return install


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@contextmanager
def signals_when(condition: Callable[[], bool], *numbers: signal.Signals) -> Iterator[None]:
    """Send signals to this process once a condition holds."""

    def send() -> None:
        wait_until(condition)
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_signal_waits_for_the_state_of_the_training(
    run: Run, paths: StudyPaths, training: Callable, tmp_path: Path, number: signal.Signals
) -> None:
    training(SAVING)
    before = signal.getsignal(number)
    with signals_when((tmp_path / "started").exists, number), pytest.raises(SystemExit) as stopped:
        Worker(run, paths, "cpu")()
    assert stopped.value.code == 128 + number
    assert (tmp_path / "state").exists()
    wait_until(lambda: not child_runs(tmp_path))
    assert not is_running(run, paths) and state_of(run, paths).stage is not Stage.FAILED
    with claim(run, paths) as ours:
        assert ours
    assert signal.getsignal(number) is before


def test_stubborn_command_is_killed_after_the_limit(training: Callable, tmp_path: Path) -> None:
    training(STUBBORN)
    with (
        signals_when((tmp_path / "started").exists, signal.SIGTERM),
        record_stop_signals() as request,
        pytest.raises(CommandStopped),
    ):
        run_command(["nnUNetv2_train"], tmp_path / "log", os.environ, request=request, stop_seconds=0.2)


def test_ranks_that_outlive_the_command_save_their_state(
    run: Run, paths: StudyPaths, training: Callable, tmp_path: Path
) -> None:
    training("(echo > started; sleep 1; echo saved > state; sleep 0.2) & trap 'exit 143' TERM; wait")
    worker = Worker(run, paths, "cpu", options=("-num_gpus", "2"))
    with signals_when((tmp_path / "started").exists, signal.SIGTERM), pytest.raises(SystemExit):
        worker()
    assert (tmp_path / "state").exists()


def test_second_interrupt_kills_at_once(training: Callable, tmp_path: Path) -> None:
    training(STUBBORN)
    start = time.monotonic()
    with (
        signals_when((tmp_path / "started").exists, signal.SIGINT, signal.SIGINT),
        record_stop_signals() as request,
        pytest.raises(CommandStopped),
    ):
        run_command(["nnUNetv2_train"], tmp_path / "log", os.environ, request=request, stop_seconds=500)
    assert time.monotonic() - start < 400


def test_nothing_starts_after_a_request(training: Callable, tmp_path: Path) -> None:
    training("echo > started")
    request = StopRequest()
    request.signals.append(signal.SIGTERM)
    with pytest.raises(CommandStopped):
        run_command(["nnUNetv2_train"], tmp_path / "log", os.environ, request=request)
    assert not (tmp_path / "started").exists()


def test_training_ended_by_a_foreign_signal_has_failed(
    run: Run, paths: StudyPaths, training: Callable
) -> None:
    training("exit 143")
    with pytest.raises(CommandFailed, match="was killed by SIGTERM"):
        Worker(run, paths, "cpu")()
    assert state_of(run, paths).stage is Stage.FAILED


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
        ((signal.SIGTERM, signal.SIGUSR2), "", Requeued),  # of preemption in some clusters
        ((signal.SIGTERM,), "RUNNING", Requeued),
        ((signal.SIGTERM,), "COMPLETING", SystemExit),  # after scancel and scontrol requeue
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


@pytest.mark.parametrize("makes_progress", [True, False])
def test_job_without_progress_at_its_limit_is_not_requeued_forever(
    run: Run, paths: StudyPaths, training: Callable, slurm: Callable, tmp_path: Path, makes_progress
) -> None:
    fold = run.folder(paths.results)
    fold.mkdir(parents=True)
    epoch = f"""
        n=$(ls {fold} | grep -c log)
        printf "{EPOCH}" "$n" > {fold}/training_log_2026_1_1_10_00_0$n.txt
    """
    training((epoch if makes_progress else "") + SAVING)
    worker = Worker(run, paths, "cpu", time_limit=0.01)
    ends: list[type[BaseException]] = []
    while len(ends) < 3 and SystemExit not in ends:
        (tmp_path / "started").unlink(missing_ok=True)
        with (
            signals_when((tmp_path / "started").exists, signal.SIGUSR2),
            pytest.raises((Requeued, SystemExit)) as ended,
        ):
            worker()
        ends.append(ended.type)
        worker = worker.checkpoint().function
    if makes_progress:
        assert ends == [Requeued] * 3
    else:
        assert ends == [Requeued, SystemExit]
        assert "give a longer --time" in state_of(run, paths).reason[0]


def test_refused_requeue_is_the_reason_of_the_failure(
    run: Run, paths: StudyPaths, training: Callable, slurm: Callable, tmp_path: Path
) -> None:
    training(SAVING)

    def refuse(number: int, frame: FrameType | None) -> None:
        subprocess.run(["false"], check=True)

    signal.signal(signal.SIGUSR2, refuse)
    with (
        signals_when((tmp_path / "started").exists, signal.SIGUSR2),
        pytest.raises(subprocess.CalledProcessError),
    ):
        Worker(run, paths, "cpu")()
    assert state_of(run, paths).reason[0].startswith("requeue: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_termination_of_a_command_is_one_line(number: signal.Signals, capsys) -> None:
    def work() -> None:
        with report_errors(interrupted="stopped; run it again"):
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(number)  # does not disturb the clean-up

    with pytest.raises(typer.Exit) as ended:
        work()
    assert ended.value.exit_code == 128 + number
    assert capsys.readouterr().err == "nnunet-cpr: stopped; run it again\n"


def test_interrupts_are_blocked_for_new_processes() -> None:
    code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    command = [sys.executable, "-S", "-c", code]
    with block_interrupts():
        blocked = subprocess.run(command, capture_output=True, text=True).stdout
    assert (blocked, subprocess.run(command, capture_output=True, text=True).stdout) == (
        "True\n",
        "False\n",
    )


@pytest.mark.parametrize("handlers", [raise_on_termination, record_stop_signals])
def test_forked_process_dies_of_a_signal(handlers: Callable) -> None:
    """A pool of nnU-Net waits for its processes after it has sent them SIGTERM."""
    fork = multiprocessing.get_context("fork")
    started = fork.Event()

    def wait() -> None:
        started.set()
        time.sleep(600)

    with handlers():
        process = fork.Process(target=wait)
        process.start()
        assert started.wait(300)
        process.terminate()
        process.join(300)
    assert process.exitcode == -signal.SIGTERM
