"""Reading and writing ``cpr_history.csv``, the record of CPR in a fold's folder."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # drawing does not import torch
    from torch import Tensor

    from nnunet_cpr.cpr.algorithm import CPR

CSV_NAME = "cpr_history.csv"
COLUMNS = ["epoch", "step", "parameter", "measure", "kappa", "multiplier"]


def has_bounds(path: Path) -> bool:
    """Return True if a bound is set in a history.

    Args:
        path: a ``cpr_history.csv``.

    Raises:
        OSError: the file cannot be read.
    """
    lines = reversed(_read_lines(path)[1:])
    return any(line.split(",")[-2:-1] not in ([], ["inf"]) for line in lines)


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a history, without one that a kill has cut off."""
    return path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0].splitlines()


@dataclass
class History:
    """Measure, bound and multiplier of each regularized parameter, epoch by epoch.

    Attributes:
        folder: folder of ``cpr_history.csv``.
        names: names of the J regularized parameters.
        epochs, steps: for each recorded epoch its number and the optimizer steps done at its end.
        measure, kappa, multiplier: for each recorded epoch an array of length J, float32; ``kappa`` is
            infinite before the bound is set.
        backup: new path of a file that could not be continued, None if there is none.
    """

    folder: Path
    names: list[str]
    epochs: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    measure: list[np.ndarray] = field(default_factory=list)
    kappa: list[np.ndarray] = field(default_factory=list)
    multiplier: list[np.ndarray] = field(default_factory=list)
    backup: Path | None = None

    def __post_init__(self) -> None:
        self._is_written = False
        self._text = io.StringIO(newline="")
        self._rows = csv.writer(self._text)
        self._rows.writerow(COLUMNS)

    @classmethod
    def resume(cls, folder: str | os.PathLike[str], epoch: int, names: list[str]) -> History:
        """Continue the history in ``folder`` for a training that is about to start ``epoch``.

        Epochs from that one on are dropped, since they are trained again. A file that is damaged or of
        other parameters is renamed, see ``backup``. The next :meth:`append` writes the file.

        Raises:
            OSError: the file can neither be read nor be renamed.
        """
        path = Path(folder) / CSV_NAME
        history = cls(Path(folder), list(names))
        if epoch == 0 or not path.exists():
            return history
        try:
            recorded = cls.read(folder, epoch)
            if recorded.names == history.names:
                return recorded
        except ValueError:
            pass
        history.backup = path.replace(path.with_name("cpr_history.unreadable.csv"))
        return history

    @classmethod
    def read(cls, folder: str | os.PathLike[str], end: int | None = None) -> History:
        """Read the history in ``folder``, or its epochs before ``end``, without changing the file.

        A last epoch of which a kill has cut off rows is left out.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is damaged or has no rows.
        """
        path = Path(folder) / CSV_NAME
        try:
            header, *rows = csv.reader(_read_lines(path))
            if header != COLUMNS:
                raise ValueError(f"the columns {', '.join(header)}")
            names = list(dict.fromkeys(row[2] for row in rows))
            rows = rows[: len(rows) - len(rows) % max(1, len(names))]
            numbers, steps, parameters, *values = zip(*rows, strict=True)
            if list(parameters) != names * (len(rows) // len(names)):
                raise ValueError("epochs without a row of each parameter")
            each = np.array(values, np.float32).reshape(3, -1, len(names)).swapaxes(0, 1)
            history, count = cls(Path(folder), names), len(names)
            for number, step, row in zip(numbers[::count], steps[::count], each):
                if end is None or int(number) < end:
                    history.add(int(number), int(step), *row)
        except (ValueError, LookupError, csv.Error) as error:
            raise ValueError(f"{path}: expected a CPR history, got: {error}") from error
        return history

    def stack(self, value: str) -> np.ndarray:
        """Return ``measure``, ``kappa`` or ``multiplier`` of all epochs, float64 ``[J, epochs]``."""
        return np.stack(getattr(self, value), axis=1, dtype=np.float64)

    def append(self, epoch: int, cpr: CPR, measure: Tensor | None = None) -> None:
        """Add the state of CPR at the end of an epoch and write the file.

        Args:
            epoch: number of the epoch.
            cpr: its bounds and multipliers are added.
            measure: ``cpr.measure``, if it is known already.

        Raises:
            OSError: the file cannot be written. The next call writes this epoch as well.
        """
        measure = cpr.measure if measure is None else measure
        values = (measure, cpr.kappa, cpr.lagrange_multiplier)
        path, start = self.folder / CSV_NAME, self._text.tell()
        self.add(epoch, cpr.step_count, *(value.cpu().numpy() for value in values))
        # Not synced to the disk, which takes longer than all else at the end of an epoch.
        if self._is_written:
            self._is_written = False  # an error may leave a part of a row
            with path.open("r+", encoding="utf-8", newline="") as file:
                file.seek(0, os.SEEK_END)
                file.write(self._text.getvalue()[start:])
        else:  # in place of what an earlier training has left, or an error
            temporary = path.with_suffix(".csv.tmp")
            temporary.write_text(self._text.getvalue(), encoding="utf-8", newline="")
            temporary.replace(path)
        self._is_written = True

    def add(
        self, epoch: int, step: int, measure: np.ndarray, kappa: np.ndarray, multiplier: np.ndarray
    ) -> None:
        """Add the values at the end of an epoch, each ``[J]``, without writing the file."""
        self.epochs.append(epoch)
        self.steps.append(step)
        self.measure.append(measure)
        self.kappa.append(kappa)
        self.multiplier.append(multiplier)
        for name, *values in zip(self.names, measure, kappa, multiplier):
            # Nine digits restore a float32 exactly.
            self._rows.writerow([epoch, step, name, *(f"{value:.9g}" for value in values)])
