"""Names and readers of the files in a fold's folder."""

from __future__ import annotations

import math
import re
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

FINAL_CHECKPOINT = "checkpoint_final.pth"
LATEST_CHECKPOINT = "checkpoint_latest.pth"
BEST_CHECKPOINT = "checkpoint_best.pth"
CHECKPOINTS = (FINAL_CHECKPOINT, LATEST_CHECKPOINT, BEST_CHECKPOINT)
"""nnU-Net's checkpoints in the order in which ``--c`` looks for them."""

RESOURCES = "resources.json"
"""Seconds and peak memory, bytes, of a fold's training and validation, from the study's worker."""

LOG_COLUMNS = ["epoch", "train_loss", "val_loss", "pseudo_dice", "seconds"]

FLOAT32_MAX = 3.4e38

_MAX_MEASUREMENT = 1e30  # seconds or bytes

_NUMBER = r"(?<![\w.])(?:-?\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan)(?![\w.])"
_NUMBERS = re.compile(_NUMBER)
_EPOCH = re.compile(r"Epoch (\d{1,9})\s*")
_LOSS = re.compile(rf"(train_loss|val_loss)\s+({_NUMBER})")
_SECONDS = re.compile(rf"Epoch time: ({_NUMBER}) s")

# An epoch as nnU-Net logs it, "2026-01-31 12:00:00.123456: Epoch 7 " and so on. The pattern starts with
# fixed characters, which makes the search fast. It accepts only what gives the same line by line.
_ENTRIES = (": Epoch ", ": train_loss", ": val_loss", ": Pseudo dice")
_STAMP = r"[\d-]{10} [\d:]{8}\.\d{6}: "
_REST = r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]*\n"
_PLAIN_NUMBER = r"(-?\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan)"
_BLOCK = re.compile(
    rf": Epoch (?<=\n{_STAMP}Epoch )(\d{{1,9}}) *\n"
    rf"(?:{_STAMP}[^EPtv\s]{_REST})*"  # the learning rate, and lines of other trainers
    rf"{_STAMP}train_loss +{_PLAIN_NUMBER} *\n"
    rf"{_STAMP}val_loss +{_PLAIN_NUMBER} *\n"
    rf"{_STAMP}Pseudo dice({_REST})"
    rf"{_STAMP}Epoch time: {_PLAIN_NUMBER} s *\n",
    re.ASCII,
)
_ENTRIES_OF_BLOCK = 5

_Texts = tuple[str, str, str, str, str]
"""Texts of an epoch in a log: epoch, train_loss, val_loss, pseudo_dice, seconds; "" if not logged."""


def is_complete_checkpoint(path: Path) -> bool:
    """Return True if a checkpoint was written to its end.

    torch writes zip files, whose list of contents comes last. The contents are not read.
    """
    try:
        return path.is_file() and zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # its last bytes are corrupted
        return False


def measurement(value: Any) -> float | None:
    """Return a number of :data:`RESOURCES`, or None if it is not a finite number of seconds or bytes."""
    is_number = type(value) in (int, float)
    return value if is_number and 0 <= value < _MAX_MEASUREMENT else None


class LoggedProgress(NamedTuple):
    """Progress of a training according to its logs.

    Attributes:
        epochs: number of finished epochs.
        pseudo_dice: pseudo Dice of the last finished epoch, mean over the classes, or None.
        seconds: median duration of the finished epochs, or None.
    """

    epochs: int
    pseudo_dice: float | None
    seconds: float | None


def read_progress(fold: Path) -> LoggedProgress:
    """Return the number of finished epochs, the last pseudo Dice and the duration of an epoch.

    It is faster than :func:`read_logs`, because it does not read the losses.
    """
    epochs = _read_epochs(fold)
    seconds = {epoch: _float32(texts[4]) for epoch, texts in epochs.items()}
    finished = {epoch: value for epoch, value in seconds.items() if not math.isnan(value)}
    if not finished:
        return LoggedProgress(0, None, None)
    last = max(finished)
    dice = _mean_dice(epochs[last][3])
    median = float(np.median(list(finished.values())))
    return LoggedProgress(last + 1, None if math.isnan(dice) else dice, median)


def read_logs(fold: Path) -> pd.DataFrame:
    """Read the epochs in nnU-Net's training logs; later logs replace epochs of earlier ones.

    Returns:
        Columns epoch, train_loss, val_loss, pseudo_dice (mean over the classes), seconds, with NaN
        for values that an interrupted epoch did not log.
    """
    import pandas as pd  # slow, and the status of a study does not need it

    logged = sorted((epoch, texts) for epoch, texts in _read_epochs(fold).items() if any(texts[1:]))
    columns = {
        "train_loss": [_float32(texts[1]) for _, texts in logged],
        "val_loss": [_float32(texts[2]) for _, texts in logged],
        "pseudo_dice": [_mean_dice(texts[3]) for _, texts in logged],
        "seconds": [_float32(texts[4]) for _, texts in logged],
    }
    arrays = {name: np.array(values, dtype=float) for name, values in columns.items()}
    return pd.DataFrame({"epoch": [epoch for epoch, _ in logged], **arrays}, columns=LOG_COLUMNS)


def _read_epochs(fold: Path) -> dict[int, _Texts]:
    # The parts of the time in a log's name need not have the same width.
    logs = sorted(
        fold.glob("training_log_*.txt"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.stem)]
    )
    epochs: dict[int, _Texts] = {}
    for log in logs:
        with suppress(OSError):  # of another user; the epochs of the others are known
            _add_epochs(log.read_text(encoding="utf-8", errors="replace"), epochs)
    return epochs


def _add_epochs(text: str, epochs: dict[int, _Texts]) -> None:
    """Add the epochs of a log: those in nnU-Net's format at once, all others line by line."""
    blocks = _BLOCK.findall(text)
    if len(blocks) * _ENTRIES_OF_BLOCK == sum(map(text.count, _ENTRIES)):
        epochs.update((int(block[0]), block) for block in blocks)
        return
    epoch: int | None = None
    end = 0
    for match in _BLOCK.finditer(text):
        start = text.rindex("\n", 0, match.start()) + 1
        between = text[end:start]
        if any(entry in between for entry in _ENTRIES):
            _add_lines(between, epoch, epochs)
        epoch, end = int(match[1]), match.end()
        epochs[epoch] = (match[1], match[2], match[3], match[4], match[5])
    _add_lines(text[end:], epoch, epochs)


def _add_lines(text: str, epoch: int | None, epochs: dict[int, _Texts]) -> None:
    """Add the lines of a part of a log, which belong to ``epoch`` up to the next one."""
    for line in text.splitlines():
        # "2026-01-31 12:00:00.123456: train_loss -0.5 "
        _, _, entry = line.partition(": ")
        if match := _EPOCH.fullmatch(entry):
            epoch = int(match[1])
            epochs[epoch] = (match[1], "", "", "", "")
        elif epoch is not None:
            number, train_loss, val_loss, pseudo_dice, seconds = epochs[epoch]
            if match := _LOSS.match(entry):
                if match[1] == "train_loss":
                    train_loss = match[2]
                else:
                    val_loss = match[2]
            elif match := _SECONDS.match(entry):
                seconds = match[1]
            elif entry.startswith("Pseudo dice"):
                pseudo_dice = entry
            epochs[epoch] = (number, train_loss, val_loss, pseudo_dice, seconds)


def _mean_dice(text: str) -> float:
    """Return the mean of the numbers in [0, 1], NaN if there are none."""
    defined = [value for number in _NUMBERS.findall(text) if 0 <= (value := float(number)) <= 1]
    return sum(defined) / len(defined) if defined else math.nan


def _float32(text: str) -> float:
    """Return a number of a log, NaN if it is missing or beyond the range of float32."""
    value = float(text or "nan")
    return value if abs(value) <= FLOAT32_MAX else math.nan
