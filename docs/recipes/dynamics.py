"""Training dynamics of a run with Hugging Face's Trainer, recorded as a table."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from language_options import DYNAMICS
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from nnunet_cpr.cpr import CPR
from nnunet_cpr.param_groups import regularized

COLUMNS = ["step", "parameter", "measure", "kappa", "multiplier"]
"""Columns of the table, which has a row for each matrix and evaluation."""


class Recorder(TrainerCallback):
    """Write mean square, bound and Lagrange multiplier of each matrix at every evaluation.

    Without CPR the matrices are those that it would regularize, and the last two columns are empty.

    Args:
        folder: folder of the run.
        model: the model.
        optimizer: its optimizer, whose ``cpr`` is read if it has one.
    """

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self.file = folder / DYNAMICS
        self.matrices = regularized(model)
        self.optimizer = optimizer
        self._recorded: int | None = None
        self._logged: tuple[int, float] | None = None
        self._seconds: list[float] = []

    @property
    def seconds_per_step(self) -> float:
        """Median over the intervals between two logs, most of which have no evaluation or checkpoint."""
        return statistics.median(self._seconds) if self._seconds else float("nan")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the table, or drop the rows that a resumed run will write again."""
        if state.is_world_process_zero:
            rows = pd.DataFrame(columns=COLUMNS)
            if state.global_step > 0 and self.file.exists():
                rows = pd.read_csv(self.file)
                rows = rows[rows["step"] <= state.global_step]
            rows.to_csv(self.file, index=False)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the time since the last log; the Trainer has just waited for the GPU."""
        now = time.perf_counter()
        if self._logged is not None and state.global_step > self._logged[0]:
            steps, start = state.global_step - self._logged[0], self._logged[1]
            self._seconds.append((now - start) / steps)
        self._logged = (state.global_step, now)

    @torch.no_grad()
    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the rows of this step."""
        if not state.is_world_process_zero or self._recorded == state.global_step:
            return  # the second: an evaluation after the training
        self._recorded = state.global_step
        measures = torch.stack([p.float().square().mean() for p in self.matrices.values()]).tolist()
        rows = pd.DataFrame({"step": state.global_step, "parameter": list(self.matrices)})
        rows["measure"] = measures
        cpr = getattr(self.optimizer, "cpr", None)
        if isinstance(cpr, CPR):
            rows["kappa"] = cpr.kappa.tolist()
            rows["multiplier"] = cpr.lagrange_multiplier.tolist()
        rows.reindex(columns=COLUMNS).to_csv(self.file, mode="a", header=False, index=False)
