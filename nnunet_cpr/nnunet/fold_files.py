"""Names and readers of the files in a fold's folder."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
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


def is_complete_checkpoint(path: Path) -> bool:
    """Return True if a checkpoint was written to its end.

    torch writes zip files, whose list of contents comes last. The contents are not read.
    """
    return path.is_file() and zipfile.is_zipfile(path)


def measurement(value: Any) -> float | None:
    """Return a number of :data:`RESOURCES`, or None if it is not a finite number of seconds or bytes."""
    is_number = type(value) in (int, float)
    return value if is_number and 0 <= value < _MAX_MEASUREMENT else None


def read_logs(fold: Path) -> pd.DataFrame:
    """Read the epochs in nnU-Net's training logs; later logs replace epochs of earlier ones.

    Returns:
        Columns epoch, train_loss, val_loss, pseudo_dice (mean over the classes), seconds, with NaN
        for values that an interrupted epoch did not log.
    """
    # The parts of the time in a log's name need not have the same width.
    logs = sorted(
        fold.glob("training_log_*.txt"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.stem)]
    )
    epochs: dict[int, dict[str, float]] = {}
    for log in logs:
        current: dict[str, float] = {}
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            # "2026-01-31 12:00:00.123456: train_loss -0.5 "
            _, _, text = line.partition(": ")
            if match := re.fullmatch(r"Epoch (\d{1,9})\s*", text):
                current = epochs[int(match[1])] = {}
            elif match := re.match(rf"(train_loss|val_loss)\s+({_NUMBER})", text):
                current[match[1]] = _float32(match[2])
            elif text.startswith("Pseudo dice"):
                values = [float(number) for number in re.findall(_NUMBER, text)]
                defined = [value for value in values if 0 <= value <= 1]
                current["pseudo_dice"] = float(np.mean(defined)) if defined else np.nan
            elif match := re.match(rf"Epoch time: ({_NUMBER}) s", text):
                current["seconds"] = _float32(match[1])
    rows = [{"epoch": epoch, **values} for epoch, values in sorted(epochs.items()) if values]
    return pd.DataFrame(rows, columns=LOG_COLUMNS).astype(dict.fromkeys(LOG_COLUMNS[1:], float))


def _float32(text: str) -> float:
    """Return a number of a log, NaN if it is beyond the range of float32."""
    value = float(text)
    return value if abs(value) <= FLOAT32_MAX else np.nan
