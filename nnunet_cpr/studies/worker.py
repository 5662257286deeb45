"""Work of one job: train a run with nnU-Net's own command, then validate it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import submitit

from nnunet_cpr.environment import available_cores
from nnunet_cpr.files import set_aside
from nnunet_cpr.nnunet import commands, fold_files
from nnunet_cpr.nnunet.is_finished import summary_file
from nnunet_cpr.nnunet.processes import StopRequest, record_stop_signals
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies import state
from nnunet_cpr.studies.cascades import runs_without_predictions
from nnunet_cpr.studies.plans_and_weights import begins, record_run
from nnunet_cpr.studies.study import Run

_REQUEUE_SIGNAL = signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]
"""Signal whose handler by submitit requeues a Slurm job."""
_NNUNET_PROCESSES = 8
"""Number of processes that nnU-Net starts to export predictions, unless nnUNet_def_n_proc is set."""
_WAIT_SECONDS = 5.0
"""Time between two looks at what another process does."""


@dataclass
class Worker:
    """Callable that trains and validates one run in a process of its own, such as a Slurm job.

    SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C stop nnU-Net with SIGTERM, which the trainers of this package
    answer by writing a checkpoint. A Slurm job then requeues unless Slurm has cancelled or requeued it.

    Attributes:
        run: the run.
        paths: the study's folders.
        device: nnU-Net's ``-device``; None selects a GPU if there is one.
        environment: environment variables to set for nnU-Net.
        options: further options of ``nnUNetv2_train``.
        stop_seconds: time that nnU-Net has to end after SIGTERM.
        has_stalled: True if the Slurm job before this one reached its time limit without progress.
    """

    run: Run
    paths: state.StudyPaths
    device: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    stop_seconds: float = 60.0
    has_stalled: bool = False

    def __call__(self) -> bool:
        """Train or continue the run until it is done or a signal arrives, as :meth:`train` does.

        Raises:
            SystemExit: a signal has stopped the training; its status is 128 + signal.
            Refusal: two jobs reached their time limit without progress; the error is kept.
            CalledProcessError: Slurm has refused to requeue the job; the error is kept.
        """
        fold = self.run.folder(self.paths.results)
        before, _ = fold_files.read_progress(fold)
        with record_stop_signals() as request:
            try:
                return self.train(request)
            except commands.CommandStopped:
                pass
        # Outside of the context, because submitit's handler of the signal requeues and exits.
        if _must_requeue(request):
            with self._keeping_failures():
                after, _ = fold_files.read_progress(fold)
                stalls = _REQUEUE_SIGNAL in request.signals and after == before
                if stalls and self.has_stalled:
                    raise Refusal(
                        "expected an epoch or the whole validation within the time limit of a job, "
                        "got neither in two jobs",
                        "give a longer --time",
                    )
                self.has_stalled = stalls
                signal.raise_signal(_REQUEUE_SIGNAL)
        raise SystemExit(128 + request.signals[0])

    def train(self, request: StopRequest) -> bool:
        """Train, or continue an earlier attempt, and validate.

        Returns:
            True if the run is done, False if another process works on it.

        Raises:
            Refusal: nnU-Net failed; the error is kept for ``study status``.
            CommandStopped: there was a request to stop.
            OSError: a file cannot be written; the error is kept as well if possible.
        """
        with self._keeping_failures(), state.claim(self.run, self.paths) as claimed:
            if claimed:
                self.paths.failure(self.run).unlink(missing_ok=True)
                self._train_and_validate(request)
        return claimed

    @contextmanager
    def _keeping_failures(self) -> Iterator[None]:
        """Keep errors for ``study status``."""
        try:
            yield
        except (Refusal, OSError, subprocess.CalledProcessError) as error:
            self.paths.logs.mkdir(parents=True, exist_ok=True)
            self.paths.failure(self.run).write_text(f"{error}\n")
            raise

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Return the job to submit at the time limit; submitit calls the method by this name."""
        return submitit.helpers.DelayedSubmission(self)

    def command(self, *options: str) -> list[str]:
        """Return nnU-Net's command with ``--c``, ``-pretrained_weights`` and its file, or ``--val``."""
        run = self.run
        return [
            *("nnUNetv2_train", run.dataset, run.configuration, str(run.fold), *options),
            *("-tr", run.trainer, "-p", run.plans, "-device", self.device or default_device()),
            *self.options,
        ]

    def _train_and_validate(self, request: StopRequest) -> None:
        fold = self.run.folder(self.paths.results)
        if state.finished(self.run, self.paths):
            return
        for earlier in runs_without_predictions(self.run, self.paths):
            self._predict_for_next_stage(earlier, request)
        # nnU-Net was killed while it wrote a checkpoint, and could not load it; the results are those of
        # an earlier training, or not of all cases.
        checkpoints = map(fold.joinpath, fold_files.CHECKPOINTS)
        torn = [path for path in checkpoints if path.exists() and _is_torn(path)]
        for path in (*torn, *filter(Path.exists, [summary_file(fold)])):
            print(f"{path}: set aside as {set_aside(path).name}")
        if not (fold / fold_files.FINAL_CHECKPOINT).exists():
            weights = self.run.weights(self.paths.results)
            if is_new := begins(self.run, self.paths):
                record_run(self.run, self.paths)
            if weights is not None and is_new:
                self._run_nnunet(request, "-pretrained_weights", str(weights))
            else:
                self._run_nnunet(request, "--c")  # starts from scratch if there is no checkpoint
        if state.finished(self.run, self.paths) is None:
            self._run_nnunet(request, "--val")
        if state.finished(self.run, self.paths) is None:
            raise Refusal(
                f"nnUNetv2_train: expected {summary_file(fold)} with all cases of the fold, got none",
                f"see {self.paths.log(self.run)}",
            )

    def _predict_for_next_stage(self, earlier: Run, request: StopRequest) -> None:
        """Validate a run of the cascade's previous stage again, unless another worker does so."""
        lower = replace(self, run=earlier)
        final = earlier.folder(self.paths.results) / fold_files.FINAL_CHECKPOINT
        while earlier in runs_without_predictions(self.run, self.paths):
            if not final.exists():
                raise Refusal(
                    f"{final.parent}: expected the predictions for {self.run.configuration}, or "
                    f"{final.name} to make them, got neither",
                    "train it again in an empty folder",
                )
            with state.claim(earlier, self.paths) as claimed:
                if claimed:
                    lower._run_nnunet(request, "--val")
                    if earlier in runs_without_predictions(self.run, self.paths):
                        raise Refusal(
                            f"{final.parent}: its validation has not written the predictions for "
                            f"{self.run.configuration}",
                            f"see {self.paths.log(earlier)}",
                        )
                    return
            if request.signals:
                raise commands.CommandStopped
            time.sleep(_WAIT_SECONDS)

    def _run_nnunet(self, request: StopRequest, *options: str) -> None:
        start = time.monotonic()
        try:
            commands.run(
                self.command(*options),
                self.paths.log(self.run),
                {**_few_processes(), **os.environ, **self.environment},
                on_start=lambda pid: state.record_process(self.run, self.paths, pid),
                request=request,
                stop_seconds=self.stop_seconds,
                has_ranks="-num_gpus" in self.options,
            )
        finally:
            state.add_seconds(self.run.folder(self.paths.results), time.monotonic() - start)


def _few_processes() -> dict[str, str]:
    """Return variables for a machine with fewer cores than nnU-Net's processes for a validation.

    Each process imports nnU-Net, which takes longer than it saves.
    """
    cores = available_cores()
    return {"nnUNet_def_n_proc": str(max(1, cores // 2))} if cores < _NNUNET_PROCESSES else {}


def _is_torn(path: Path) -> bool:
    """Return True if a checkpoint was not written to its end.

    Raises:
        OSError: it cannot be read, which says nothing about it.
    """
    is_complete = fold_files.is_complete_checkpoint(path)
    return not is_complete and not zipfile.is_zipfile(io.BytesIO(path.read_bytes()))


def _must_requeue(request: StopRequest) -> bool:
    """Return True if this is a Slurm job that nobody has cancelled or requeued.

    Slurm sends SIGTERM in three cases: before preemption, when the job still runs and is lost if it
    ends by itself; to a job that it has requeued; and to a cancelled job, which must not come back.
    """
    if os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
        return False
    if _REQUEUE_SIGNAL in request.signals:
        return True
    query = ["squeue", "--noheader", "--format=%T", f"--jobs={os.environ['SLURM_JOB_ID']}"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.strip() == "RUNNING"


def default_device() -> str:
    """Return the device that nnU-Net runs on unless one is given: a GPU if any."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
