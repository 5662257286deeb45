"""What CPR did, epoch by epoch: ``cpr_history.csv`` and ``cpr_progress.png`` in the fold's folder."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nnunet_cpr.cpr import CPR
from nnunet_cpr.files import replacing
from nnunet_cpr.nnunet.figures import draw_progress

CSV_NAME = "cpr_history.csv"
FIGURE_NAME = "cpr_progress.png"
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
    """Where a file went that could not be read at all."""

    @classmethod
    def resume(cls, folder: str | os.PathLike[str], epoch: int, names: list[str]) -> History:
        """Continue the history in ``folder`` for a training that is about to start ``epoch``.

        Rows of that epoch and later ones are dropped: they belong to work that is done again, or to
        an earlier training. So are epochs that are not whole.
        """
        history = cls(Path(folder), list(names))
        path = history.folder / CSV_NAME
        if epoch > 0 and path.exists():
            history._read(path, epoch)
        history._rewrite()
        return history

    def append(self, epoch: int, cpr: CPR) -> None:
        """Add the state that CPR has at the end of an epoch."""
        self._add(
            epoch,
            cpr.step_count,
            cpr.measure.cpu().numpy(),
            cpr.kappa.cpu().numpy(),
            cpr.lagrange_multiplier.cpu().numpy(),
        )
        with open(self.folder / CSV_NAME, "a", newline="") as file:
            csv.writer(file).writerows(self._rows(len(self.epochs) - 1))

    def draw(self) -> None:
        """Write ``cpr_progress.png``.

        Raises:
            OSError: the file cannot be written; the one before stays.
        """
        with replacing(self.folder / FIGURE_NAME) as path:
            draw_progress(self, path)

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

    def _read(self, path: Path, before: int) -> None:
        """Take over the epochs that are whole; a kill or a full disk may have torn the others."""
        text = path.read_text(encoding="utf-8", errors="replace").replace("\0", "")
        lines = text.splitlines()
        if not lines or lines[0] != ",".join(COLUMNS):
            self.set_aside = path.with_name("cpr_history.unreadable.csv")
            os.replace(path, self.set_aside)
            return
        parameters: dict[int, list[str]] = {}
        values: dict[int, list[list[float]]] = {}
        for row in csv.reader(lines[1:]):
            try:
                epoch, name = int(row[0]), row[2]
                numbers = [float(row[column]) for column in (1, 3, 4, 5)]
            except (ValueError, IndexError):
                continue
            parameters.setdefault(epoch, []).append(name)
            values.setdefault(epoch, []).append(numbers)
        for epoch in sorted(e for e in values if e < before and parameters[e] == self.names):
            step, *columns = np.array(values[epoch]).T
            # A measure may be NaN, as may the weights of a training that went wrong.
            self._add(epoch, int(step[0]), *(column.astype(np.float32) for column in columns))

    def _rewrite(self) -> None:
        with replacing(self.folder / CSV_NAME) as path, open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for i in range(len(self.epochs)):
                writer.writerows(self._rows(i))

    def _rows(self, i: int) -> list[tuple[int, int, str, str, str, str]]:
        """The rows of one epoch; nine digits give a float32 back exactly."""
        values = zip(self.names, self.measure[i], self.kappa[i], self.multiplier[i])
        return [
            (self.epochs[i], self.steps[i], name, f"{r:.9g}", f"{kappa:.9g}", f"{multiplier:.9g}")
            for name, r, kappa, multiplier in values
        ]
