"""State of a run, read from the files that nnU-Net and the study's workers leave."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from filelock import FileLock, Timeout

from nnunet_cpr.files import atomic_write, finite_number, read_json
from nnunet_cpr.nnunet import fold_files
from nnunet_cpr.nnunet.is_finished import Validation, find_validation
from nnunet_cpr.nnunet.processes import process_start
from nnunet_cpr.nnunet.run_record import read_record
from nnunet_cpr.refusals import Refusal, counted
from nnunet_cpr.studies.study import Run

if TYPE_CHECKING:
    from nnunet_cpr.names.trainer_name import TrainerName


SPLITS = "splits_final.json"
"""nnU-Net's file with the folds of a data set, in its preprocessed folder."""
_PROCESS = ".study_running.json"
_LOCK = ".study.lock"
_LOCK_TIMEOUT = 0.5
"""Seconds; longer than :func:`is_running` holds the lock."""


class Stage(Enum):
    """Stage of a run."""

    WAITING = "waiting"
    QUEUED = "in Slurm's queue"
    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True)
class State:
    """Stage and progress of a run.

    Attributes:
        epoch: number of finished epochs; None if it is unknown.
        epochs: planned number of epochs; None if the trainer's name does not give it.
        pseudo_dice: nnU-Net's pseudo Dice of the last epoch, mean over the classes, in [0, 1].
        dice: mean foreground Dice of the validation, in [0, 1].
        seconds: time of all attempts of a finished run with its validation, if it is recorded.
        validated: number of cases that the running validation has predicted.
        reason: error of a failed run.
    """

    stage: Stage
    epoch: int | None = 0
    epochs: int | None = None
    pseudo_dice: float | None = None
    dice: float | None = None
    seconds: float | None = None
    validated: int = 0
    reason: str = ""

    @property
    def progress(self) -> str:
        """Finished and planned epochs, such as "3/10", with "?" for what is unknown."""
        return "/".join("?" if epochs is None else str(epochs) for epochs in (self.epoch, self.epochs))

    @property
    def activity(self) -> str:
        """Stage in words; of a run that is trained, how far its validation is."""
        is_validating = self.stage is Stage.RUNNING and self.epoch == self.epochs
        return f"validating, {counted(self.validated, 'case')}" if is_validating else self.stage.value


@dataclass(frozen=True)
class StudyPaths:
    """Folders of a study.

    Attributes:
        results: ``nnUNet_results``.
        study: folder for the study's logs and jobs.
        preprocessed: ``nnUNet_preprocessed``; None if it is not set, as results can be read without it.
    """

    results: Path
    study: Path
    preprocessed: Path | None = None

    @classmethod
    def of(cls, study: str, folders: Mapping[str, str]) -> StudyPaths:
        """Return the folders of a study.

        Args:
            study: its name.
            folders: nnU-Net's folders by the names of their environment variables; only that of the
                results is needed.
        """
        results, preprocessed = Path(folders["nnUNet_results"]), folders.get("nnUNet_preprocessed")
        return cls(results, results / "studies" / study, Path(preprocessed) if preprocessed else None)

    @property
    def file(self) -> Path:
        """Definition of the study as it was run."""
        return self.study / "study.yaml"

    @property
    def splits(self) -> Path:
        """Splits of the data sets when the study began."""
        return self.study / "splits.json"

    @property
    def logs(self) -> Path:
        """Folder of all logs."""
        return self.study / "logs"

    @property
    def jobs(self) -> Path:
        """Folder of submitit's files."""
        return self.study / "jobs"

    def log(self, run: Run) -> Path:
        """Return the file with the output of nnU-Net's commands."""
        return self.logs / f"{run.key}.log"

    def failure(self, run: Run) -> Path:
        """Return the file that exists while the last attempt has failed."""
        return self.logs / f"{run.key}.failed"


def state_of(run: Run, paths: StudyPaths, queued: frozenset[str] = frozenset()) -> State:
    """Return the present state of a run.

    Args:
        run: the run.
        paths: the study's folders.
        queued: keys of the runs in Slurm's queue.
    """
    folder = run.folder(paths.results)
    planned, done = planned_epochs(run, paths.results), finished(run, paths)
    if done is not None:  # without its logs, as reading those of many runs takes long
        epoch = finished_after(folder) or planned
        return State(Stage.DONE, epoch, planned, dice=done.dice, seconds=recorded_seconds(folder))
    epoch, pseudo_dice = fold_files.read_progress(folder)
    failure, reason = paths.failure(run), ""
    if is_running(run, paths):
        stage = Stage.RUNNING
    elif run.key in queued:
        stage = Stage.QUEUED
    elif failure.exists():
        stage, reason = Stage.FAILED, failure.read_text().strip()
    else:
        stage = Stage.STOPPED if epoch else Stage.WAITING
    validated = _count_validated(folder) if epoch == planned else 0
    return State(stage, epoch, planned, pseudo_dice, validated=validated, reason=reason)


def _count_validated(fold: Path) -> int:
    """Return the number of cases that the running process has predicted; earlier ones begin again."""
    record = fold / _PROCESS
    if not record.exists():
        return 0
    started, files = record.stat().st_mtime, (fold / "validation").glob("*")
    cases = {path.name.partition(".")[0] for path in files if path.stat().st_mtime >= started}
    return len(cases - {"summary"})


def finished(run: Run, paths: StudyPaths) -> Validation | None:
    """Return the validation of a run that is trained and validated on all cases, otherwise None."""
    validation = find_validation(run.folder(paths.results))
    if validation is None or validation.missing(validation_cases(run, paths.splits, paths.preprocessed)):
        return None
    return validation


def validation_cases(run: Run, recorded: Path | None, preprocessed: Path | None) -> frozenset[str]:
    """Return the validation cases of a run's fold, none if no file has the fold.

    Args:
        run: the run.
        recorded: the study's record of the splits of its data sets, which comes first.
        preprocessed: ``nnUNet_preprocessed``, with nnU-Net's own file of the folds.
    """
    return frozenset(cases_of_fold(run, recorded, preprocessed).get("val", []))


def cases_of_fold(run: Run, recorded: Path | None, preprocessed: Path | None) -> dict[str, list[str]]:
    """Return the cases of a run's fold, ``train`` and ``val``; see :func:`validation_cases`."""
    own = preprocessed / run.dataset / SPLITS if preprocessed else None
    for file, keys in ((recorded, [run.dataset, run.fold]), (own, [run.fold])):
        with suppress(OSError, ValueError, LookupError, TypeError):  # no such file, or not the fold
            if file is not None:
                found = _read_splits(file, file.stat().st_mtime_ns)
                for key in keys:
                    found = found[key]
                return {part: sorted(map(str, found[part])) for part in ("train", "val")}
    return {}


@lru_cache(maxsize=64)
def _read_splits(file: Path, changed: int) -> Any:
    return read_json(file)


def recorded_seconds(fold: Path) -> float | None:
    """Return the time of all attempts of a run with its validation, None if it is not recorded."""
    return finite_number(_read_record(fold).get("seconds"))


def finished_after(fold: Path) -> int | None:
    """Return the number of epochs of a training that was ended early, otherwise None."""
    if (record := read_record(fold)) is not None:
        return record.finished_after
    epochs = finite_number(_read_record(fold).get("epochs"))  # of versions before 0.4.0
    return None if epochs is None else int(epochs)


def _read_record(fold: Path) -> dict[str, Any]:
    try:
        return dict(read_json(fold / fold_files.RESOURCES))
    except (OSError, ValueError, TypeError):
        return {}


def add_seconds(fold: Path, seconds: float) -> None:
    """Record the time of an attempt in addition to that of earlier ones."""
    total = (recorded_seconds(fold) or 0) + seconds
    write_json(fold / fold_files.RESOURCES, {**_read_record(fold), "seconds": total})


@lru_cache(maxsize=4096)
def parse_trainer(name: str) -> TrainerName | None:
    """Return the settings of a trainer of this package, None for all other names."""
    from nnunet_cpr.names import WrongName
    from nnunet_cpr.names.trainer_name import parse_trainer_name

    try:
        return parse_trainer_name(name)
    except WrongName:
        return None  # a trainer of another package with a similar name


def planned_epochs(run: Run, results: Path) -> int | None:
    """Return the planned number of epochs of a run, None if neither its record nor its name has it."""
    record, ours = read_record(run.folder(results)), parse_trainer(run.trainer)
    if record is not None and record.training:
        return int(record.training["epochs"])
    if ours is not None and ours.epochs is not None:
        return ours.epochs
    base = run.trainer if ours is None else ours.on or "nnUNetTrainer"
    if named := re.search(r"_(\d{1,9})epochs?(?:_|$)", base):
        return int(named[1])
    return 1000 if base == "nnUNetTrainer" else None


# Running processes


@contextmanager
def claim(run: Run, paths: StudyPaths) -> Iterator[bool]:
    """Reserve a run for this process; yield False if another process has it."""
    folder = run.folder(paths.results)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / _LOCK).acquire(timeout=_LOCK_TIMEOUT)
    except Timeout:
        yield False
        return
    with lock:
        if _training(folder):
            yield False
            return
        try:
            yield True
        finally:
            (folder / _PROCESS).unlink(missing_ok=True)


@contextmanager
def running_command(paths: StudyPaths) -> Iterator[None]:
    """Record this process as one that runs the study, for :func:`stop_command`."""
    record = paths.study / f".run_{os.getpid()}.json"
    write_json(record, {"host": socket.gethostname(), "started": process_start(os.getpid())})
    try:
        yield
    finally:
        record.unlink(missing_ok=True)


def stop_command(runs: Iterable[Run], paths: StudyPaths) -> Iterator[str]:
    """Send SIGTERM to what runs a study on this machine, and yield a line about each process.

    These are its commands, as shells let those in the background ignore SIGINT, and the trainings whose
    command was killed.

    Raises:
        Refusal: others work on some of the runs; it names them.
    """
    commands = set()
    for path in paths.study.glob(".run_*.json"):
        record, pid = read_json(path), int(path.stem.rpartition("_")[2])
        if record["host"] != socket.gethostname():
            continue
        if _process(pid, record["started"]):
            _terminate(pid)
            commands.add(pid)
            yield f"stopping the command with process {pid}"
        else:
            path.unlink(missing_ok=True)  # of a command that was killed
    others = []
    for run in runs:
        folder = run.folder(paths.results)
        training, is_claimed = _training(folder), _is_locked(folder)
        if training and not is_claimed:
            _terminate(training.pid)
            yield f"stopping process {training.pid}, whose command was killed: {run.key}"
        elif training and training.ppid() not in commands:
            others.append(f"{run.key}: process {training.ppid()}, end it: kill {training.ppid()}")
        elif is_claimed and not training and not commands:
            others.append(f"{run.key}: a process of another machine, or one that is about to train")
    if others:
        raise Refusal(f"runs of another command: {'; '.join(others)}")


def _process(pid: int, started: str | None) -> psutil.Process | None:
    """Return a process that still runs and had this start, so that its number is not another's."""
    try:
        process = psutil.Process(pid)
        return process if started in (None, process_start(pid)) else None
    except psutil.NoSuchProcess:
        return None


def _terminate(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGTERM)


def record_process(run: Run, paths: StudyPaths, pid: int) -> None:
    """Record the process of a training, which may outlive its worker."""
    started, host = process_start(pid), socket.gethostname()
    record = {"host": host, "pid": pid, "started": started, "trainer": run.trainer}
    write_json(run.folder(paths.results) / _PROCESS, record)


def is_running(run: Run, paths: StudyPaths) -> bool:
    """Return True if a process trains or validates this run."""
    folder = run.folder(paths.results)
    return _training(folder) is not None or _is_locked(folder)


def _is_locked(folder: Path) -> bool:
    """Return True if a process has claimed this run."""
    if not (folder / _LOCK).exists():
        return False
    try:
        with FileLock(folder / _LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # another user's lock, or a folder that cannot be written
        return False  # on this machine the recorded process shows the training


def _training(folder: Path) -> psutil.Process | None:
    """Return the recorded training if it still runs on this machine."""
    try:
        record = read_json(folder / _PROCESS)
        if record["host"] != socket.gethostname():
            return None
        started = record.get("started")
        # Version 0.2.0 recorded no start, and 0.3.0 a time that moves with the clock.
        process = _process(record["pid"], started if isinstance(started, str) else None)
        return process if process and record["trainer"] in process.cmdline() else None
    except (OSError, ValueError, LookupError, TypeError, OverflowError, psutil.Error):
        return None


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
