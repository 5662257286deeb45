"""What CPR did, epoch by epoch: ``cpr_history.csv`` and ``cpr_progress.png`` in the fold's folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from nnunet_cpr.cpr import CPR
from nnunet_cpr.nnunet.figures import draw_progress
from nnunet_cpr.nnunet.files import replacing

CSV_NAME = "cpr_history.csv"
FIGURE_NAME = "cpr_progress.png"
COLUMNS = ["epoch", "step", "parameter", "measure", "kappa", "multiplier"]


@dataclass
class History:
    """A row for every epoch and matrix, kept in a CSV file and in memory.

    ``measure``, ``kappa`` and ``multiplier`` hold an array of length J for each of ``epochs``.
    """

    folder: Path
    names: list[str] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    measure: list[np.ndarray] = field(default_factory=list)
    kappa: list[np.ndarray] = field(default_factory=list)
    multiplier: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def resume(cls, folder: str | os.PathLike[str], epoch: int) -> History:
        """Continue the history in ``folder`` for a training that is about to start ``epoch``.

        Rows of that epoch and later ones are dropped: they belong to work that is done again, or to
        an earlier training.
        """
        history = cls(Path(folder))
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
            cpr.names,
            cpr.measure.cpu().numpy(),
            cpr.kappa.cpu().numpy(),
            cpr.lagrange_multiplier.cpu().numpy(),
        )
        with open(self.folder / CSV_NAME, "a", newline="") as file:
            file.write(self._rows(len(self.epochs) - 1))

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
        names: list[str],
        measure: np.ndarray,
        kappa: np.ndarray,
        multiplier: np.ndarray,
    ) -> None:
        self.names = names
        self.epochs.append(epoch)
        self.steps.append(step)
        self.measure.append(measure)
        self.kappa.append(kappa)
        self.multiplier.append(multiplier)

    def _read(self, path: Path, before: int) -> None:
        table = pd.read_csv(path, usecols=COLUMNS, on_bad_lines="skip")
        # A kill in the middle of a write leaves a torn last row; its epoch is done again.
        table["epoch"] = pd.to_numeric(table["epoch"], errors="coerce")
        table = table[table["epoch"] < before].dropna()
        for epoch, rows in table.groupby("epoch", sort=True):
            self._add(
                int(epoch),
                int(rows["step"].iloc[0]),
                rows["parameter"].tolist(),
                *(rows[c].to_numpy(np.float32) for c in ("measure", "kappa", "multiplier")),
            )

    def _rewrite(self) -> None:
        with replacing(self.folder / CSV_NAME) as path, open(path, "w", newline="") as file:
            file.write(",".join(COLUMNS) + "\n")
            for i in range(len(self.epochs)):
                file.write(self._rows(i))

    def _rows(self, i: int) -> str:
        """The rows of one epoch; nine digits give a float32 back exactly."""
        values = zip(self.names, self.measure[i], self.kappa[i], self.multiplier[i])
        return "".join(
            f"{self.epochs[i]},{self.steps[i]},{name},{r:.9g},{kappa:.9g},{multiplier:.9g}\n"
            for name, r, kappa, multiplier in values
        )
