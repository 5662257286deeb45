"""Policy of what is saved when, and of what ``--c`` continues from."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from nnunet_cpr.files import atomic_torch_save, atomic_write
from nnunet_cpr.nnunet import checkpoints
from nnunet_cpr.nnunet.fold_files import BEST_CHECKPOINT, FINAL_CHECKPOINT, LATEST_CHECKPOINT
from nnunet_cpr.refusals import Refusal, RefusedItem, counted, one_line, positive_number

SAVE_MINUTES = "NNUNET_CPR_SAVE_MINUTES"
"""Environment variable with the save interval in minutes; 0 saves after every epoch."""

STARTED = "nnunet_cpr_started"
"""Entry of a checkpoint's ``init_args``: when its training was started, in seconds since 1970."""

FINISHED = "nnunet_cpr_finished"
"""Entry of a checkpoint's ``init_args``: the number of epochs after which ``nnunet-cpr finish`` has
ended the training, which its name does not tell."""

_CANDIDATES = (FINAL_CHECKPOINT, BEST_CHECKPOINT, LATEST_CHECKPOINT)
"""Order of preference among equally new ones: the latest is written before the best Dice is updated."""

Save = Callable[[Any], None]
"""nnU-Net's ``save_checkpoint``, which takes a file object, too."""


class CheckpointPolicy:
    """Checkpoints of one training on rank 0.

    ======================  ============================================================================
    event                   what happens
    ======================  ============================================================================
    an epoch starts         the state is copied to memory (the previous copy goes); if the newest file
                            is older than the save interval, the copy is written to the latest checkpoint
    the first copy          it is read back, so that a state that cannot be continued is reported now;
                            then nothing is copied any more
    too little memory       nothing is copied in this epoch; lost is what came after the newest file
    nnU-Net saves the       written as a whole or not at all; in the fold's folder it is the newest file
    latest, best or final   now, the interval begins again, and the copy, which is older, goes
    a signal                the copy is written to the latest checkpoint; without one, the newest file
                            has the state already
    kill -9                 nothing; lost are at most the save interval and one epoch
    a full disk             the training ends with a line; the previous file stays as it was
    ``--c``                 of final, best and latest the newest: that of the training that was started
                            last, with the most epochs, and the first of equal ones; a line says which.
                            A damaged file is skipped with a line; an error of the machine, or a file
                            with unexpected objects, ends the command
    ``nnunet-cpr finish``   the running epoch is the last one; the final checkpoint records its length,
                            and ``--c`` ends with a line
    ======================  ============================================================================

    A trainer with a ``save_checkpoint`` of its own saves as it does; of it only ``--c`` is decided here.

    A training is known by the time at which it was started, which ``--c`` keeps and all of its
    checkpoints have. Files of other versions and of plain nnU-Net have the time of their first epoch.

    Args:
        report: function that shows a message.
        before: when the last training of the folder was started, None if there was none. This one was
            started later, whatever the clock says.

    Attributes:
        started: when this training was started; set by :meth:`continue_from` if that was earlier.

    Raises:
        ValueError: the environment variable of the save interval has a wrong value.
    """

    def __init__(self, report: Callable[[str], None], before: float | None = None) -> None:
        self.started = time.time() if before is None else max(time.time(), before + 1)
        self._report = report
        self._interval = _save_interval()
        self._folder, self._writes = Path(), True
        self._saved_at = time.monotonic()
        self._newest: tuple[Path, int] | None = None  # file that this process has written, its epochs
        self._memory = io.BytesIO()  # used again in each epoch
        self._logged: dict[str, list[Any]] = {}
        self._copied: int | None = None  # epochs of the copy in memory
        self._is_read_back = False
        self._is_readable = True

    @property
    def copied_epochs(self) -> int | None:
        """Number of finished epochs of the copy in memory, None without a copy."""
        return self._copied

    def begin(self, folder: Path, writes: bool = True) -> None:
        """Begin the save interval, after the set-up.

        Args:
            folder: the fold's folder.
            writes: False if the training writes no checkpoints.
        """
        self._folder, self._writes = folder, writes
        self._saved_at = time.monotonic()

    def start_epoch(self, save: Save, epochs: int, logged: Mapping[str, list[Any]]) -> None:
        """Copy the state to memory; write the copy if the save interval has passed.

        Args:
            save: saves the present state, but not what was logged.
            epochs: number of finished epochs.
            logged: entry ``logging`` of the checkpoint, a list by name.

        Raises:
            OSError: the file cannot be written; a previous one is unchanged.
        """
        try:
            self._copy(save, epochs, logged)
        except MemoryError:  # it is a convenience, which must not end a training
            newest = self._newest[0].name if self._newest else "the start"
            self._report(f"too little memory for a copy of the state: a signal loses all since {newest}")
        if self._copied is None:
            return
        is_newer = self._newest is None or self._newest[1] < epochs
        if is_newer and time.monotonic() - self._saved_at >= self._interval:
            self._write_copy()

    def save(self, path: Path, save: Save, epochs: int) -> None:
        """Save the present state as nnU-Net does, as a whole or not at all.

        Args:
            path: file that nnU-Net has chosen.
            save: as in :meth:`start_epoch`, with what was logged.
            epochs: number of finished epochs.

        Raises:
            OSError, RuntimeError: the file cannot be written; a previous one is unchanged.
        """
        # Not to the temporary path, whose name torch would store in the file.
        with atomic_write(path) as temporary, open(temporary, "wb") as file:
            save(file)
        if path.parent == self._folder and path.name in _CANDIDATES:
            self._set_newest(path, epochs)
            self._copied = None

    def end(self) -> str:
        """Save at a signal, and return a message for the user.

        Raises:
            OSError: the file cannot be written; a previous one is unchanged.
        """
        if self._copied is not None:
            place, epochs = self._write_copy(), self._copied
            return f"wrote {place} (start of epoch {epochs}); continue with --c"
        if self._newest is not None:
            path, epochs = self._newest
            return f"{path.parent.name}/{path.name} has the end of epoch {epochs - 1}; continue with --c"
        if not self._writes:
            return "ended without a checkpoint, as --disable_checkpointing asks"
        return "ended without writing a checkpoint; continue with --c"

    def continue_from(self, chosen: Path) -> tuple[Path, dict[str, Any]]:
        """Load the newest checkpoint and continue its training.

        Args:
            chosen: the checkpoint that nnU-Net has chosen. Any but the final and the latest is taken as
                it is: nnU-Net chooses the best one where there is no other, and for ``--val_best``.

        Raises:
            Refusal: none can be used, or one cannot be read at the moment.
        """
        candidates: tuple[str, ...] = _CANDIDATES
        if chosen.name not in (FINAL_CHECKPOINT, LATEST_CHECKPOINT):
            candidates = (chosen.name,)
        found = read_checkpoints(chosen.parent, self._report, candidates)
        path, checkpoint = next(iter(found.items()))
        epochs = checkpoint["current_epoch"]
        instead = ""
        if path != chosen:  # which nnU-Net would take
            is_equal = chosen in found and _age(found[chosen]) == _age(checkpoint)
            relation = "which has the epochs of" if is_equal else "in place of"
            instead = f"{',' if is_equal else ''} {relation} {chosen.name}"
        self._report(f"continuing {path.name} ({counted(epochs, 'epoch')}){instead}")
        self._newest = path, epochs
        self.started = start_of(checkpoint) or self.started
        return path, checkpoint

    def _copy(self, save: Save, epochs: int, logged: Mapping[str, list[Any]]) -> None:
        self._copied = None
        if not self._is_readable:
            return
        self._logged = {key: list(values) for key, values in logged.items()}
        self._memory.seek(0)
        # Checksums would take longer than the copy; a file gets them.
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            save(self._memory)
        finally:
            torch.serialization.set_crc32_options(before)
        self._memory.truncate()
        self._copied = epochs
        if not self._is_read_back:
            self._is_read_back = True
            self._check_copy()

    def _check_copy(self) -> None:
        """Report a state that ``--c`` will refuse, before days of training."""
        try:
            self._read_copy()
        except Exception as error:  # of types that are not loaded, or of their content
            self._memory.seek(0)
            with checkpoints.restricted_loading():
                types = torch.serialization.get_unsafe_globals_in_checkpoint(self._memory)
            reason = ", ".join(map(str, types)) or one_line(error)
            self._is_readable, self._copied = False, None
            self._report(
                "checkpoints of this training cannot be continued with --c: they may contain tensors "
                f"and plain values only, and have {reason}; change what the trainer saves"
            )

    def _read_copy(self) -> dict[str, Any]:
        self._memory.seek(0)
        with checkpoints.restricted_loading():
            return torch.load(self._memory, map_location="cpu")

    def _write_copy(self) -> str:
        """Write the copy to the latest checkpoint and return its place."""
        assert self._copied is not None
        path = self._folder / LATEST_CHECKPOINT
        atomic_torch_save({**self._read_copy(), "logging": self._logged}, path)
        self._set_newest(path, self._copied)
        return f"{path.parent.name}/{path.name}"

    def _set_newest(self, path: Path, epochs: int) -> None:
        self._newest, self._saved_at = (path, epochs), time.monotonic()


def read_checkpoints(
    fold: Path, report: Callable[[str], None], candidates: Sequence[str] = _CANDIDATES
) -> dict[Path, dict[str, Any]]:
    """Return the checkpoints of a fold's folder with their content, the newest first.

    Args:
        fold: the folder.
        report: function that shows a message, for damaged files, which are skipped.
        candidates: names of the files.

    Raises:
        Refusal: none can be used, or one cannot be read at the moment.
    """
    found: dict[Path, dict[str, Any]] = {}
    for path in map(fold.joinpath, candidates):
        try:
            if checkpoints.is_there(path):
                found[path] = checkpoints.read(path)
        except RefusedItem as error:
            report(f"{error}; it is skipped")
    if not found:
        raise Refusal(f"{fold} has no checkpoint that can be read", "train without --c")
    # Of equal ones the first candidate remains the first.
    return dict(sorted(found.items(), key=lambda item: _age(item[1]), reverse=True))


def _save_interval() -> float:
    """Return the save interval in seconds."""
    value: float | str = os.environ.get(SAVE_MINUTES) or 10.0
    with suppress(ValueError):  # a text is refused below
        value = float(value)
    return 60 * positive_number(SAVE_MINUTES, value, allow_zero=True)


def _age(checkpoint: Mapping[str, Any]) -> tuple[float, int]:
    """Return when the training of a checkpoint was started, and its epochs."""
    return start_of(checkpoint) or 0.0, checkpoint["current_epoch"]


def start_of(checkpoint: Mapping[str, Any]) -> float | None:
    """Return when the training of a checkpoint was started, None if it does not say so."""
    arguments = checkpoint["init_args"]
    own = arguments.get(STARTED) if isinstance(arguments, dict) else None
    if own is None:
        own = next(iter(checkpoint["logging"].get("epoch_start_timestamps") or ()), None)
    return own if isinstance(own, int | float) else None
