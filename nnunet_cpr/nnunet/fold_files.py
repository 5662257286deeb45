"""Names and readers of the files in a fold's folder."""

from __future__ import annotations

import math
import re
import zipfile
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

FINAL_CHECKPOINT = "checkpoint_final.pth"
LATEST_CHECKPOINT = "checkpoint_latest.pth"
BEST_CHECKPOINT = "checkpoint_best.pth"
CHECKPOINTS = (FINAL_CHECKPOINT, LATEST_CHECKPOINT, BEST_CHECKPOINT)
"""nnU-Net's checkpoints in the order in which ``--c`` looks for them."""

RECORD = "nnunet_cpr_run.json"
"""Record of what the run is made from, by its trainer or the study's worker."""

RESOURCES = "resources.json"
"""Seconds of a fold's training and validation, from the study's worker."""

LOGS = "training_log_*.txt"
"""Names of nnU-Net's logs in a fold."""
LOG_COLUMNS = ["epoch", "train_loss", "val_loss", "pseudo_dice", "seconds"]

_ENTRIES = {
    "train_loss": "train_loss",
    "val_loss": "val_loss",
    "Pseudo dice": "pseudo_dice",
    "Epoch time:": "seconds",
}
_ENTRY = re.compile(
    rf"^\S+ \S+: (Epoch(?= +\d{{1,9}} *$)|{'|'.join(_ENTRIES)}) +([^\n]*)$", re.MULTILINE
)
"""Entry of nnU-Net's log: ``2026-01-31 12:00:00.123456: train_loss -0.5``."""
_NUMBERS = re.compile(r"(?<![\w.])-?\d{1,99}(?:\.\d*)?(?:e[-+]?\d\d?)?(?![\w.])")
_PREDICTION = re.compile(r"^(\d+-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}): predicting ", re.MULTILINE)

PRETRAINED = "nnunet_cpr_pretrained"
"""Entry of a checkpoint's ``init_args``: path and SHA-256 of the weights its training began with."""


def is_complete_checkpoint(path: Path) -> bool:
    """Return True if a checkpoint was written to its end.

    torch writes zip files, whose list of contents comes last. The contents are not read.
    """
    with suppress(zipfile.BadZipFile):  # its last bytes are corrupted
        return path.is_file() and zipfile.is_zipfile(path)
    return False


def read_progress(fold: Path) -> tuple[int, float | None]:
    """Return the number of finished epochs and the last pseudo Dice, None if it is unknown.

    It does not import pandas, as :func:`read_logs` does.
    """
    epochs = _read_epochs(fold)
    finished = {epoch: row for epoch, row in epochs.items() if not math.isnan(row["seconds"])}
    if not finished:
        return 0, None
    last = max(finished)
    dice = finished[last]["pseudo_dice"]
    return last + 1, None if math.isnan(dice) else dice


def seconds_per_case(fold: Path) -> float:
    """Return the median time in seconds from one prediction of the validation to the next.

    It is NaN without two predictions in one log.
    """
    times: list[float] = []
    for log in fold.glob(LOGS):
        starts = _PREDICTION.findall(log.read_text(encoding="utf-8", errors="replace"))
        moments = [datetime.fromisoformat(start).timestamp() for start in starts]
        times += [later - earlier for earlier, later in pairwise(moments)]
    return median(times) if times else math.nan


def read_logs(fold: Path) -> pd.DataFrame:
    """Read the epochs in nnU-Net's training logs; later logs replace epochs of earlier ones.

    Returns:
        Columns epoch, train_loss, val_loss, pseudo_dice (mean over the classes), seconds, with NaN
        for values that an interrupted epoch did not log.
    """
    import pandas as pd  # slow, and the status of a study does not need it

    rows = [{"epoch": epoch, **row} for epoch, row in sorted(_read_epochs(fold).items())]
    return pd.DataFrame(rows, columns=LOG_COLUMNS).astype(dict.fromkeys(LOG_COLUMNS[1:], float))


def _read_epochs(fold: Path) -> dict[int, dict[str, float]]:
    """Return the entries of each epoch, NaN where the log has none; of several numbers the mean."""
    # The parts of the time in a log's name need not have the same width.
    logs = sorted(fold.glob(LOGS), key=lambda path: [int(n) for n in re.findall(r"\d+", path.stem)])
    epochs: dict[int, dict[str, float]] = {}
    for log in logs:
        row: dict[str, float] = {}  # before the first epoch there are none
        for name, text in _ENTRY.findall(log.read_text(encoding="utf-8", errors="replace")):
            if name == "Epoch":
                row = epochs[int(text)] = dict.fromkeys(LOG_COLUMNS[1:], math.nan)
            elif numbers := _NUMBERS.findall(text):
                row[_ENTRIES[name]] = sum(map(float, numbers)) / len(numbers)
    return epochs
