"""What CPR did, epoch by epoch: ``cpr_history.csv`` in the fold's folder."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nnunet_cpr._files import atomic_write
from nnunet_cpr.cpr import CPR

CSV_NAME = "cpr_history.csv"
COLUMNS = ["epoch", "step", "parameter", "measure", "kappa", "multiplier"]


@dataclass
class History:
    """A row for every epoch and matrix, kept in a CSV file and in memory.

    ``measure``, ``kappa`` and ``multiplier`` hold an array of length J, in the order of ``names``, for
    each of ``epochs``.
    """

    folder: Path
    names: list[str]
    epochs: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    measure: list[np.ndarray] = field(default_factory=list)
    kappa: list[np.ndarray] = field(default_factory=list)
    multiplier: list[np.ndarray] = field(default_factory=list)
    set_aside: Path | None = None
    """Where the file went that was not taken over whole."""
    reason: str = ""
    """Why it was not."""

    _written: int = 0  # epochs that are in the file
    _size: int = -1  # of the file when it held just these; another size was not our doing

    def __post_init__(self) -> None:
        self._fields = [_as_field(name) for name in self.names]

    @classmethod
    def resume(cls, folder: str | os.PathLike[str], epoch: int, names: list[str]) -> History:
        """Continue the history in ``folder`` for a training that is about to start ``epoch``.

        Rows of that epoch and later ones are dropped: they belong to work that is done again, or to
        an earlier training. So are epochs that are not whole, and those of other matrices; the file
        is kept under another name then, see ``set_aside``. The new file appears with the first
        :meth:`append`.

        Raises:
            OSError: the file can neither be taken over nor be given another name.
        """
        history = cls(Path(folder), list(names))
        if epoch > 0:
            history._read(epoch)
        return history

    def append(self, epoch: int, cpr: CPR) -> None:
        """Add the state that CPR has at the end of an epoch.

        Raises:
            OSError: the file cannot be written. It holds what it held before, and the next call
                writes this epoch as well.
        """
        self._add(
            epoch,
            cpr.step_count,
            cpr.measure.cpu().numpy(),
            cpr.kappa.cpu().numpy(),
            cpr.lagrange_multiplier.cpu().numpy(),
        )
        self._write()

    def _add(
        self,
        epoch: int,
        step: int,
        measure: np.ndarray,
        kappa: np.ndarray,
        multiplier: np.ndarray,
    ) -> None:
        self.epochs.append(epoch)
        self.steps.append(step)
        self.measure.append(measure)
        self.kappa.append(kappa)
        self.multiplier.append(multiplier)

    # Reading

    def _read(self, before: int) -> None:
        """Take over the epochs that are whole; a kill or a full disk may have torn the others."""
        path = self.folder / CSV_NAME
        if not os.path.lexists(path):
            return
        try:
            self.reason = self._take_over(path.read_bytes(), before) if path.is_file() else "not a file"
        except OSError as error:
            self.reason = str(error.strerror)
        if self.reason:
            self.set_aside = _unused(path.with_name("cpr_history.unreadable.csv"))
            os.replace(path, self.set_aside)

    def _take_over(self, content: bytes, before: int) -> str:
        """Add the epochs that are whole.

        Returns:
            What is wrong with the file; empty if it is well, or torn only where work is done again.
        """
        text = content.decode("utf-8", errors="replace").replace("\r\n", "\n")
        *lines, torn = text.split("\n")  # a whole line ends with a line break
        if not lines or lines[0] != ",".join(COLUMNS):
            return "its first line is not that of a history"
        found: dict[int, list[str]] = {}
        dropped = 0
        for line in lines[1:]:
            epoch = _epoch(line)
            if 0 <= epoch < before:
                found.setdefault(epoch, []).append(line)
            dropped += epoch < 0
        for epoch in sorted(found):
            if not self._take_epoch(epoch, found[epoch]):
                dropped += len(found[epoch])
        dropped += torn != "" and _epoch(torn) < before
        return f"lines that are damaged or of other matrices: {dropped}" if dropped else ""

    def _take_epoch(self, epoch: int, lines: list[str]) -> bool:
        """Add an epoch, if its rows are those of all matrices."""
        steps, fields, values = set(), [], []
        try:
            for line in lines:
                _, step, rest = line.split(",", 2)
                name, measure, kappa, multiplier = rest.rsplit(",", 3)
                steps.add(int(step))
                fields.append(name)
                # A measure may be NaN, as may the weights of a training that went wrong.
                values.append([float(measure), float(kappa), float(multiplier)])
        except ValueError:
            return False
        if fields != self._fields or len(steps) != 1 or min(steps) < 0:
            return False
        with np.errstate(over="ignore"):
            self._add(epoch, steps.pop(), *np.array(values).T.astype(np.float32))
        return True

    # Writing

    def _write(self) -> None:
        """Bring the file up to date."""
        path = self.folder / CSV_NAME
        if self._size != (path.stat().st_size if path.exists() else 0):
            with atomic_write(path) as temporary:
                whole = [f"{','.join(COLUMNS)}\r\n", *self._rows(range(len(self.epochs)))]
                temporary.write_bytes("".join(whole).encode())
            self._size = path.stat().st_size
        else:
            new = "".join(self._rows(range(self._written, len(self.epochs)))).encode()
            with open(path, "ab", buffering=0) as file:
                try:
                    left = new
                    while left:
                        left = left[file.write(left) :]
                except OSError as error:
                    file.truncate(self._size)
                    raise OSError(error.errno, error.strerror, str(path)) from error
            self._size += len(new)
        self._written = len(self.epochs)

    def _rows(self, places: Iterable[int]) -> Iterable[str]:
        """The rows of some epochs; nine digits give a float32 back exactly."""
        for i in places:
            for name, *values in zip(self._fields, self.measure[i], self.kappa[i], self.multiplier[i]):
                numbers = ",".join(f"{value:.9g}" for value in values)
                yield f"{self.epochs[i]},{self.steps[i]},{name},{numbers}\r\n"


def _epoch(line: str) -> int:
    """The epoch that a row is of, -1 if it does not say."""
    try:
        return max(int(line.partition(",")[0]), -1)
    except ValueError:
        return -1


def _as_field(name: str) -> str:
    """A name as it stands in a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow([name])
    return text.getvalue()


def _unused(path: Path) -> Path:
    """This path, with a number if there is such a file already."""
    number, candidate = 1, path
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_stem(f"{path.stem}-{number}")
    return candidate
