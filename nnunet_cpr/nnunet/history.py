"""Reading and writing ``cpr_history.csv``, the record of CPR in a fold's folder."""

from __future__ import annotations

import csv
import io
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nnunet_cpr._files import add_path_to_os_errors, atomic_write

if TYPE_CHECKING:  # drawing does not import torch
    from torch import Tensor

    from nnunet_cpr.cpr import CPR

CSV_NAME = "cpr_history.csv"
COLUMNS = ["epoch", "step", "parameter", "measure", "kappa", "multiplier"]

_HEADER = ",".join(COLUMNS) + "\r\n"
_END = 20_000  # bytes of a file, more than 100 rows


def has_bounds(path: Path) -> bool:
    """Return True if a bound is set at the end of a history.

    Args:
        path: a ``cpr_history.csv``.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END))
        lines = file.read().decode(errors="replace").splitlines()[1:]
    return any(line.split(",")[-2:-1] not in ([], ["inf"]) for line in lines)


@dataclass
class History:
    """Measure, bound and multiplier of each regularized parameter, epoch by epoch.

    Attributes:
        folder: folder of ``cpr_history.csv``.
        names: names of the J regularized parameters.
        epochs, steps: for each recorded epoch its number and the optimizer steps done at its end.
        measure, kappa, multiplier: for each recorded epoch an array of length J, float32; ``kappa`` is
            infinite before the bound is set.
        backup: new path of a file that could not be continued completely, None if there is none.
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
        self._fields = [_quote(name) for name in self.names]
        self._written = 0  # epochs in the file
        self._size = -1  # of the file with these epochs, bytes; -1 to write it anew

    @classmethod
    def resume(cls, folder: str | os.PathLike[str], epoch: int, names: list[str]) -> History:
        """Continue the history in ``folder`` for a training that is about to start ``epoch``.

        Rows of that epoch and later ones are dropped, since these epochs are trained again. Epochs that
        are incomplete or of other parameters are dropped too; the file is then renamed, see ``backup``.
        The next :meth:`append` writes the file.

        Raises:
            OSError: the file can neither be read nor be renamed.
        """
        history = cls(Path(folder), list(names))
        path = history.folder / CSV_NAME
        if epoch > 0 and os.path.lexists(path) and not history._continue(path, epoch):
            history.backup = _unused(path.with_name("cpr_history.unreadable.csv"))
            os.replace(path, history.backup)
        return history

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> History:
        """Read the history in ``folder`` without changing the file; missing values are NaN.

        Raises:
            OSError: the file cannot be read.
            ValueError: it has no row of a history.
        """
        path = Path(folder) / CSV_NAME
        epochs = _parse(_read_text(path))
        if not epochs:
            raise ValueError(f"{path}: expected a CPR history, found no row of one")
        names = dict.fromkeys(name for epoch in epochs.values() for name in epoch.values)
        history = cls(Path(folder), list(names))
        for number, epoch in sorted(epochs.items()):
            history._add(number, epoch.step, *epoch.columns(history.names))
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
            OSError: the file cannot be written. It is unchanged, and the next call writes this epoch
                as well.
        """
        measure = cpr.measure if measure is None else measure
        values = (measure, cpr.kappa, cpr.lagrange_multiplier)
        self._add(epoch, cpr.step_count, *(value.cpu().numpy() for value in values))
        path = self.folder / CSV_NAME
        if self._size >= 0 and path.is_file() and path.stat().st_size == self._size:
            self._size = -1  # if this fails, the whole file is written the next time
            with add_path_to_os_errors(path), open(path, "ab") as file:
                file.write(self._rows(self._written).encode())
        else:
            with atomic_write(path) as temporary:
                temporary.write_bytes((_HEADER + self._rows(0)).encode())
        self._written, self._size = len(self.epochs), path.stat().st_size

    def _add(
        self, epoch: int, step: int, measure: np.ndarray, kappa: np.ndarray, multiplier: np.ndarray
    ) -> None:
        self.epochs.append(epoch)
        self.steps.append(step)
        self.measure.append(measure)
        self.kappa.append(kappa)
        self.multiplier.append(multiplier)

    def _rows(self, first: int) -> str:
        """Return the lines of the recorded epochs from the ``first`` one on."""
        lines = []
        for i in range(first, len(self.epochs)):
            for name, *values in zip(self._fields, self.measure[i], self.kappa[i], self.multiplier[i]):
                numbers = ",".join(f"{value:.9g}" for value in values)  # restores a float32 exactly
                lines.append(f"{self.epochs[i]},{self.steps[i]},{name},{numbers}\r\n")
        return "".join(lines)

    def _continue(self, path: Path, before: int) -> bool:
        """Add the complete epochs of a file; return True if no row before an epoch is lost.

        Args:
            path: the file.
            before: the first epoch that is trained again.
        """
        try:
            text = _read_text(path)
        except OSError:
            return False
        for number, epoch in sorted(_parse(text).items()):
            if number < before and list(epoch.values) == self.names:
                self._add(number, epoch.step, *epoch.columns(self.names))
        kept = _HEADER + self._rows(0)
        rest = text.removeprefix(kept).split("\n")
        return text.startswith(kept) and all(_epoch_of(line) >= before for line in rest if line)


@dataclass
class _Epoch:
    """Rows of an epoch in a file: the steps, and three values of each parameter."""

    step: int
    values: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def columns(self, names: list[str]) -> np.ndarray:
        """Return measure, kappa and multiplier of the parameters, NaN where there is none."""
        with np.errstate(over="ignore"):
            rows = [self.values.get(name, (math.nan,) * 3) for name in names]
            return np.array(rows, dtype=np.float32).reshape(-1, 3).T


def _read_text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


def _parse(text: str) -> dict[int, _Epoch]:
    """Return the epochs in the lines of a history; lines that are no rows of one are left out."""
    epochs: dict[int, _Epoch] = {}
    lines = text[: text.rfind("\n") + 1].split("\n")  # a killed training may have left half a line
    if lines[0].rstrip("\r") != ",".join(COLUMNS):
        return epochs
    for line in lines[1:]:
        try:
            ((number, step, name, *values),) = csv.reader([line])
            measure, kappa, multiplier = map(float, values)
            epoch = epochs.setdefault(int(number), _Epoch(int(step)))
        except (ValueError, csv.Error):
            continue
        epoch.step = int(step)
        epoch.values[name] = measure, kappa, multiplier
    return {number: epoch for number, epoch in epochs.items() if number >= 0}


def _epoch_of(line: str) -> int:
    """Return the epoch of a row, or -1 if the row has none."""
    digits = line.partition(",")[0]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else -1


def _quote(name: str) -> str:
    """Return a name as a field of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow([name])
    return text.getvalue()


def _unused(path: Path) -> Path:
    """Return ``path``, with a number if it exists."""
    number, candidate = 1, path
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_stem(f"{path.stem}-{number}")
    return candidate
