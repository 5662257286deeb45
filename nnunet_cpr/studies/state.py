"""How far a cell of a study is, read from the files that nnU-Net and the study's workers leave."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import socket
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from nnunet_cpr._files import atomic_write, read_json
from nnunet_cpr.nnunet.commands import last_lines
from nnunet_cpr.nnunet.fold_files import read_logs
from nnunet_cpr.studies.definition import Cell

_RUNNING = ".study_running.json"
_LOCK = ".study.lock"


class Stage(Enum):
    """Where a cell stands."""

    WAITING = "waiting"
    QUEUED = "in Slurm's queue"
    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True)
class State:
    """A cell's stage and what its log tells.

    Attributes:
        epoch: epochs that are over.
        epochs: how many it shall be; None where the trainer does not say.
        pseudo_dice: nnU-Net's, of the last epoch, mean over the classes, in [0, 1].
        seconds_left: of training, from the median epoch so far.
        dice: mean foreground Dice of the validation, in [0, 1].
        why: the last lines of the log of what failed.
    """

    stage: Stage
    epoch: int = 0
    epochs: int | None = None
    pseudo_dice: float | None = None
    seconds_left: float | None = None
    dice: float | None = None
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Places:
    """The folders of a study.

    Attributes:
        results: ``nnUNet_results``.
        study: logs and jobs of this study.
    """

    results: Path
    study: Path

    def log(self, cell: Cell) -> Path:
        """What nnU-Net's commands print for this cell."""
        return self.study / "logs" / f"{cell.key}.log"

    def failure(self, cell: Cell) -> Path:
        """There while the last attempt has failed."""
        return self.study / "logs" / f"{cell.key}.failed"


def state_of(cell: Cell, places: Places, queued: frozenset[str] = frozenset()) -> State:
    """Look at a cell.

    Args:
        cell: which.
        places: where.
        queued: the keys of the cells that wait in Slurm's queue.
    """
    folder = cell.folder(places.results)
    epoch, pseudo_dice, seconds = _progress(folder)
    epochs = _planned_epochs(cell.trainer)
    dice = validation_dice(folder)
    if dice is not None:
        return State(Stage.DONE, epoch, epochs, pseudo_dice, dice=dice)
    if is_running(cell, places):
        left = None if epochs is None or seconds is None else max(epochs - epoch, 0) * seconds
        return State(Stage.RUNNING, epoch, epochs, pseudo_dice, left)
    if cell.key in queued:
        return State(Stage.QUEUED, epoch, epochs, pseudo_dice)
    if places.failure(cell).exists():
        lines = tuple(last_lines(places.failure(cell), 6))
        return State(Stage.FAILED, epoch, epochs, pseudo_dice, why=lines)
    return State(Stage.STOPPED if epoch else Stage.WAITING, epoch, epochs, pseudo_dice)


def validation_dice(fold: Path) -> float | None:
    """Mean foreground Dice of a training that is over and validated; None where it is not."""
    if not is_whole(fold / "checkpoint_final.pth"):
        return None
    try:
        summary = read_json(fold / "validation" / "summary.json")
        dice = float(summary["foreground_mean"]["Dice"])
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError):
        return None  # nnU-Net has not written it, or was stopped while it did
    return dice if 0 <= dice <= 1 or math.isnan(dice) else None


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end: torch's are zip archives, listed at the end."""
    return checkpoint.is_file() and zipfile.is_zipfile(checkpoint)


def _planned_epochs(trainer: str) -> int | None:
    from nnunet_cpr.names import WrongName
    from nnunet_cpr.names.trainer_name import parse_trainer_name

    try:
        ours = parse_trainer_name(trainer)
    except WrongName:
        ours = None  # somebody else's, with a name almost like ours
    if ours is not None:
        return ours.epochs or 1000
    named = re.search(r"_(\d{1,9})epochs?(?:_|$)", trainer)
    if named:
        return int(named[1])
    return 1000 if trainer == "nnUNetTrainer" else None


def _progress(fold: Path) -> tuple[int, float | None, float | None]:
    """Epochs that are over, the last one's pseudo Dice, the median epoch's seconds."""
    looks = ((log, log.stat()) for log in fold.glob("training_log_*.txt"))
    return _progress_in(fold, frozenset((log, look.st_size, look.st_mtime_ns) for log, look in looks))


@lru_cache(maxsize=4096)
def _progress_in(
    fold: Path, logs: frozenset[tuple[Path, int, int]]
) -> tuple[int, float | None, float | None]:
    # A live table asks every second, for all cells of a study, and most logs are as they were.
    over = read_logs(fold).dropna(subset=["seconds"])
    if over.empty:
        return 0, None, None
    dice = float(over["pseudo_dice"].iloc[-1])
    epochs = int(over["epoch"].iloc[-1]) + 1
    return epochs, None if math.isnan(dice) else dice, float(over["seconds"].median())


# Whether somebody is at work


@contextmanager
def at_work(cell: Cell, places: Places) -> Iterator[bool]:
    """Hold a cell for this process; False where somebody else is at work on it."""
    folder = cell.folder(places.results)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "a") as lock:
        free = _locked(lock)
        for _ in range(5):
            if not free:  # perhaps for a moment only: is_running tries the lock too
                time.sleep(0.05)
                free = _locked(lock)
        if not free or _training_process(folder) is not None:
            yield False
            return
        try:
            yield True
        finally:
            (folder / _RUNNING).unlink(missing_ok=True)


def note_process(cell: Cell, places: Places, pid: int) -> None:
    """Write down the training's process: it may live on when the worker that watches it is killed."""
    record = {"host": socket.gethostname(), "pid": pid, "trainer": cell.trainer}
    write_json(cell.folder(places.results) / _RUNNING, record)


def is_running(cell: Cell, places: Places) -> bool:
    """Whether a process trains or validates this cell."""
    folder = cell.folder(places.results)
    if _training_process(folder) is not None:
        return True
    try:
        with open(folder / _LOCK) as lock:
            return not _locked(lock)
    except FileNotFoundError:
        return False


def _locked(file: IO[str]) -> bool:
    """Lock a file until it is closed; the system does that for a process that dies."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _training_process(folder: Path) -> int | None:
    """The number of a training on this machine that is still there."""
    try:
        record = read_json(folder / _RUNNING)
        host, pid, trainer = record["host"], int(record["pid"]), str(record["trainer"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None
    if host != socket.gethostname() or pid <= 0:
        return None
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        return None  # the number belongs to somebody else's process by now
    try:  # or to another one of ours
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return pid
    return pid if trainer.encode(errors="replace") in command else None


def write_json(path: Path, content: Any) -> None:
    """Write it whole or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
