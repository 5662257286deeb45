"""Executors: where the runs of a study are executed.

An executor sends a :class:`~nnunet_cpr.studies.worker.Worker` for each unfinished run to a job, here
through submitit. To add one, write a class beside :class:`Local` and :class:`Slurm`, offer it in
``nnunet_cpr/cli/study`` (``run`` and ``cancel``), and report its queued runs as
:func:`queued_runs` does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import submitit

from nnunet_cpr._cores import available_cores
from nnunet_cpr._files import add_path_to_os_errors, read_json
from nnunet_cpr.nnunet.commands import CommandFailed
from nnunet_cpr.nnunet.cpu_threads import CPU_THREADS
from nnunet_cpr.nnunet.stop_signals import block_interrupts
from nnunet_cpr.studies.definition import Run, StudyError
from nnunet_cpr.studies.run_state import Stage, StudyPaths, recorded_gpus, state_of, write_json
from nnunet_cpr.studies.worker import Worker

_POLL_SECONDS = 1.0
_NO_TIME_LIMIT = 60 * 24 * 365
"""Minutes; submitit needs a number for jobs on this machine."""
_SLURM_JOBS = "slurm_jobs.json"
_SIGNAL_TIMER_SECONDS = 30
"""Interval of Slurm's check of time limits; it sends a signal up to so much earlier than requested."""
_GPU_SETTINGS = ("gres", "gpus", "gpus_per_node", "gpus_per_socket", "gpus_per_task", "tres_per_task")
"""Options of sbatch that may request GPUs."""


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
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Train the unfinished runs until all are done or have failed once.

        Ctrl-C and :class:`~nnunet_cpr.nnunet.stop_signals.Terminated` stop the trainings, which write
        their state; a second Ctrl-C kills them.

        Args:
            runs: the runs in their order.
            paths: the study's folders.
            folders: nnU-Net's folders, as environment variables.
            show: called once a second.
            on_stop: called before it waits for trainings to stop.

        Raises:
            KeyboardInterrupt: all trainings have been stopped; the next call continues them.
        """
        executor = submitit.LocalExecutor(paths.jobs)
        executor.update_parameters(timeout_min=_NO_TIME_LIMIT, stderr_to_stdout=True)
        stages = [state_of(run, paths).stage for run in runs]
        waiting = [r for r, stage in zip(runs, stages) if stage not in (Stage.DONE, Stage.RUNNING)]
        slots: dict[int, tuple[Run, submitit.Job[str]]] = {}
        # Still trained by a process of an earlier, killed command.
        elsewhere = [r for r, stage in zip(runs, stages) if stage is Stage.RUNNING]
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
                gpus = [recorded_gpus(run, paths) for run in elsewhere]
                for slot in self.free_slots(slots, gpus)[: len(waiting)]:
                    run = waiting.pop(0)
                    worker = self.worker(run, slot, paths, folders)
                    log = paths.jobs / "controllers.log"
                    with (
                        add_path_to_os_errors(paths.jobs),
                        _redirect_stderr(log),
                        block_interrupts(),  # the terminal sends Ctrl-C to all processes
                    ):
                        slots[slot] = run, executor.submit(worker)
                show()
                time.sleep(_POLL_SECONDS)
        except BaseException:
            try:
                on_stop()
            finally:
                _stop_jobs([job for _, job in slots.values()])
            raise

    def free_slots(self, taken: Collection[int], gpus: Sequence[str | None]) -> list[int]:
        """Return the slots in which a training can start.

        Args:
            taken: slots of the trainings of this command.
            gpus: GPU of each training of other commands, None if not known. Each takes a slot, if
                possible one of its GPU.
        """
        free = [slot for slot in range(self.at_once) if slot not in taken]
        for gpu in gpus[: len(free)]:
            free.remove(next((slot for slot in free if gpu and self._gpu(slot) == gpu), free[0]))
        return free

    def _gpu(self, slot: int) -> str | None:
        return self.gpus[slot % len(self.gpus)] if self.gpus else None

    def worker(self, run: Run, slot: int, paths: StudyPaths, folders: Mapping[str, str]) -> Worker:
        """Return the worker of a run, with the GPU and CPU cores of its slot."""
        environment = dict(folders)
        cores = max(1, available_cores() // self.at_once)
        gpu = self._gpu(slot)
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        elif self.at_once > 1:
            for variable in ("OMP_NUM_THREADS", CPU_THREADS):
                environment.setdefault(variable, os.environ.get(variable, str(cores)))
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

    Raises:
        StudyError: the options contradict each other.

    Attributes:
        partition: Slurm's partition; None selects the cluster's default.
        minutes: time limit of a job.
        gpus: GPUs of each job; nnU-Net trains on all of them together. None stands for the GPUs in
            ``settings``, otherwise for one.
        cpus: CPU cores of each job.
        memory: memory of each job, such as "64G"; None selects the cluster's default.
        at_once: maximum number of jobs of this study that run at the same time.
        settings: any other options of ``sbatch``, by their long names with underscores; True for an
            option without a value. They replace those above.
        signal_delay: seconds before the time limit at which a job stops its training and requeues.
        device: nnU-Net's ``-device``; None selects a GPU if there is one.
        options: further options of ``nnUNetv2_train``.
    """

    partition: str | None = None
    minutes: int = 48 * 60
    gpus: int | None = None
    cpus: int = 12
    memory: str | None = None
    at_once: int = 16
    settings: Mapping[str, str | bool] = field(default_factory=dict)
    signal_delay: int = 90
    device: str | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        least = self.signal_delay + _SIGNAL_TIMER_SECONDS
        if self.minutes * 60 <= least:
            raise StudyError(
                f"--time: expected more than {least} s, as jobs requeue {self.signal_delay} s before "
                f"the limit, got {self.minutes * 60} s; give a longer --time or a shorter --signal-delay"
            )
        requested = requested_gpus(self.settings)
        if None not in (requested, self.gpus) and requested != self.gpus:
            raise StudyError(
                f"--gpus: expected {requested} as in --sbatch, got {self.gpus}; leave one of them out"
            )

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
        queued = queued_runs(paths, needed=True)
        open_stages = (Stage.WAITING, Stage.STOPPED, Stage.FAILED)
        todo = [run for run in runs if state_of(run, paths, queued).stage in open_stages]
        if not todo:
            return {}
        executor = submitit.SlurmExecutor(paths.jobs, max_num_timeout=1000)
        executor.update_parameters(**self._parameters(paths.study.name))
        workers = [self.worker(run, paths, folders) for run in todo]
        failed = (
            subprocess.CalledProcessError,
            submitit.core.utils.FailedJobError,
            submitit.core.utils.FailedSubmissionError,
        )
        try:
            with add_path_to_os_errors(paths.jobs):
                jobs = executor.submit_array(workers)
        except failed as error:
            output = str(getattr(error, "stderr", None) or error).strip().splitlines()
            raise StudyError(f"sbatch: refused the jobs: {output[-1] if output else error}") from error
        for run in todo:
            paths.failure(run).unlink(missing_ok=True)
        numbers = {run.key: job.job_id for run, job in zip(todo, jobs)}
        write_json(paths.study / _SLURM_JOBS, {**_read_slurm_jobs(paths), **numbers})
        return numbers

    def _parameters(self, name: str) -> dict[str, Any]:
        """Return submitit's parameters."""
        requested = requested_gpus(self.settings)
        cpus = None if "cpus_per_gpu" in self.settings else self.settings.get("cpus_per_task", self.cpus)
        optional = {
            "partition": self.partition,
            "mem": self.memory,
            "cpus_per_task": cpus,
            # Since Slurm 22.05 srun does not take it from sbatch and may bind all processes to a core.
            "srun_args": None if cpus is None else [f"--cpus-per-task={cpus}"],
            "gpus_per_node": self._gpus or None if requested is None else None,
        }
        return {
            "job_name": name,
            "time": self.minutes,
            "signal_delay_s": self.signal_delay,
            "array_parallelism": self.at_once,
            "stderr_to_stdout": True,
            # Without --requeue, clusters with JobRequeue=0 refuse to requeue a job.
            "additional_parameters": {"requeue": True, **self.settings},
            **{key: value for key, value in optional.items() if value is not None},
        }

    @property
    def _gpus(self) -> int:
        requested = requested_gpus(self.settings) if self.gpus is None else self.gpus
        return 1 if requested is None else requested

    def worker(self, run: Run, paths: StudyPaths, folders: Mapping[str, str]) -> Worker:
        """Return the worker of a run."""
        several = ("-num_gpus", str(self._gpus)) if self._gpus > 1 else ()
        return Worker(
            run, paths, self.device, dict(folders), (*self.options, *several),
            stop_seconds=self.signal_delay * 2 / 3, time_limit=self.minutes * 60 - self.signal_delay,
        )  # fmt: skip


def requested_gpus(settings: Mapping[str, str | bool]) -> int | None:
    """Return the number of GPUs that options of sbatch request, None if they request none.

    Example:
        >>> requested_gpus({"gres": "gpu:a100:2,scratch:100"}), requested_gpus({"constraint": "a100"})
        (2, None)
    """
    for name in _GPU_SETTINGS:
        for part in str(settings.get(name, "")).split(","):
            # These two list other resources as well.
            pattern = r"(gres[/:])?gpu\b" if name in ("gres", "tres_per_task") else "."
            if re.match(pattern, part):
                count = re.search(r"(?:^|[:=])([0-9]{1,4})$", part)
                return int(count[1]) if count else 1
    return None


def queued_runs(paths: StudyPaths, needed: bool = False) -> frozenset[str]:
    """Return the keys of the runs whose jobs are in Slurm's queue, running ones included.

    Args:
        paths: the study's folders.
        needed: if True, an error of ``squeue`` is raised, otherwise nothing counts as queued.

    Raises:
        StudyError: ``squeue`` failed.
    """
    jobs = _read_slurm_jobs(paths)
    if not jobs or shutil.which("squeue") is None:
        return frozenset()
    numbers = ",".join(sorted({number.split("_")[0] for number in jobs.values()}))
    answer = subprocess.run(
        ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={numbers}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    # squeue fails if all jobs ended so long ago that Slurm has forgotten them; then nothing is queued.
    if needed and answer.returncode and "Invalid job id" not in answer.stderr:
        reason = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
        raise StudyError(f"squeue: {reason}; try again when Slurm answers")
    present = set(answer.stdout.split())
    return frozenset(key for key, number in jobs.items() if number in present)


def cancel_slurm_jobs(paths: StudyPaths) -> int:
    """Cancel the study's jobs in Slurm's queue and return their number."""
    jobs = _read_slurm_jobs(paths)
    numbers = [jobs[key] for key in queued_runs(paths, needed=True)]
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


def _stop_jobs(jobs: Sequence[submitit.Job[Any]]) -> None:
    """Ask jobs on this machine to stop, wait for them, and kill what is left or a second Ctrl-C ends.

    ``job.cancel()`` does not give a worker the time to wait for its training.
    """
    end = time.monotonic() + Worker.stop_seconds + 30
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < end and not all(job.done() for job in jobs):
            for job in jobs:
                if not job.done():
                    # The controller passes it on to the worker, if that has been started already.
                    os.kill(int(job.job_id), signal.SIGTERM)
            time.sleep(0.5)
    for job in jobs:
        if not job.done():
            _kill_tree(int(job.job_id))


def _kill_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
