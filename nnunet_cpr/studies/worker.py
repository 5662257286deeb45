"""Work of one job: train a run with nnU-Net's own command, then validate it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import submitit

from nnunet_cpr._files import atomic_write
from nnunet_cpr.nnunet import commands
from nnunet_cpr.nnunet.commands import CommandFailed, CommandStopped, last_lines
from nnunet_cpr.nnunet.fold_files import CHECKPOINTS, FINAL_CHECKPOINT, is_complete_checkpoint
from nnunet_cpr.nnunet.stop_signals import StopRequest, record_stop_signals
from nnunet_cpr.studies.definition import Run
from nnunet_cpr.studies.resource_usage import ResourceUsage
from nnunet_cpr.studies.run_state import (
    StudyPaths,
    claim,
    progress,
    record_process,
    validation_dice,
)

_MAX_IDLE_ATTEMPTS = 2
"""Jobs in a row that may reach their time limit without finishing an epoch."""


@dataclass
class Worker:
    """Callable that trains and validates one run; an executor sends it to a job.

    SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C stop nnU-Net with SIGTERM, which the trainers of this package
    answer by writing a checkpoint. A Slurm job then requeues unless Slurm has cancelled or requeued it.

    Attributes:
        run: the run.
        paths: the study's folders.
        device: nnU-Net's ``-device``; None selects a GPU if there is one.
        environment: environment variables to set for nnU-Net.
        options: further options of ``nnUNetv2_train``.
        stop_seconds: time that nnU-Net has to end after SIGTERM.
        time_limit: seconds until the signal before a Slurm job's time limit; None without a limit.
        idle_attempts: number of jobs in a row that have reached their time limit without progress.
    """

    run: Run
    paths: StudyPaths
    device: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    stop_seconds: float = 60.0
    time_limit: float | None = None
    idle_attempts: int = 0

    def __call__(self) -> str:
        """Train, or continue an earlier attempt, and validate.

        Returns:
            "done", or "busy" if another process works on the run.

        Raises:
            CommandFailed: nnU-Net failed; the end of its log is kept for ``study status``.
            OSError: a file cannot be written; the error is kept as well if possible.
            SystemExit: a signal has stopped the training; its status is 128 + signal.
        """
        start, before = time.monotonic(), self._progress()
        with record_stop_signals() as request:
            try:
                return self._work(request)
            except CommandStopped:
                pass
        # Outside of the context, because submitit's handler of the signal requeues and exits.
        reached_limit = self.time_limit is not None and time.monotonic() - start > 0.8 * self.time_limit
        is_idle = reached_limit and self._progress() == before
        self.idle_attempts = self.idle_attempts + 1 if is_idle else 0
        self._end_stopped_job(request)

    def _work(self, request: StopRequest) -> str:
        try:
            with claim(self.run, self.paths) as claimed:
                if not claimed:
                    return "busy"
                self.paths.failure(self.run).unlink(missing_ok=True)
                self._train_and_validate(request)
                return "done"
        except CommandFailed as error:
            log = self.paths.log(self.run)
            lines = last_lines(log, 5) if log.exists() else []
            self._record_failure([*lines, str(error).split(": ")[0]])
            raise
        except OSError as error:
            self._record_failure([str(error)])
            raise

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Return the job to submit at the time limit; submitit calls the method by this name."""
        return submitit.helpers.DelayedSubmission(self)

    def command(self, option: str) -> list[str]:
        """Return the command that trains (``--c``) or validates (``--val``)."""
        run = self.run
        return [
            *("nnUNetv2_train", run.dataset, run.configuration, str(run.fold), option),
            *("-tr", run.trainer, "-p", run.plans, "-device", self.nnunet_device()),
            *self.options,
        ]

    def nnunet_device(self) -> str:
        """Return nnU-Net's ``-device``."""
        return self.device or _default_device()

    def _progress(self) -> tuple[int, bool]:
        """Return the number of finished epochs, and True if the training is complete."""
        fold = self.run.folder(self.paths.results)
        return progress(fold).epochs, is_complete_checkpoint(fold / FINAL_CHECKPOINT)

    def _end_stopped_job(self, request: StopRequest) -> NoReturn:
        """Requeue the job if this is for it to do, and exit."""
        if _must_requeue(request):
            if self.idle_attempts >= _MAX_IDLE_ATTEMPTS:
                reason = (
                    "time limit: expected a new epoch or the end of the validation in each job, got "
                    f"neither in {self.idle_attempts} jobs; give a longer --time"
                )
                self._record_failure([reason])
            else:
                try:
                    signal.raise_signal(_requeue_signal())
                except (subprocess.SubprocessError, OSError) as error:
                    self._record_failure([f"requeue: {error}"])
                    raise
        raise SystemExit(request.status)

    def _train_and_validate(self, request: StopRequest) -> None:
        fold = self.run.folder(self.paths.results)
        remove_incomplete_checkpoints(fold)
        if not (fold / FINAL_CHECKPOINT).exists():
            (fold / "validation" / "summary.json").unlink(missing_ok=True)  # of an earlier training
            self._run_nnunet("--c", request)  # starts from scratch if there is no checkpoint
        if validation_dice(fold) is None:
            self._run_nnunet("--val", request)
        if validation_dice(fold) is None:
            raise CommandFailed(
                f"nnUNetv2_train: expected {fold / 'validation' / 'summary.json'}, got none; "
                f"see {self.paths.log(self.run)}"
            )

    def _run_nnunet(self, option: str, request: StopRequest) -> None:
        usage = ResourceUsage(self.run.folder(self.paths.results))
        training = 0

        def on_start(pid: int) -> None:
            nonlocal training
            training = pid
            record_process(self.run, self.paths, pid, self.environment.get("CUDA_VISIBLE_DEVICES"))

        log = self.paths.log(self.run)
        if log.exists():
            os.replace(log, log.with_suffix(".before.log"))
        try:
            commands.run(
                self.command(option),
                log,
                {**os.environ, **self.environment},
                on_wait=lambda: usage.measure(training),
                on_start=on_start,
                request=request,
                stop_seconds=self.stop_seconds,
                has_ranks="-num_gpus" in self.options,
            )
        finally:
            usage.save()

    def _record_failure(self, lines: list[str]) -> None:
        failure = self.paths.failure(self.run)
        failure.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(failure) as temporary:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="replace")


def remove_incomplete_checkpoints(fold: Path) -> None:
    """Remove checkpoints that nnU-Net was writing when it was stopped and could not load.

    Raises:
        OSError: one cannot be read; it is not removed.
    """
    for name in CHECKPOINTS:
        path = fold / name
        if path.exists():
            with open(
                path, "rb"
            ) as file:  # zipfile takes a file that it cannot read for a truncated one
                file.seek(-min(path.stat().st_size, 2**16), os.SEEK_END)
                file.read()
            if not is_complete_checkpoint(path):
                path.unlink()


def _requeue_signal() -> signal.Signals:
    """Return the signal whose handler by submitit requeues a Slurm job."""
    return signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]


def _must_requeue(request: StopRequest) -> bool:
    """Return True if this is a Slurm job that nobody has cancelled or requeued.

    Slurm sends SIGTERM in three cases: before preemption, when the job still runs and is lost if it
    ends by itself; to a job that it has requeued; and to a cancelled job, which must not come back.
    """
    is_slurm = os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
    if not is_slurm or not callable(signal.getsignal(_requeue_signal())):
        return False
    if _requeue_signal() in request.signals:
        return True
    number = os.environ.get("SLURM_JOB_ID", "")
    query = ["squeue", "--noheader", "--format=%T", f"--jobs={number}"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.strip() == "RUNNING"


def _default_device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
