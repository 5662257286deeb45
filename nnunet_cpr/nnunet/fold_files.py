"""Names and readers of the files in a fold's folder."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
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

_NUMBERS = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[-+]?\d+)?(?![\w.])")
_ENTRY = re.compile(
    r"^\S+ \S+: (Epoch time:|Epoch|train_loss|val_loss|Pseudo dice) +([^\n]*)$", re.MULTILINE
)
"""Entry of nnU-Net's log: ``2026-01-31 12:00:00.123456: train_loss -0.5``."""


_PREDICTION = re.compile(r"^(\d+-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}): predicting ", re.MULTILINE)


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
    seconds = {epoch: _number(entries, "Epoch time:") for epoch, entries in epochs.items()}
    finished = {epoch: value for epoch, value in seconds.items() if not math.isnan(value)}
    if not finished:
        return LoggedProgress(0, None, None)
    last = max(finished)
    dice = _mean_dice(epochs[last])
    median = float(np.median(list(finished.values())))
    return LoggedProgress(last + 1, None if math.isnan(dice) else dice, median)


def seconds_per_case(fold: Path) -> float:
    """Return the median time in seconds from one prediction of the validation to the next.

    It is NaN without two predictions in one log.
    """
    times: list[float] = []
    for log in fold.glob("training_log_*.txt"):
        starts = _PREDICTION.findall(log.read_text(encoding="utf-8", errors="replace"))
        moments = [datetime.fromisoformat(start).timestamp() for start in starts]
        times += [later - earlier for earlier, later in pairwise(moments)]
    return float(np.median(times)) if times else math.nan


def read_logs(fold: Path) -> pd.DataFrame:
    """Read the epochs in nnU-Net's training logs; later logs replace epochs of earlier ones.

    Returns:
        Columns epoch, train_loss, val_loss, pseudo_dice (mean over the classes), seconds, with NaN
        for values that an interrupted epoch did not log.
    """
    import pandas as pd  # slow, and the status of a study does not need it

    rows = []
    for epoch, entries in sorted(_read_epochs(fold).items()):
        losses = _number(entries, "train_loss"), _number(entries, "val_loss")
        rows.append((epoch, *losses, _mean_dice(entries), _number(entries, "Epoch time:")))
    return pd.DataFrame(rows, columns=LOG_COLUMNS).astype(dict.fromkeys(LOG_COLUMNS[1:], float))


def _read_epochs(fold: Path) -> dict[int, dict[str, str]]:
    """Return the texts of the entries of each epoch by their names."""
    # The parts of the time in a log's name need not have the same width.
    logs = sorted(
        fold.glob("training_log_*.txt"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.stem)]
    )
    epochs: dict[int, dict[str, str]] = {}
    for log in logs:
        with suppress(OSError):  # of another user; the epochs of the others are known
            entries: dict[str, str] = {}  # before the first epoch there are none
            for name, text in _ENTRY.findall(log.read_text(encoding="utf-8", errors="replace")):
                if name != "Epoch":
                    entries[name] = text
                elif (number := text.strip()).isdecimal() and len(number) < 10:
                    entries = epochs[int(number)] = {}
    return epochs


def _mean_dice(entries: Mapping[str, str]) -> float:
    """Return the mean over the classes, NaN if none is in [0, 1]."""
    numbers = _NUMBERS.findall(entries.get("Pseudo dice", ""))
    defined = [value for number in numbers if 0 <= (value := float(number)) <= 1]
    return sum(defined) / len(defined) if defined else math.nan


def _number(entries: Mapping[str, str], name: str) -> float:
    """Return a number of a log, NaN if it is missing or beyond the range of float32."""
    try:
        value = float(entries[name].strip().removesuffix(" s"))
    except (KeyError, ValueError):
        return math.nan
    return value if abs(value) <= FLOAT32_MAX else math.nan
