"""Executors: where the runs of a study are executed.

An executor sends a :class:`~nnunet_cpr.studies.worker.Worker` for each unfinished run to a job, here
through submitit. To add one, write a class beside :class:`Local` and :class:`Slurm`, offer it in
``nnunet_cpr/cli/study.py`` (``run`` and ``cancel``), and report its queued runs as
:func:`queued_runs` does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import submitit

from nnunet_cpr._files import add_path_to_os_errors, read_json
from nnunet_cpr.nnunet.commands import CommandFailed
from nnunet_cpr.studies.definition import Run, StudyError
from nnunet_cpr.studies.run_state import Stage, StudyPaths, state_of, write_json
from nnunet_cpr.studies.worker import Worker

_POLL_SECONDS = 1.0
_NO_TIME_LIMIT = 60 * 24 * 365
"""Minutes; submitit needs a number for jobs on this machine."""
_SLURM_JOBS = "slurm_jobs.json"


@dataclass(frozen=True)
class Local:
    """Executor for this machine.

    Attributes:
        at_once: number of trainings that run at the same time.
        gpus: the GPUs to share, as in ``CUDA_VISIBLE_DEVICES``; empty on a CPU.
        device: nnU-Net's ``-device``; None selects a GPU if there is one.
        options: further options of ``nnUNetv2_train``.
    """

    at_once: int = 1
    gpus: Sequence[str] = ()
    device: str | None = None
    options: tuple[str, ...] = ()

    def run(
        self,
        runs: Sequence[Run],
        paths: StudyPaths,
        folders: Mapping[str, str],
        show: Callable[[], None],
    ) -> None:
        """Train the unfinished runs until all are done or have failed once.

        Args:
            runs: the runs in their order.
            paths: the study's folders.
            folders: nnU-Net's folders, as environment variables.
            show: called once a second.

        Raises:
            KeyboardInterrupt: all trainings have been stopped; the next call continues them.
        """
        executor = submitit.LocalExecutor(paths.jobs)
        executor.update_parameters(timeout_min=_NO_TIME_LIMIT, stderr_to_stdout=True)
        waiting = [run for run in runs if state_of(run, paths).stage is not Stage.DONE]
        slots: dict[int, tuple[Run, submitit.Job[str]]] = {}
        elsewhere: list[Run] = []  # still trained by a process of an earlier, killed command
        try:
            while waiting or slots or elsewhere:
                for slot, (run, job) in list(slots.items()):
                    if job.done():
                        if _result(job) == "busy":
                            elsewhere.append(run)
                        del slots[slot]
                for run in list(elsewhere):
                    stage = state_of(run, paths).stage
                    if stage is not Stage.RUNNING:
                        elsewhere.remove(run)
                        if stage is not Stage.DONE:
                            waiting.insert(0, run)
                for slot in range(min(self.at_once, len(runs)) - len(elsewhere)):
                    if slot not in slots and waiting:
                        run = waiting.pop(0)
                        worker = self.worker(run, slot, paths, folders)
                        log = paths.jobs / "controllers.log"
                        with add_path_to_os_errors(paths.jobs), _redirect_stderr(log):
                            slots[slot] = run, executor.submit(worker)
                show()
                time.sleep(_POLL_SECONDS)
        except BaseException:
            jobs = [job for _, job in slots.values()]
            for job in jobs:
                job.cancel()
            _wait_until_done(jobs)
            raise

    def worker(self, run: Run, slot: int, paths: StudyPaths, folders: Mapping[str, str]) -> Worker:
        """Return the worker of a run, with the GPU and CPU cores of its slot."""
        environment = dict(folders)
        cores = max(1, (os.cpu_count() or 1) // self.at_once)
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        elif self.at_once > 1:
            environment.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", str(cores)))
        if self.at_once > 1 and "nnUNet_n_proc_DA" not in os.environ:
            environment["nnUNet_n_proc_DA"] = str(min(12, cores))
        # Threads that wait by spinning make busy processes on few cores many times slower.
        environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        # submitit hides GPUs that were not requested, so the worker cannot find them by itself.
        device = self.device or ("cuda" if self.gpus else None)
        return Worker(run, paths, device, environment, self.options)


@contextlib.contextmanager
def _redirect_stderr(path: Path) -> Iterator[None]:
    """Redirect the stderr of processes that are started meanwhile to a file.

    submitit's controllers would inherit ours, and they print a traceback when they are cancelled.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    ours = os.dup(2)
    try:
        with open(path, "ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


@dataclass(frozen=True)
class Slurm:
    """Executor for a Slurm cluster; a job that reaches its time limit queues itself again.

    Attributes:
        partition: Slurm's partition; None selects the cluster's default.
        minutes: time limit of a job.
        gpus: GPUs of each job; nnU-Net trains on all of them together.
        cpus: CPU cores of each job.
        memory: memory of each job, such as "64G"; None selects the cluster's default.
        at_once: maximum number of jobs of this study that run at the same time.
        settings: any other options of ``sbatch``, by their long names.
        device: nnU-Net's ``-device``; None selects a GPU if there is one.
        options: further options of ``nnUNetv2_train``.
    """

    partition: str | None = None
    minutes: int = 48 * 60
    gpus: int = 1
    cpus: int = 12
    memory: str | None = None
    at_once: int = 16
    settings: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    options: tuple[str, ...] = ()

    def submit(
        self, runs: Sequence[Run], paths: StudyPaths, folders: Mapping[str, str]
    ) -> dict[str, str]:
        """Submit a job for each run that is neither done nor queued nor running.

        Returns:
            The job number of each submitted run's key.

        Raises:
            StudyError: Slurm is missing, or it refused the jobs.
        """
        if shutil.which("sbatch") is None:
            raise StudyError("sbatch: not installed; run this command where Slurm jobs are submitted")
        queued = queued_runs(paths)
        open_stages = (Stage.WAITING, Stage.STOPPED, Stage.FAILED)
        todo = [run for run in runs if state_of(run, paths, queued).stage in open_stages]
        if not todo:
            return {}
        executor = submitit.SlurmExecutor(paths.jobs, max_num_timeout=1000)
        optional = {"partition": self.partition, "mem": self.memory, "gpus_per_node": self.gpus or None}
        executor.update_parameters(
            job_name=paths.study.name,
            time=self.minutes,
            cpus_per_task=self.cpus,
            array_parallelism=self.at_once,
            stderr_to_stdout=True,
            additional_parameters=dict(self.settings),
            **{key: value for key, value in optional.items() if value is not None},
        )
        workers = [self.worker(run, paths, folders) for run in todo]
        for run in todo:
            paths.failure(run).unlink(missing_ok=True)
        try:
            with add_path_to_os_errors(paths.jobs):
                jobs = executor.submit_array(workers)
        except (subprocess.CalledProcessError, submitit.core.utils.FailedJobError) as error:
            output = str(getattr(error, "stderr", None) or error).strip().splitlines()
            raise StudyError(f"sbatch: refused the jobs: {output[-1] if output else error}") from error
        numbers = {run.key: job.job_id for run, job in zip(todo, jobs)}
        write_json(paths.study / _SLURM_JOBS, {**_read_slurm_jobs(paths), **numbers})
        return numbers

    def worker(self, run: Run, paths: StudyPaths, folders: Mapping[str, str]) -> Worker:
        """Return the worker of a run."""
        several = ("-num_gpus", str(self.gpus)) if self.gpus > 1 else ()
        return Worker(run, paths, self.device, dict(folders), (*self.options, *several))


def queued_runs(paths: StudyPaths) -> frozenset[str]:
    """Return the keys of the runs whose jobs are in Slurm's queue, running ones included."""
    jobs = _read_slurm_jobs(paths)
    if not jobs or shutil.which("squeue") is None:
        return frozenset()
    numbers = ",".join(sorted({number.split("_")[0] for number in jobs.values()}))
    answer = subprocess.run(
        ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={numbers}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    # squeue fails if all jobs ended so long ago that Slurm has forgotten them; then nothing is queued.
    present = set(answer.stdout.split())
    return frozenset(key for key, number in jobs.items() if number in present)


def cancel_slurm_jobs(paths: StudyPaths) -> int:
    """Cancel the study's jobs in Slurm's queue and return their number."""
    jobs = _read_slurm_jobs(paths)
    numbers = [jobs[key] for key in queued_runs(paths)]
    if numbers:
        subprocess.run(["scancel", *numbers], check=True)
    return len(numbers)


def _read_slurm_jobs(paths: StudyPaths) -> dict[str, str]:
    path = paths.study / _SLURM_JOBS
    try:
        jobs = read_json(path)
        is_valid = all(isinstance(number, str) for number in jobs.values())
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError):
        is_valid = False
    if not is_valid:
        raise StudyError(f"{path}: damaged; delete it when squeue shows no job of the study")
    return dict(jobs)


def _result(job: submitit.Job[str]) -> str:
    try:
        return job.result()
    except (CommandFailed, submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError):
        return "failed"  # the run's state has the reason


def _wait_until_done(jobs: Sequence[submitit.Job[Any]], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < end and not all(job.done() for job in jobs):
            time.sleep(0.1)
