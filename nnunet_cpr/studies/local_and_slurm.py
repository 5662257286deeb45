"""Execution of a study's runs: on this machine, on Slurm, or by commands for other schedulers.

An executor lets a :class:`~nnunet_cpr.studies.worker.Worker` train each unfinished run. To add one,
write a class beside :class:`Local` and :class:`Slurm`, offer it in ``nnunet_cpr/cli/study`` (``run`` and
``cancel``), and report its queued runs as :func:`queued_runs` does.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import submitit

from nnunet_cpr.environment import available_cores
from nnunet_cpr.files import add_path_to_os_errors, read_json
from nnunet_cpr.nnunet.commands import CPU_THREADS, CommandStopped
from nnunet_cpr.nnunet.processes import StopRequest, Terminated, record_stop_signals
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies.state import Stage, StudyPaths, finished, is_running, state_of, write_json
from nnunet_cpr.studies.study import Run
from nnunet_cpr.studies.worker import Worker

_POLL_SECONDS = 1.0
_MAX_TIMEOUTS = 100
"""Number of times that a run's job may reach its time limit and queue itself again."""
_SLURM_JOBS = "slurm_jobs.json"
_ARRAY_SIZE = 1000
"""Jobs of an array: the largest index of Slurm's default ``MaxArraySize``."""
_SQUEUE_SECONDS = 30
"""Seconds for which an answer of ``squeue`` counts, as clusters ask users not to poll it."""


@dataclass(frozen=True)
class Local:
    """Executor for this machine: a pool of trainings, each with a GPU and a share of the CPU cores.

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
        needed: Mapping[Run, Sequence[Run]] = MappingProxyType({}),
    ) -> None:
        """Train the unfinished runs until all are done or have failed once.

        Ctrl-C and the other signals of :func:`~nnunet_cpr.nnunet.processes.record_stop_signals` stop
        the trainings, which write their state; a second Ctrl-C kills them.

        Args:
            runs: the runs in their order.
            paths: the study's folders.
            folders: nnU-Net's folders, as environment variables.
            show: called once a second.
            on_stop: called before it waits for trainings to stop.
            needed: runs that must be done before others begin, by the others.

        Raises:
            KeyboardInterrupt: all trainings have been stopped; the next call continues them.
        """
        waiting = [run for run in runs if state_of(run, paths).stage is not Stage.DONE]
        # What a killed command has left running comes first, as it occupies a slot.
        waiting.sort(key=lambda run: not is_running(run, paths))
        free = [self.gpus[slot % len(self.gpus)] if self.gpus else None for slot in range(self.at_once)]
        training: dict[Future[None], str | None] = {}
        with record_stop_signals() as request, ThreadPoolExecutor(self.at_once) as pool:
            try:
                while not request:
                    ready = [run for run in waiting if not _missing(needed.get(run, ()), paths)]
                    if not ready and not training:
                        break  # done, or what the others need has failed
                    for run in ready[: len(free)]:
                        waiting.remove(run)
                        gpu = free.pop(0)
                        worker = self.worker(run, gpu, paths, folders)
                        training[pool.submit(_train_to_the_end, worker, request)] = gpu
                    for future in wait(training, _POLL_SECONDS, FIRST_COMPLETED).done:
                        free.append(training.pop(future))
                        future.result()
                    show()
                if request:
                    on_stop()
            except BaseException:
                request.signals.append(signal.SIGTERM)  # else the pool waits for whole trainings
                raise
        if request:
            first = request.signals[0]
            raise KeyboardInterrupt if first is signal.SIGINT else Terminated(first)

    def worker(self, run: Run, gpu: str | None, paths: StudyPaths, folders: Mapping[str, str]) -> Worker:
        """Return the worker of a run, with its GPU and its share of the CPU cores."""
        cores = max(1, available_cores() // self.at_once)
        defaults = {
            "OMP_NUM_THREADS": cores,
            CPU_THREADS: cores,
            "nnUNet_n_proc_DA": min(12, cores),
            # Threads that wait by spinning make busy processes on few cores many times slower.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        environment = {name: os.environ.get(name, str(value)) for name, value in defaults.items()}
        own_gpu = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        return Worker(run, paths, self.device, {**folders, **environment, **own_gpu}, self.options)


def _missing(needed: Sequence[Run], paths: StudyPaths) -> list[Run]:
    """Return the runs that are not done."""
    return [run for run in needed if finished(run, paths) is None]


def _train_to_the_end(worker: Worker, request: StopRequest) -> None:
    """Train a run, or wait until the process that trains it already has ended and train what is left."""
    with suppress(Refusal, CommandStopped, OSError):  # the run's state has the reason
        while not worker.train(request):
            while is_running(worker.run, worker.paths) and not request:
                time.sleep(_POLL_SECONDS)
            if request or state_of(worker.run, worker.paths).stage is Stage.DONE:
                return


@dataclass(frozen=True)
class Slurm:
    """Executor for a Slurm cluster; a job that reaches its time limit queues itself again.

    Attributes:
        settings: options of ``sbatch``, by their long names with underscores; True for an option without
            a value.
        minutes: time limit of a job.
        gpus: number of GPUs that nnU-Net trains on together.
        at_once: maximum number of jobs of this study that run at the same time.
        signal_delay: seconds before the time limit at which a job stops its training and requeues.
        device: nnU-Net's ``-device``; None selects a GPU if there is one.
        options: further options of ``nnUNetv2_train``.
    """

    settings: Mapping[str, str | int | bool] = field(default_factory=dict)
    minutes: int = 48 * 60
    gpus: int = 1
    at_once: int = 16
    signal_delay: int = 90
    device: str | None = None
    options: tuple[str, ...] = ()

    def submit(
        self,
        runs: Sequence[Run],
        paths: StudyPaths,
        folders: Mapping[str, str],
        needed: Mapping[Run, Sequence[Run]] = MappingProxyType({}),
    ) -> dict[str, str]:
        """Submit a job for each run that is neither done nor queued nor running.

        Args:
            runs: the runs.
            paths: the study's folders.
            folders: nnU-Net's folders, as environment variables.
            needed: runs that must be done before others begin, by the others. Slurm starts the jobs of
                the others when the jobs of all of these have succeeded.

        Returns:
            The job number of each submitted run's key.

        Raises:
            Refusal: Slurm is missing, or it refused the jobs.
        """
        if shutil.which("sbatch") is None:
            raise Refusal("sbatch: not installed", "run this command where Slurm jobs are submitted")
        queued = queued_runs(paths, needed=True)
        others = (Stage.DONE, Stage.RUNNING, Stage.QUEUED)
        todo = [run for run in runs if state_of(run, paths, queued).stage not in others]
        numbers = self._submit_arrays([run for run in todo if run not in needed], paths, folders, [])
        if second := [run for run in todo if run in needed]:
            earlier = {run.key for other in second for run in _missing(needed[other], paths)}
            known = _read_slurm_jobs(paths)
            jobs = sorted({known[key] for key in earlier & known.keys()})
            after = ["afterok:" + ":".join(jobs)] if jobs else []
            numbers |= self._submit_arrays(second, paths, folders, after)
        return numbers

    def _submit_arrays(
        self, todo: Sequence[Run], paths: StudyPaths, folders: Mapping[str, str], after: Sequence[str]
    ) -> dict[str, str]:
        """Submit a job for each run; an array begins when the one before it has ended.

        So the number of jobs at a time is that of one array.
        """
        numbers: dict[str, str] = {}
        for start in range(0, len(todo), _ARRAY_SIZE):
            last = [number.split("_")[0] for number in [*numbers.values()][-1:]]
            conditions = [*after, *(f"afterany:{number}" for number in last)]
            array = todo[start : start + _ARRAY_SIZE]
            numbers |= self._submit_array(array, paths, folders, conditions)
        return numbers

    def _submit_array(
        self, todo: Sequence[Run], paths: StudyPaths, folders: Mapping[str, str], after: Sequence[str]
    ) -> dict[str, str]:
        """Submit a job for each run, to start when the conditions and those of the user hold."""
        given = [self.settings["dependency"]] if "dependency" in self.settings else []
        together = ",".join(map(str, [*given, *after]))
        dependency = {"dependency": together} if together else {}
        executor = submitit.SlurmExecutor(paths.jobs, max_num_timeout=_MAX_TIMEOUTS)
        cpus = self.settings.get("cpus_per_task")
        executor.update_parameters(
            job_name=paths.study.name,
            time=self.minutes,
            signal_delay_s=self.signal_delay,
            array_parallelism=self.at_once,
            stderr_to_stdout=True,
            # Since Slurm 22.05 srun does not take it from sbatch and may bind all processes to a core.
            srun_args=[] if cpus is None else [f"--cpus-per-task={cpus}"],
            # Without --requeue, clusters with JobRequeue=0 refuse to requeue a job.
            additional_parameters={"requeue": True, **self.settings, **dependency},
        )
        try:
            with add_path_to_os_errors(paths.jobs):
                jobs = executor.submit_array([self.worker(run, paths, folders) for run in todo])
        except (subprocess.CalledProcessError, RuntimeError) as error:  # RuntimeError: of submitit
            output = str(getattr(error, "stderr", None) or error).strip().splitlines()
            raise Refusal(f"sbatch: refused the jobs: {output[-1] if output else error}") from error
        for run in todo:
            paths.failure(run).unlink(missing_ok=True)
        numbers = {run.key: job.job_id for run, job in zip(todo, jobs)}
        write_json(paths.study / _SLURM_JOBS, {**_read_slurm_jobs(paths), **numbers})
        return numbers

    def worker(self, run: Run, paths: StudyPaths, folders: Mapping[str, str]) -> Worker:
        """Return the worker of a run."""
        options = (*self.options, "-num_gpus", str(self.gpus)) if self.gpus > 1 else self.options
        return Worker(run, paths, self.device, dict(folders), options, self.signal_delay * 2 / 3)


def queued_runs(paths: StudyPaths, needed: bool = False) -> frozenset[str]:
    """Return the keys of the runs whose jobs are in Slurm's queue, running ones included.

    Args:
        paths: the study's folders.
        needed: if True, ``squeue`` is asked and its error is raised; otherwise an answer of the last
            30 seconds is enough, and with an error nothing counts as queued.

    Raises:
        Refusal: ``squeue`` failed.
    """
    jobs = _read_slurm_jobs(paths)
    if not jobs or shutil.which("squeue") is None:
        return frozenset()
    numbers = ",".join(sorted({number.split("_")[0] for number in jobs.values()}))
    now = time.monotonic()
    answer = _ask_squeue(numbers, now if needed else now // _SQUEUE_SECONDS)
    # squeue fails if all jobs ended so long ago that Slurm has forgotten them; then nothing is queued.
    if needed and answer.returncode and "Invalid job id" not in answer.stderr:
        raise Refusal(f"squeue: {answer.stderr.strip()}", "try again when Slurm answers")
    present = set(answer.stdout.split())
    return frozenset(key for key, number in jobs.items() if number in present)


@lru_cache(maxsize=64)
def _ask_squeue(numbers: str, period: float) -> subprocess.CompletedProcess[str]:
    """Return the answer of ``squeue`` on jobs, once in each period."""
    query = ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={numbers}"]
    return subprocess.run(query, capture_output=True, text=True, check=False)


def cancel_slurm_jobs(paths: StudyPaths) -> int:
    """Cancel the study's jobs in Slurm's queue and return their number."""
    jobs = _read_slurm_jobs(paths)
    if numbers := [jobs[key] for key in queued_runs(paths, needed=True)]:
        subprocess.run(["scancel", *numbers], check=True)
    return len(numbers)


def _read_slurm_jobs(paths: StudyPaths) -> dict[str, str]:
    """Return the job number of each submitted run's key."""
    path = paths.study / _SLURM_JOBS
    return read_json(path) if path.exists() else {}


def command_line(run: Run, study: str, options: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a line for a shell that trains or continues a run and validates it.

    Args:
        run: the run.
        study: name of the study, whose folder has the logs.
        options: options of ``nnunet-cpr study run-one``.
        environment: variables to set, for jobs that do not inherit the environment.

    Example:
        >>> run = Run("Dataset004_Hippocampus", "2d", "nnUNetPlans", 0, "nnUNetTrainerCPR")
        >>> command_line(run, "mine", ["--npz"], {"nnUNet_raw": "/raw"}).partition("run-one ")[2]
        'mine Dataset004_Hippocampus 2d 0 -tr nnUNetTrainerCPR -p nnUNetPlans --npz'
    """
    variables = [f"{name}={value}" for name, value in environment.items()]
    program = ["env", *variables, f"{sysconfig.get_path('scripts')}/nnunet-cpr"]
    selected = [run.dataset, run.configuration, str(run.fold), "-tr", run.trainer, "-p", run.plans]
    selected += ["--pretrained", run.pretrained] if run.pretrained else []
    return shlex.join([*program, "study", "run-one", study, *selected, *options])
