"""What trainings leave in a fold's folder that the study and its report both read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

RESOURCES = "resources.json"
"""Seconds and peak memory, bytes, of a fold's training and validation, from the study's worker."""

LOG_COLUMNS = ["epoch", "train_loss", "val_loss", "pseudo_dice", "seconds"]

LARGEST = 3.4e38
"""Of float32; what is beyond was not computed by a training."""

_LARGEST_MEASUREMENT = 1e30
"""In seconds or bytes."""

_NUMBER = r"(?<![\w.])(?:-?\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan)(?![\w.])"


def measurement(value: Any) -> float | None:
    """Return a number of :data:`RESOURCES`, or None if it is not a finite number of seconds or bytes."""
    is_number = type(value) in (int, float)
    return value if is_number and 0 <= value < _LARGEST_MEASUREMENT else None


def read_logs(fold: Path) -> pd.DataFrame:
    """The epochs in nnU-Net's training logs; after a continued training the later values stand.

    Returns:
        Columns epoch, train_loss, val_loss, pseudo_dice (mean over the classes), seconds, with NaN
        for what an epoch cut short did not come to write.
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
                current[match[1]] = _finite(match[2])
            elif text.startswith("Pseudo dice"):
                values = [float(number) for number in re.findall(_NUMBER, text)]
                defined = [value for value in values if 0 <= value <= 1]
                current["pseudo_dice"] = float(np.mean(defined)) if defined else np.nan
            elif match := re.match(rf"Epoch time: ({_NUMBER}) s", text):
                current["seconds"] = _finite(match[1])
    rows = [{"epoch": epoch, **values} for epoch, values in sorted(epochs.items()) if values]
    return pd.DataFrame(rows, columns=LOG_COLUMNS).astype(dict.fromkeys(LOG_COLUMNS[1:], float))


def _finite(text: str) -> float:
    """A number of a log; one that is too large is as good as none."""
    value = float(text)
    return value if abs(value) <= LARGEST else np.nan
