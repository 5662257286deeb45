"""Saving, interrupting and continuing a training.

The checkpoint of the start of the running epoch is kept in host memory. It is written when a signal ends
the training. With ``--c`` a training continues from the newest checkpoint that can be read.

A checkpoint is a zip file with a pickle, and unpickling can execute arbitrary code. Only tensors, plain
values and the types in :data:`SAFE_GLOBALS` are loaded.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import stat
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
from torch import distributed
from torch.optim import Optimizer

from nnunet_cpr._files import atomic_torch_save
from nnunet_cpr._validation import positive_number
from nnunet_cpr.nnunet.fold_files import BEST_CHECKPOINT, FINAL_CHECKPOINT, LATEST_CHECKPOINT
from nnunet_cpr.nnunet.stop_signals import TERMINATION_SIGNALS, handle_signals

SAVE_MINUTES = "NNUNET_CPR_SAVE_MINUTES"
"""Environment variable with the save interval in minutes; 0 saves after every epoch."""

START_ANEW = "to start a new training from its weights, pass it to -pretrained_weights"

_numpy_scalar = np.float32(0).__reduce__()[0]
SAFE_GLOBALS: tuple[Any, ...] = (
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),  # written with numpy 1
    np.dtype,
    *(type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"),
)
"""Types beyond tensors and plain values that nnU-Net's checkpoints need: NumPy scalars in the logs."""

ENTRIES = ("network_weights", "optimizer_state", "logging", "current_epoch", "init_args", "trainer_name")
"""Entries that a training needs to continue."""


class UnusableCheckpoint(RuntimeError):
    """Checkpoint that cannot be used; the message is one line with the file and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")


def one_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


# Saving


def save_interval() -> float:
    """Return the save interval in seconds.

    Raises:
        ValueError: the environment variable has a wrong value.
    """
    value: float | str = os.environ.get(SAVE_MINUTES) or 10.0
    with suppress(ValueError):  # a text is refused below
        value = float(value)
    return 60 * positive_number(SAVE_MINUTES, value, allow_zero=True)


class EpochStart:
    """Checkpoint of the start of the running epoch, in host memory, which is used again in each epoch.

    Attributes:
        path: file of the checkpoint.
        epoch: number of the epoch, None without a checkpoint.

    Example:
        >>> start = EpochStart(Path("checkpoint_latest.pth"))
        >>> start.renew(lambda file: torch.save({"current_epoch": 3}, file), epoch=3, logged={})
        >>> start.epoch
        3
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch: int | None = None
        self._memory = io.BytesIO()
        self._logged: dict[str, list[Any]] = {}

    def renew(self, save: Callable[[Any], None], epoch: int, logged: Mapping[str, list[Any]]) -> None:
        """Replace the checkpoint.

        Args:
            save: function that saves the present state, but not what was logged, to a file object.
            epoch: number of the epoch that starts.
            logged: entry ``logging`` of the checkpoint, a list by name.
        """
        self.epoch = None
        self._logged = {key: list(values) for key, values in logged.items()}
        self._memory.seek(0)
        # Checksums would take longer than the copy; write_file adds them.
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            save(self._memory)
        finally:
            torch.serialization.set_crc32_options(before)
        self._memory.truncate()
        self.epoch = epoch

    def write_file(self) -> str:
        """Write the checkpoint if there is one, and return a message for the user.

        Raises:
            OSError: the file cannot be written; a previous one is unchanged.
        """
        if self.epoch is None:
            return "ended without writing a checkpoint; continue with --c"
        self._memory.seek(0)
        with restricted_loading():
            checkpoint = torch.load(self._memory, map_location="cpu")
        checkpoint["logging"] = self._logged
        atomic_torch_save(checkpoint, self.path)
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
        self._ranks = [os.getpid()]
        self._is_deferred = False
        self._pending: int | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Act on signals in this context, except on those that somebody else ignores or handles.

        With distributed training, all ranks must enter it. Outside of the main thread, in which Python
        handles signals, it does nothing.
        """
        if distributed.is_available() and distributed.is_initialized():
            self._ranks = [0] * distributed.get_world_size()
            distributed.all_gather_object(self._ranks, os.getpid())
        numbers: Sequence[signal.Signals] = (signal.SIGINT, *TERMINATION_SIGNALS)
        if threading.current_thread() is not threading.main_thread():
            numbers = ()
        defaults = (signal.SIG_DFL, signal.default_int_handler)
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
        if os.getpid() != self._ranks[0]:
            try:
                os.kill(self._ranks[0], number)
            except ProcessLookupError:  # it has failed
                os._exit(128 + number)
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
        if number == signal.SIGINT and len(self._ranks) == 1:
            self._is_deferred = False
            raise KeyboardInterrupt
        for pid in self._ranks:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for each in (*process.children(recursive=True), process):
                    if each.pid != os.getpid():
                        each.kill()
        os._exit(128 + number)


# Continuing


@contextmanager
def restricted_loading() -> Iterator[None]:
    """Restrict every ``torch.load`` in this context to what :func:`read` loads."""
    with (
        mock.patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}),
        torch.serialization.safe_globals(list(SAFE_GLOBALS)),
    ):
        os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
        yield


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
            # It loads arbitrary values for a file that is marked as a folder.
            marks = [file.external_attr & stat.FILE_ATTRIBUTE_DIRECTORY for file in archive.infolist()]
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged!r} is wrong")
        if any(marks):
            raise zipfile.BadZipFile("a file in it is marked as a folder")
        with restricted_loading():
            checkpoint = torch.load(path, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise UnusableCheckpoint(
            path,
            "contains objects that checkpoints of nnU-Net do not need; they were not loaded. Do not use "
            "this file unless you trust its source",
        ) from error
    except Exception as error:  # flipped bits can fail in any way
        raise UnusableCheckpoint(path, f"is damaged or cannot be read: {one_line(error)}") from error
    missing = [key for key in needed if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise UnusableCheckpoint(path, f"is not a checkpoint of nnU-Net: {missing[0]!r} is missing")
    return dict(checkpoint)


def count_parameters(path: Path) -> int:
    """Return the number of network parameters in a checkpoint, without reading their values."""
    with restricted_loading():
        checkpoint = torch.load(path, map_location="meta", mmap=True)
    return sum(value.numel() for value in checkpoint["network_weights"].values())


def read_newest(chosen: Path, report: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Load the newest checkpoint that can be read.

    It is the one with the most epochs of the training that was started last: where a training is started
    anew, the final checkpoint of the one before is still there.

    Args:
        chosen: the checkpoint that nnU-Net has chosen. Any but the final and the latest is taken as it
            is: nnU-Net chooses the best one where there is no other, and for ``--val_best``.
        report: function that shows a message, called for each file that cannot be read.

    Raises:
        UnusableCheckpoint: none can be read.
    """
    if chosen.name not in (FINAL_CHECKPOINT, LATEST_CHECKPOINT):
        return chosen, read(chosen)
    newest: tuple[Path, dict[str, Any]] | None = None
    # Of two that are equally new, nnU-Net writes the latest before it updates the best pseudo Dice.
    for name in (FINAL_CHECKPOINT, BEST_CHECKPOINT, LATEST_CHECKPOINT):
        path = chosen.with_name(name)
        try:
            checkpoint = read(path) if path.exists() else None
        except UnusableCheckpoint as error:
            report(f"{error}; it is skipped")
            continue
        if checkpoint and (newest is None or _age(checkpoint) > _age(newest[1])):
            newest = path, checkpoint
    if newest is None:
        raise UnusableCheckpoint(chosen.parent, "has no checkpoint that can be read; train without --c")
    return newest


def _age(checkpoint: Mapping[str, Any]) -> tuple[float, int]:
    """Return the start of a checkpoint's training, infinite in its first epoch, and its epochs."""
    starts = checkpoint["logging"].get("epoch_start_timestamps") or [float("inf")]
    return starts[0], checkpoint["current_epoch"]


def optimizer_differences(
    saved: Mapping[str, Any], optimizer: Optimizer, compare_groups: bool
) -> Iterator[str]:
    """Yield each difference of a saved optimizer that torch would load without an error.

    torch replaces the optimizer's settings by the saved ones and ignores unknown entries.

    Args:
        saved: the state dict.
        optimizer: the optimizer of this training.
        compare_groups: False if the training may change the settings of the parameter groups.
    """
    own = optimizer.state_dict()
    for key, title in (("cpr", "CPR"), ("baseline", "a comparison method")):
        if (key in saved) != (key in own):
            yield f"{'with' if key in saved else 'without'} {title}"
    for group, before in zip(optimizer.param_groups, saved["param_groups"] if compare_groups else ()):
        for key in ("momentum", "betas", "weight_decay", "adamw_for"):
            if before.get(key) != group.get(key):
                yield f"{key}: expected {group.get(key)}, got {before.get(key)}"
