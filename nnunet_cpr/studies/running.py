"""Where a study's trainings run: on this machine or on Slurm, either through submitit."""

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
from nnunet_cpr.studies.definition import Cell, StudyError
from nnunet_cpr.studies.state import Places, Stage, state_of, write_json
from nnunet_cpr.studies.training import Training

_LOOK = 1.0
"""Seconds between looks at what runs."""
_NO_LIMIT = 60 * 24 * 365
"""Minutes; submitit wants a number for jobs on this machine."""
_SLURM_JOBS = "slurm_jobs.json"


@dataclass(frozen=True)
class Local:
    """On this machine.

    Attributes:
        at_once: how many trainings side by side.
        gpus: the numbers of the GPUs that they share out; empty on a CPU.
        device: nnU-Net's ``-device``; None takes a GPU where there is one.
        options: further ones of ``nnUNetv2_train``.
    """

    at_once: int = 1
    gpus: Sequence[str] = ()
    device: str | None = None
    options: tuple[str, ...] = ()

    def run(
        self, cells: Sequence[Cell], places: Places, folders: Mapping[str, str], show: Callable[[], None]
    ) -> None:
        """Train the cells that are not done, until all are done or have failed once.

        Args:
            cells: in their order.
            places: the study's folders.
            folders: nnU-Net's, as variables of the environment.
            show: called once a second.

        Raises:
            KeyboardInterrupt: all trainings have been ended, to be continued by the next run.
        """
        executor = submitit.LocalExecutor(places.study / "jobs")
        executor.update_parameters(timeout_min=_NO_LIMIT, stderr_to_stdout=True)
        slots: dict[int, submitit.Job[str]] = {}
        waiting = [cell for cell in cells if state_of(cell, places).stage is not Stage.DONE]
        elsewhere: list[Cell] = []  # an earlier run's, which lives on; tried again when it has ended
        started: dict[int, Cell] = {}
        try:
            while waiting or slots or elsewhere:
                for slot, job in list(slots.items()):
                    if job.done():
                        if _outcome(job) == "busy":
                            elsewhere.append(started[slot])
                        del slots[slot]
                for cell in list(elsewhere):
                    if state_of(cell, places).stage is not Stage.RUNNING:
                        elsewhere.remove(cell)
                        if state_of(cell, places).stage is not Stage.DONE:
                            waiting.insert(0, cell)
                for slot in range(min(self.at_once, len(cells)) - len(elsewhere)):
                    if slot not in slots and waiting:
                        started[slot] = waiting.pop(0)
                        jobs = places.study / "jobs"
                        with add_path_to_os_errors(jobs), _stderr_into(jobs / "controllers.log"):
                            slots[slot] = executor.submit(
                                self._training(started[slot], slot, places, folders)
                            )
                show()
                time.sleep(_LOOK)
        except BaseException:
            for job in slots.values():
                job.cancel()
            _wait(list(slots.values()))
            raise

    def _training(self, cell: Cell, slot: int, places: Places, folders: Mapping[str, str]) -> Training:
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
        # submitit hides GPUs that it was not asked for, so the worker could not see them by itself.
        device = self.device or ("cuda" if self.gpus else None)
        return Training(cell, places, device, environment, self.options)


@contextlib.contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """What is started meanwhile has this file for its stderr.

    submitit's controllers would have ours, and they end in a traceback when they are cancelled.
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
    """On a Slurm cluster; a job that reaches its time limit puts itself into the queue again.

    Attributes:
        partition: Slurm's; None takes the cluster's own choice.
        minutes: a job's time limit.
        gpus: of each job; nnU-Net trains on all of them together.
        cpus: of each job.
        memory: of each job, in Slurm's spelling; None takes the cluster's own.
        at_once: jobs of this study that run at the same time, at most.
        settings: any other settings of ``sbatch``, by their long names.
        device: nnU-Net's ``-device``; None takes a GPU where there is one.
        options: further ones of ``nnUNetv2_train``.
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
        self, cells: Sequence[Cell], places: Places, folders: Mapping[str, str]
    ) -> dict[str, str]:
        """Submit one job for each cell that is neither done nor queued nor running.

        Returns:
            For each submitted cell's key the number of its job.

        Raises:
            StudyError: there is no Slurm here, or it did not take the jobs.
        """
        if shutil.which("sbatch") is None:
            raise StudyError("there is no sbatch on this machine; run this where jobs are submitted")
        queued = queued_cells(places)
        open_stages = (Stage.WAITING, Stage.STOPPED, Stage.FAILED)
        todo = [cell for cell in cells if state_of(cell, places, queued).stage in open_stages]
        if not todo:
            return {}
        executor = submitit.SlurmExecutor(places.study / "jobs", max_num_timeout=1000)
        optional = {"partition": self.partition, "mem": self.memory}
        executor.update_parameters(
            job_name=places.study.name,
            time=self.minutes,
            cpus_per_task=self.cpus,
            array_parallelism=self.at_once,
            stderr_to_stdout=True,
            additional_parameters=dict(self.settings),
            **({"gpus_per_node": self.gpus} if self.gpus else {}),
            **{key: value for key, value in optional.items() if value is not None},
        )
        trainings = [self.training(cell, places, folders) for cell in todo]
        for cell in todo:  # what failed before is tried again
            places.failure(cell).unlink(missing_ok=True)
        try:
            with add_path_to_os_errors(places.study / "jobs"):
                jobs = executor.submit_array(trainings)
        except (subprocess.CalledProcessError, submitit.core.utils.FailedJobError) as error:
            said = str(getattr(error, "stderr", None) or error).strip().splitlines()
            raise StudyError(f"sbatch did not take the jobs: {said[-1] if said else error}") from error
        numbers = {cell.key: job.job_id for cell, job in zip(todo, jobs)}
        write_json(places.study / _SLURM_JOBS, {**_slurm_jobs(places), **numbers})
        return numbers

    def training(self, cell: Cell, places: Places, folders: Mapping[str, str]) -> Training:
        """What the cell's job does."""
        together = ("-num_gpus", str(self.gpus)) if self.gpus > 1 else ()
        return Training(cell, places, self.device, dict(folders), (*self.options, *together))


def queued_cells(places: Places) -> frozenset[str]:
    """The keys of the cells whose jobs Slurm has in its queue, running ones among them."""
    jobs = _slurm_jobs(places)
    if not jobs or shutil.which("squeue") is None:
        return frozenset()
    numbers = ",".join(sorted({number.split("_")[0] for number in jobs.values()}))
    answer = subprocess.run(
        ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={numbers}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    # Slurm has forgotten the numbers of jobs that ended long ago and then fails; nothing is queued.
    there = set(answer.stdout.split())
    return frozenset(key for key, number in jobs.items() if number in there)


def cancel_slurm_jobs(places: Places) -> int:
    """Take this study's jobs out of Slurm's queue; how many there were."""
    jobs = _slurm_jobs(places)
    numbers = [jobs[key] for key in queued_cells(places)]
    if numbers:
        subprocess.run(["scancel", *numbers], check=True)
    return len(numbers)


def _slurm_jobs(places: Places) -> dict[str, str]:
    path = places.study / _SLURM_JOBS
    try:
        jobs = read_json(path)
        is_whole = all(isinstance(number, str) for number in jobs.values())
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError):
        is_whole = False
    if not is_whole:
        raise StudyError(f"{path} is damaged; delete it when no job of the study is in squeue any more")
    return dict(jobs)


def _outcome(job: submitit.Job[str]) -> str:
    try:
        return job.result()
    except (CommandFailed, submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError):
        return "failed"  # and the cell's state says why


def _wait(jobs: Sequence[submitit.Job[Any]], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < end and not all(job.done() for job in jobs):
            time.sleep(0.1)
