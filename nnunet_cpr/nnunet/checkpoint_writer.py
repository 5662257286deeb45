"""Writer of the state at the start of the running epoch, in the background or at a signal."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from nnunet_cpr._files import atomic_torch_save
from nnunet_cpr._validation import positive_number
from nnunet_cpr.nnunet.fold_files import CHECKPOINTS, FINAL_CHECKPOINT, LATEST_CHECKPOINT
from nnunet_cpr.nnunet.host_copy import HostCopy, capture

SAVE_MINUTES = "NNUNET_CPR_SAVE_MINUTES"
"""Environment variable with the save interval in minutes; 0 saves after every epoch."""

DEFAULT_SAVE_MINUTES = 10.0


def save_interval() -> float:
    """Return the save interval in seconds.

    Raises:
        ValueError: the environment variable has a wrong value.
    """
    value: float | str = os.environ.get(SAVE_MINUTES) or DEFAULT_SAVE_MINUTES
    with contextlib.suppress(ValueError):  # a text is refused below
        value = float(value)
    return 60 * positive_number(SAVE_MINUTES, value, allow_zero=True)


class CheckpointWriter:
    """Writer of ``checkpoint_latest.pth`` with the state at the start of the running epoch.

    A copy of the state in host memory is renewed at the start of every epoch. It is written in the
    background so often that a killed training loses at most the save interval or one epoch, whichever is
    longer; and by :meth:`write_last` when a signal ends the training. A lock excludes two writes at the
    same time, those of nnU-Net included.

    Attributes:
        path: path of the checkpoint.
        is_capturing: True while :meth:`start_epoch` collects the state; a checkpoint that is saved
            meanwhile must be passed to ``torch.save`` under the given path. Other files that are saved
            meanwhile are written with it.
    """

    def __init__(self, path: Path, interval: float, warn: Callable[[str], None]) -> None:
        """Set the path, the save interval in seconds, and the function that reports failed writes."""
        self.path = path
        self.is_capturing = False
        self._interval = interval
        self._warn = warn
        self._lock = threading.Lock()
        self._copy = HostCopy()
        self._epoch = -1  # of the copy, -1 without one
        self._saved_epoch = -1  # the newest in the final and the latest checkpoint of this process
        self._epoch_start: float | None = None
        self._saved_at = 0.0  # time of the newest state in any checkpoint
        self._executor = ThreadPoolExecutor(1, "checkpoint-writer")
        self._pending: Future[None] | None = None

    def start_epoch(self, save: Callable[[str], None], epoch: int) -> None:
        """Renew the copy, and start to write it if the save interval ends before the next epoch does.

        Args:
            save: the trainer's function that writes the present state to a path.
            epoch: number of the epoch that starts.
        """
        self.wait()
        self.is_capturing = True
        try:
            files = capture(save, str(self.path))
        finally:
            self.is_capturing = False
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # without the lock, so that the old copy survives a hanging kernel
        with self._lock:
            self._epoch = -1  # until the copy is complete
            if str(self.path) in files:
                self._copy.update(files)
                self._epoch = epoch
        now = time.monotonic()
        if self._epoch_start is None:
            self._saved_at = now
        elif now + (now - self._epoch_start) - self._saved_at > self._interval:
            self._pending = self._executor.submit(self._write_in_background)
        self._epoch_start = now

    @contextmanager
    def saving(self, path: Path, epoch: int) -> Iterator[None]:
        """Exclude other writes while nnU-Net saves a checkpoint.

        Args:
            path: path of the checkpoint.
            epoch: number of the epoch with which a training continues from it.
        """
        self.wait()
        with self._lock:
            yield
            if path.parent == self.path.parent and path.name in CHECKPOINTS:
                self._saved_at = time.monotonic()
                if path.name in (FINAL_CHECKPOINT, LATEST_CHECKPOINT):
                    self._saved_epoch = epoch

    def wait(self) -> None:
        """Wait for the write in the background."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the write in the background and end its thread."""
        self.wait()
        self._executor.shutdown()

    def write(self) -> str:
        """Write the copy unless it is written, and return a message for the user."""
        with self._lock:
            return self._write_and_describe()

    def write_last(self) -> str:
        """Write as :meth:`write`; threads that save a checkpoint afterwards wait forever."""
        self._lock.acquire()
        return self._write_and_describe()

    def _write_and_describe(self) -> str:
        if self._epoch < 0:
            return "ended without writing a checkpoint"
        file = f"{self.path.parent.name}/{self.path.name}"
        start = time.monotonic()
        try:
            is_written = self._write()
        except OSError as error:
            return (
                f"cannot write {self.path}: {error.strerror}; continue with --c from an older checkpoint"
            )
        if not is_written:
            return f"the newest checkpoint has the start of epoch {self._saved_epoch}; continue with --c"
        seconds = time.monotonic() - start
        return f"wrote {file} (start of epoch {self._epoch}, {seconds:.1f} s); continue with --c"

    def _write_in_background(self) -> None:
        with self._lock:
            try:
                self._write()
            except OSError as error:  # the training goes on, since its state is in no file
                self._warn(f"cannot write {self.path}: {error.strerror}; trying again after the epoch")

    def _write(self) -> bool:
        """Write the copy and return True unless the final or the latest checkpoint is as new."""
        if self._epoch <= self._saved_epoch:
            return False
        files = self._copy.content()
        latest = files.pop(str(self.path))
        for path, content in files.items():  # which the trainer writes beside its checkpoints
            atomic_torch_save(content, Path(path))
        atomic_torch_save(latest, self.path)
        self._saved_epoch = self._epoch
        self._saved_at = self._epoch_start or self._saved_at
        return True
