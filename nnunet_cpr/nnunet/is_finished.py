"""Validation of a fold, from nnU-Net's ``summary.json``: the one rule of what counts as finished."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nnunet_cpr.files import read_json
from nnunet_cpr.nnunet.fold_files import CHECKPOINTS, FINAL_CHECKPOINT, is_complete_checkpoint

DAMAGE = (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)
"""Errors that a damaged ``summary.json`` can raise."""


@dataclass(frozen=True)
class Validation:
    """Validation of a finished training.

    Attributes:
        dice: mean foreground Dice in [0, 1], NaN if nnU-Net wrote none.
        cases: names of the cases.
    """

    dice: float
    cases: frozenset[str]

    def missing(self, expected: Collection[str]) -> frozenset[str]:
        """Return the cases that should have been validated, and were not."""
        return frozenset(expected) - self.cases


def summary_file(fold: Path) -> Path:
    """Return the file with the results of a fold's validation."""
    return fold / "validation" / "summary.json"


def find_validation(fold: Path) -> Validation | None:
    """Return the validation of a fold's training if that has finished, otherwise None.

    It has finished if there is a whole ``summary.json`` that :func:`is_outdated` does not refuse. Only
    prediction needs a checkpoint: results that were copied without them have finished as well. Whether
    the validation has all cases is for :meth:`Validation.missing` to say.

    Args:
        fold: nnU-Net's ``fold_X``.
    """
    try:
        status = summary_file(fold).stat()
    except OSError:
        return None
    # Cached by size and time, because the live table of a study asks every second.
    validation = _read(fold, status.st_size, status.st_mtime_ns)
    return None if validation is None or is_outdated(fold) else validation


def is_outdated(fold: Path) -> bool:
    """Return True if a training that has not ended has written a checkpoint after the validation."""
    if is_complete_checkpoint(fold / FINAL_CHECKPOINT):
        return False
    validated = summary_file(fold).stat().st_mtime_ns
    checkpoints = [path for path in map(fold.joinpath, CHECKPOINTS) if path.exists()]
    return any(path.stat().st_mtime_ns > validated for path in checkpoints)


def read_summary(fold: Path) -> dict[str, dict[str, Any]]:
    """Return the entry of each case in a fold's ``summary.json``.

    Raises:
        FileNotFoundError: the fold has not been validated.
        Exception: the file is damaged, one of ``DAMAGE``.
    """
    return _by_case(read_json(summary_file(fold)))


@lru_cache(maxsize=4096)
def _read(fold: Path, size: int, changed: int) -> Validation | None:
    try:
        summary = read_json(summary_file(fold))
        cases = frozenset(_by_case(summary))
        dice = float(summary["foreground_mean"]["Dice"]) if "foreground_mean" in summary else math.nan
    except DAMAGE:
        return None  # nnU-Net was stopped while it wrote
    return Validation(dice, cases) if 0 <= dice <= 1 or math.isnan(dice) else None


def _by_case(summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the entries by the names of their cases, after a check of the values."""
    entries: dict[str, dict[str, Any]] = {}
    for entry in summary["metric_per_case"]:
        # A path of the machine that wrote it, with an ending of any image format.
        name = Path(Path(entry["prediction_file"]).name.removesuffix(".gz")).stem
        values = [metrics["Dice"] for metrics in entry["metrics"].values()]
        name.encode()  # else no file can have it
        if name in entries or not values or not all(_is_dice(value) for value in values):
            raise ValueError("a case twice, without classes, or with a Dice out of [0, 1]")
        entries[name] = entry
    if not entries:
        raise ValueError("no case")
    return entries


def _is_dice(value: float | None) -> bool:
    """Return True for NaN and None, too, which stand for a class that a case does not have."""
    return value is None or math.isnan(value) or 0 <= value <= 1
