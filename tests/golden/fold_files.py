"""Files of short trainings, as nnU-Net writes them with trainers of the package."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.workspace import Workspace

HELD = "nnUNetTrainerCPR_ws3_seed1_3epochs_2iters"
VERDICTS = {
    HELD: "active and held",
    "nnUNetTrainerCPR_k1_2epochs_2iters": "too loose",
    "nnUNetTrainerCPR_ws100_2epochs_2iters": "never set",
    "nnUNetTrainerCPR_k1en5_mu1e1_3epochs_2iters": "too tight",
}
"""Words of the verdict in the log of a training."""


def train(workspace: Workspace, trainer: str) -> Path:
    """Train as nnU-Net does, with one validation iteration, and return the folder of the fold."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        built = workspace.build(trainer, patch)
        built.num_val_iterations_per_epoch = 1
        built.run_training()
    return workspace.fold(trainer)


def read_history(fold: Path) -> dict[str, Any]:
    """Return the columns and the rows of ``cpr_history.csv``."""
    columns, *rows = (fold / "cpr_history.csv").read_text(encoding="utf-8").splitlines()
    return {"columns": columns, "rows": [_row(line) for line in rows]}


def _row(line: str) -> list[Any]:
    epoch, step, parameter, *values = line.split(",")
    return [int(epoch), int(step), parameter, *(f"{float(value):.7g}" for value in values)]
