"""Reading and writing ``cpr_history.csv``, the record of CPR in a fold's folder."""

from __future__ import annotations

import csv
import io
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nnunet_cpr._files import add_path_to_os_errors, atomic_write
from nnunet_cpr.nnunet.fold_files import FLOAT32_MAX

if TYPE_CHECKING:  # the process that draws does not import torch
    from torch import Tensor

    from nnunet_cpr.cpr import CPR

CSV_NAME = "cpr_history.csv"
COLUMNS = ["epoch", "step", "parameter", "measure", "kappa", "multiplier"]

_HEADER = ",".join(COLUMNS) + "\r\n"
_VALUES = ["measure", "kappa", "multiplier"]
_LIMITS = {"epoch": 10**6, "step": 2**53}  # larger numbers are damage
_FLOAT32_TINY = 1e-45
_END = 20_000  # bytes of a file, more than 100 rows


def read_history(path: Path) -> pd.DataFrame:
    """Read the rows of a history that are complete and plausible.

    Values that a training cannot have computed come from damaged files: rows with such a bound or
    multiplier are left out, and such a measure is NaN.

    Args:
        path: a ``cpr_history.csv``, which may end within a line.

    Returns:
        The columns of :data:`COLUMNS`; ``kappa`` is infinite before the bound is set.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no such row.
    """
    rows = _parse_rows(path.read_bytes().decode(errors="replace"))
    rows[_VALUES] = rows[_VALUES].mask(rows[_VALUES].abs() < _FLOAT32_TINY, 0.0)
    rows["measure"] = rows["measure"].where(rows["measure"].abs() <= FLOAT32_MAX)
    rows = rows[(rows["kappa"] >= 0) & rows["multiplier"].between(0, FLOAT32_MAX)]
    if rows.empty:
        raise ValueError(f"{path}: expected a CPR history, found no row of one")
    return rows.reset_index(drop=True)


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
        measure, kappa, multiplier: for each recorded epoch an array of length J, float32.
        backup: new path of a file that could not be continued completely, None if there is none.
        backup_reason: reason for the backup.
    """

    folder: Path
    names: list[str]
    epochs: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    measure: list[np.ndarray] = field(default_factory=list)
    kappa: list[np.ndarray] = field(default_factory=list)
    multiplier: list[np.ndarray] = field(default_factory=list)
    backup: Path | None = None
    backup_reason: str = ""

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
        if epoch > 0 and os.path.lexists(path):
            try:
                history.backup_reason = history._read(path, epoch) if path.is_file() else "not a file"
            except OSError as error:
                history.backup_reason = str(error.strerror)
            if history.backup_reason:
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
        rows = read_history(Path(folder) / CSV_NAME)
        rows = rows.drop_duplicates(["epoch", "parameter"], keep="last")
        names = rows["parameter"].unique().tolist()
        steps = rows.groupby("epoch", sort=True)["step"].last()
        with np.errstate(over="ignore"):
            columns = {
                value: rows.pivot(index="epoch", columns="parameter", values=value)
                .reindex(columns=names)
                .to_numpy()
                .astype(np.float32)
                for value in _VALUES
            }
        history = cls(Path(folder), names)
        for epoch, step, *values in zip(steps.index, steps, *columns.values()):
            history._add(int(epoch), int(step), *values)
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

    def _read(self, path: Path, before: int) -> str:
        """Add the complete epochs of a file.

        Args:
            path: the file.
            before: the first epoch that is trained again.

        Returns:
            Reason for a backup, empty if no row before that epoch is lost.
        """
        text = path.read_bytes().decode(errors="replace")
        try:
            rows = _parse_rows(text)
        except ValueError:
            return "it is not a CPR history"
        for epoch, of_epoch in rows[rows["epoch"] < before].groupby("epoch", sort=True):
            steps = of_epoch["step"].unique()
            if of_epoch["parameter"].tolist() == self.names and len(steps) == 1:
                with np.errstate(over="ignore"):
                    values = of_epoch[_VALUES].to_numpy().T.astype(np.float32)
                self._add(int(epoch), int(steps[0]), *values)
        kept = _HEADER + self._rows(0)
        rest = text.removeprefix(kept).split("\n")
        if text.startswith(kept) and all(_epoch(line) >= before for line in rest if line):
            return ""
        return "rows are damaged or of other parameters"


def _parse_rows(text: str) -> pd.DataFrame:
    """Return the complete rows of a history.

    Raises:
        ValueError: the first line is not that of a history.
    """
    text = text[: text.rfind("\n") + 1]  # a killed training may have left half a line
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pd.errors.ParserWarning)  # of rows with more fields than columns
        rows = pd.read_csv(
            io.StringIO(text), dtype=str, keep_default_na=False, on_bad_lines="skip", index_col=False
        )
    if rows.columns.tolist() != COLUMNS:
        raise ValueError(f"expected the columns {COLUMNS}, got {rows.columns.tolist()}")
    for column in ("epoch", "step", *_VALUES):
        rows[column] = pd.to_numeric(rows[column], errors="coerce")
    for column, limit in _LIMITS.items():
        rows = rows[rows[column].between(0, limit) & (rows[column] % 1 == 0)]
    return rows.astype(dict.fromkeys(_LIMITS, int))


def _epoch(line: str) -> int:
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
