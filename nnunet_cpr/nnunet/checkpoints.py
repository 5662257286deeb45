"""Saving, interrupting and continuing a training.

The checkpoint of the start of the running epoch is kept in host memory. It is written when the save
interval has passed and when a signal ends the training. With ``--c`` a training continues from the
newest checkpoint that can be read.

A checkpoint is a zip file with a pickle, and unpickling can execute arbitrary code. Only tensors, plain
values and the types in :data:`SAFE_GLOBALS` are loaded.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch import distributed
from torch.optim import Optimizer

from nnunet_cpr._validation import positive_number
from nnunet_cpr.cpr import CPRSettings
from nnunet_cpr.nnunet.fold_files import CHECKPOINTS, FINAL_CHECKPOINT, LATEST_CHECKPOINT
from nnunet_cpr.nnunet.stop_signals import TERMINATION_SIGNALS, handle_signals

if TYPE_CHECKING:
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

SAVE_MINUTES = "NNUNET_CPR_SAVE_MINUTES"
"""Environment variable with the save interval in minutes; 0 saves after every epoch."""
DEFAULT_SAVE_MINUTES = 10.0

START_ANEW = "to start a new training from its weights, pass it to -pretrained_weights"

_numpy_scalar = np.float32(0).__reduce__()[0]
SAFE_GLOBALS: tuple[Any, ...] = (
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),  # written with numpy 1
    np.dtype,
    *(type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"),
)
"""Types beyond tensors and plain values that nnU-Net's checkpoints need: NumPy scalars in the logs."""

_UNFINISHED = ".saving-checkpoint-"

ENTRIES = ("network_weights", "optimizer_state", "logging", "current_epoch", "init_args", "trainer_name")
"""Entries that a training needs to continue."""


class UnusableCheckpoint(RuntimeError):
    """Checkpoint that cannot be used; the message is one line with the file and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")


# Saving


def save_interval() -> float:
    """Return the save interval in seconds.

    Raises:
        ValueError: the environment variable has a wrong value.
    """
    value: float | str = os.environ.get(SAVE_MINUTES) or DEFAULT_SAVE_MINUTES
    with suppress(ValueError):  # a text is refused below
        value = float(value)
    return 60 * positive_number(SAVE_MINUTES, value, allow_zero=True)


@contextmanager
def saved_as_a_whole(path: Path) -> Iterator[Path]:
    """Yield a path to save to; what is saved in its folder replaces the files beside ``path`` at once.

    Some trainers write more files beside their checkpoints.

    Raises:
        OSError: a file cannot be written.
    """
    with TemporaryDirectory(prefix=_UNFINISHED, dir=path.parent) as folder:
        yield Path(folder) / path.name
        for file in Path(folder).iterdir():
            with open(file, "rb") as written:
                os.fsync(written.fileno())
            os.replace(file, path.with_name(file.name))


def remove_unfinished(folder: Path) -> None:
    """Remove what trainings that were killed while they saved have left in a folder."""
    for unfinished in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(unfinished, ignore_errors=True)


class EpochStart:
    """Checkpoint of the start of the running epoch, in host memory.

    ``torch.save`` writes into this object as into a file. The memory is used again in each epoch.

    Attributes:
        path: file of the checkpoint.
        epoch: number of the epoch, None without a checkpoint.

    Example:
        >>> start = EpochStart(Path("checkpoint_latest.pth"))
        >>> start.renew(lambda file: torch.save({"current_epoch": 3}, file), epoch=3)
        >>> start.epoch
        3
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch: int | None = None
        self._memory = bytearray()
        self._size = 0

    def renew(self, save: Callable[[Any], None], epoch: int) -> None:
        """Replace the checkpoint.

        Args:
            save: function that saves the present state to a file object.
            epoch: number of the epoch that starts.
        """
        self.epoch, self._size = None, 0
        # Checksums would take longer than the copy; write_file adds them.
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            save(self)
        finally:
            torch.serialization.set_crc32_options(before)
        if self._size > 0:  # trainers without checkpoints save nothing
            self.epoch = epoch

    def clear(self) -> None:
        """Forget the checkpoint."""
        self.epoch = None

    # Not __str__, by which nnU-Net writes down all attributes of a trainer.
    def __format__(self, specification: str) -> str:
        raise TypeError("a checkpoint in memory has no path")

    def write(self, content: Any) -> int:
        """Append bytes, for ``torch.save``."""
        end = self._size + len(content)
        self._memory[self._size : end] = content
        self._size = end
        return len(content)

    def flush(self) -> None:
        """Do nothing, for ``torch.save``."""

    def write_file(self) -> str:
        """Write the checkpoint if there is one, and return a message for the user."""
        if self.epoch is None:
            return "ended without writing a checkpoint; continue with --c"
        written = io.BytesIO(memoryview(self._memory)[: self._size])
        with restricted_loading():
            checkpoint = torch.load(written, map_location="cpu")
        try:
            with saved_as_a_whole(self.path) as temporary:
                torch.save(checkpoint, temporary)
        except (OSError, RuntimeError) as error:  # torch raises the latter if the disk is full
            reason = getattr(error, "strerror", "is the disk full?")
            return f"cannot write {self.path}: {reason}; continue from an older one with --c"
        place = f"{self.path.parent.name}/{self.path.name}"
        return f"wrote {place} (start of epoch {self.epoch}); continue with --c"


# Interrupting


class Interruption:
    """End of a training by a signal: of a cluster's scheduler, or Ctrl-C.

    Rank 0 saves and ends all ranks and their child processes, with status 128 + signal. The other ranks
    pass signals on to it and go on, since rank 0 may wait for them. Ctrl-C in a training without ranks
    raises KeyboardInterrupt, as usual.

    Args:
        save: function that saves the state and returns a message.
        report: function that shows a message.
    """

    def __init__(self, save: Callable[[], str], report: Callable[[str], None]) -> None:
        self._save, self._report = save, report
        self._ranks: list[int] = []
        self._is_deferred = False
        self._pending: int | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Act on signals in this context, except on those that somebody else ignores or handles.

        With distributed training, all ranks must enter it.
        """
        if threading.current_thread() is not threading.main_thread():
            self._report("the training is not in the main thread: signals end it without a checkpoint")
            yield
            return
        if distributed.is_available() and distributed.is_initialized():
            self._ranks = [0] * distributed.get_world_size()
            distributed.all_gather_object(self._ranks, os.getpid())
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        numbers = (signal.SIGINT, *TERMINATION_SIGNALS)
        with handle_signals([n for n in numbers if signal.getsignal(n) in defaults], self._handle):
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Act on signals at the end of this context, in which files or the kept state change."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
            if self._pending is not None:
                self._end(self._pending)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ranks and os.getpid() != self._ranks[0]:
            if _runs(self._ranks[0]):
                os.kill(self._ranks[0], number)
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif self._is_deferred:
            self._pending = self._pending or number
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        self._is_deferred, self._pending = True, None  # schedulers send several signals
        try:
            message = self._save()
        except Exception as error:  # the process must end in any case
            message = f"cannot save the state: {one_line(error)}; continue from an older one with --c"
        # The signal may have come while the main thread was printing, or nobody reads the output.
        with suppress(RuntimeError, OSError, ValueError):
            self._report(f"{signal.Signals(number).name}: {message}")
            sys.stdout.flush()
        if number == signal.SIGINT and not self._ranks:
            self._is_deferred = False
            raise KeyboardInterrupt
        for pid in self._ranks or [os.getpid()]:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for child in process.children(recursive=True):
                    child.kill()
                if pid != os.getpid():
                    process.kill()
        os._exit(128 + number)


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


# Continuing


@contextmanager
def restricted_loading() -> Iterator[None]:
    """Restrict every ``torch.load`` in this context to what :func:`read` loads."""
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ[names[0]] = "1"
    try:
        with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
            yield
    finally:
        del os.environ[names[0]]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def read(path: Path, needed: Sequence[str] = ENTRIES) -> dict[str, Any]:
    """Load a checkpoint of nnU-Net to the CPU.

    Args:
        path: the file.
        needed: required entries.

    Raises:
        UnusableCheckpoint: it cannot be read, is damaged or not a checkpoint of nnU-Net, or contains
            objects that such a checkpoint does not need.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch does not compare the checksums that it writes
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged!r} is wrong")
        with restricted_loading():
            checkpoint = torch.load(path, map_location="cpu")
    except pickle.UnpicklingError as error:
        found = re.findall(r"(?:GLOBAL|unrecognized function|class) ([\w.]+)", str(error))
        raise UnusableCheckpoint(
            path,
            f"contains {found[0] if found else 'an object'}, which checkpoints of nnU-Net do not need; "
            "it was not executed. Do not use this file unless you trust its source",
        ) from error
    except OSError as error:
        raise UnusableCheckpoint(path, f"cannot be read: {error.strerror or error}") from error
    except Exception as error:  # flipped bits can fail in any way
        raise UnusableCheckpoint(path, f"is damaged: {one_line(error)}") from error
    missing = [key for key in needed if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise UnusableCheckpoint(path, f"is not a checkpoint of nnU-Net: {missing[0]!r} is missing")
    return dict(checkpoint)


def one_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def finished_epochs(path: Path) -> tuple[float, int] | None:
    """Return when the training of a checkpoint was started, and how many epochs it had finished.

    The tensors are not read.

    Returns:
        Seconds since the epoch of Unix and number of epochs, or None if the file cannot be read.
    """
    try:
        with restricted_loading():
            checkpoint = torch.load(path, map_location="meta", mmap=True)
        starts = checkpoint["logging"].get("epoch_start_timestamps") or [path.stat().st_mtime]
        return float(starts[0]), int(checkpoint["current_epoch"])
    except Exception:  # read() reports the reason
        return None


def read_newest(chosen: Path, report: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Load the newest checkpoint that can be read.

    It is the one with the most epochs of the training that was started last: where a training is started
    anew, the final checkpoint of the one before is still there.

    Args:
        chosen: the checkpoint that nnU-Net has chosen. Any but the final and the latest is taken as it
            is: nnU-Net chooses the best one where there is no other, and for ``--val_best``.
        report: function that shows a message, called for each file that cannot be read.

    Raises:
        UnusableCheckpoint: none can be read; the error is that of the last one.
    """
    paths = [chosen]
    if chosen.name in (FINAL_CHECKPOINT, LATEST_CHECKPOINT):
        paths = [path for name in CHECKPOINTS if (path := chosen.with_name(name)).exists()]

    def age(path: Path) -> tuple[float, int, bool]:
        # Of two that are equally new, nnU-Net writes the latest before it updates the best pseudo Dice.
        return *(finished_epochs(path) or (float("inf"), 0)), path.name != LATEST_CHECKPOINT

    *others, last = sorted(paths, key=age, reverse=True)
    for path in others:
        try:
            return path, read(path)
        except UnusableCheckpoint as error:
            report(f"{error}; trying the next older checkpoint")
    return last, read(last)


_NOT_COMPARED = {
    *("params", "param_names"),  # the names of the network's weights are compared when they are loaded
    *("lr", "initial_lr"),  # the schedule sets them
    *("foreach", "fused", "capturable", "differentiable"),  # of the step, not of its result
    *CPRSettings.KEYS,  # CPR compares them itself, for each parameter
}


def check_matches(
    path: Path, checkpoint: Mapping[str, Any], trainer: nnUNetTrainer, keeps_optimizer: bool
) -> None:
    """Check that the optimizer is one that torch loads correctly, not only without an error.

    Args:
        path: the file.
        checkpoint: its content.
        trainer: the trainer of this training.
        keeps_optimizer: True if its optimizer is that of another trainer, which may change the
            optimizer and its settings during the training.

    Raises:
        UnusableCheckpoint: the optimizer or its settings differ.
    """
    difference = _optimizer_difference(checkpoint["optimizer_state"], trainer.optimizer, keeps_optimizer)
    if difference:
        raise UnusableCheckpoint(
            path,
            f"was written by {checkpoint['trainer_name']}, expected {type(trainer).__name__}: "
            f"{difference}; {START_ANEW}",
        )


def _optimizer_difference(
    saved: Mapping[str, Any], optimizer: Optimizer, keeps_optimizer: bool
) -> str | None:
    """Return the first difference, None if there is none.

    torch replaces the optimizer's settings by the saved ones and ignores unknown entries.
    """
    own = optimizer.state_dict()
    for key, title in (("cpr", "CPR"), ("baseline", "a comparison method")):
        if (key in saved) != (key in own):
            return f"{'with' if key in saved else 'without'} {title}"
    if keeps_optimizer:
        return None
    for group, before in zip(optimizer.param_groups, saved["param_groups"]):
        if any((key in group) != (key in before) for key in ("momentum", "betas")):
            return "with another optimizer"
        for key in sorted(group.keys() & before.keys() - _NOT_COMPARED):
            if before[key] != group[key]:
                return f"{key}: expected {group[key]}, got {before[key]}"
    return None
