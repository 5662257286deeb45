"""Reading and writing ``cpr_history.csv``, the record of CPR in a fold's folder."""

from __future__ import annotations

import csv
import io
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


def has_bounds(path: Path) -> bool:
    """Return True if a bound is set in a history.

    Args:
        path: a ``cpr_history.csv``.

    Raises:
        OSError: the file cannot be read.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    return any(line.split(",")[-2:-1] not in ([], ["inf"]) for line in reversed(lines))


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
        self._text = io.StringIO(newline="")
        self._rows = csv.writer(self._text)
        self._rows.writerow(COLUMNS)
        self._size = 0  # of what is in the file, bytes

    @classmethod
    def resume(cls, folder: str | os.PathLike[str], epoch: int, names: list[str]) -> History:
        """Continue the history in ``folder`` for a training that is about to start ``epoch``.

        Epochs from that one on are dropped, since they are trained again. A file that is damaged or of
        other parameters is renamed, see ``backup``. The next :meth:`append` writes the file.

        Raises:
            OSError: the file can neither be read nor be renamed.
        """
        history = cls(Path(folder), list(names))
        path = history.folder / CSV_NAME
        if epoch == 0 or not path.exists():
            return history
        try:
            recorded = cls.read(folder)
        except ValueError:
            recorded = None
        if recorded is None or recorded.names != history.names:
            history.backup = path.replace(path.with_name("cpr_history.unreadable.csv"))
            return history
        columns = zip(recorded.steps, recorded.measure, recorded.kappa, recorded.multiplier)
        for number, values in zip(recorded.epochs, columns):
            if number < epoch:
                history.add(number, *values)
        return history

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> History:
        """Read the history in ``folder`` without changing the file.

        The last epoch is left out if a killed training has not written all of its rows.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is damaged or has no rows.
        """
        path = Path(folder) / CSV_NAME
        epochs: dict[tuple[int, int], dict[str, list[float]]] = {}
        try:
            content = path.read_bytes()
            lines = content[: content.rfind(b"\n") + 1].decode().splitlines()
            header, *rows = csv.reader(lines)
            if header != COLUMNS:
                raise ValueError(f"the columns {', '.join(header)}")
            for number, step, name, measure, kappa, multiplier in rows:
                values = [float(measure), float(kappa), float(multiplier)]
                epochs.setdefault((int(number), int(step)), {})[name] = values
            if not epochs:
                raise ValueError("no rows")
            names, last = (list(epochs[key]) for key in (min(epochs), max(epochs)))
            if names != last == names[: len(last)]:
                del epochs[max(epochs)]
            if any(list(by_name) != names for by_name in epochs.values()):
                raise ValueError("epochs without a row of each parameter")
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path}: expected a CPR history, got: {error}") from error
        history = cls(Path(folder), names)
        for (epoch, steps), by_name in epochs.items():
            history.add(epoch, steps, *np.array(list(by_name.values()), np.float32).T)
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
        self.add(epoch, cpr.step_count, *(value.cpu().numpy() for value in values))
        self.write()

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

    def write(self) -> None:
        """Write the file, or the rows that it does not have yet.

        Raises:
            OSError: the file cannot be written. The next call writes the same rows again.
        """
        path, content = self.folder / CSV_NAME, self._text.getvalue().encode()
        if self._size and path.exists():
            with add_path_to_os_errors(path), open(path, "r+b") as file:
                file.seek(self._size)
                file.write(content[self._size :])
        else:
            with atomic_write(path) as temporary:
                temporary.write_bytes(content)
        self._size = len(content)
