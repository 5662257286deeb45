"""Progress of CPR: in nnU-Net's log, in ``cpr_history.csv``, in a figure, and as a verdict."""

from __future__ import annotations

import math
import time
from typing import Any

from nnunet_cpr.cpr.algorithm import CPR
from nnunet_cpr.nnunet.bounds_verdict import advise_on_unset, judge_bounds
from nnunet_cpr.nnunet.history import CSV_NAME, History
from nnunet_cpr.nnunet.parts.part import Part
from nnunet_cpr.nnunet.progress_figure import FIGURE_NAME, draw_progress
from nnunet_cpr.refusals import Refusal, counted, one_line

LOGGED = ("measure_to_kappa", "lagrange_multiplier_mean", "lagrange_multiplier_max", "active")
"""Metrics of CPR in nnU-Net's logger, and through it in W&B, as ``cpr_<name>``."""


class Progress(Part):
    """Values of CPR, logged, recorded and plotted every epoch.

    Attributes:
        history: record of the training on rank 0; None elsewhere, before it starts, and without CPR.
    """

    history: History | None = None
    _drawn_at = 0.0
    _drawing_seconds = 2.0  # assumed for the first time

    @property
    def _cpr(self) -> CPR | None:
        return self.parts.regularization.cpr

    def start(self) -> None:
        cpr, epoch = self._cpr, self.trainer.current_epoch
        if cpr is None:
            return
        cpr.warns_of_unset_bounds = False  # the verdict of the training tells of them
        self._drawn_at = time.monotonic()
        # nnU-Net's logger accepts only keys that it has, with one value for every epoch so far.
        values = self.trainer.logger.local_logger.my_fantastic_logging
        for key in LOGGED:
            logged = values.setdefault(f"cpr_{key}", [])
            logged += [float("nan")] * (epoch - len(logged))
        if self.trainer.local_rank == 0:
            self._resume(cpr)
        matrices = counted(len(cpr.names), "parameter matrix", "parameter matrices")
        self.log(f"Regularizing {matrices} with {cpr!r}")
        steps = self.trainer.training.steps
        if cpr.bound.earliest >= steps:
            self.warn(
                f"the bounds are set at step {cpr.bound.earliest} or later, but this training has "
                f"{counted(steps, 'step')}: nothing will be regularized; {advise_on_unset(steps)}"
            )

    def restore(self, checkpoint: dict[str, Any]) -> None:
        if self.history is not None and self._cpr is not None:  # amid a training, which goes back
            self._resume(self._cpr)

    def _resume(self, cpr: CPR) -> None:
        folder, epoch = self.trainer.output_folder, self.trainer.current_epoch
        try:
            self.history = History.resume(folder, epoch, cpr.names)
        except OSError as error:
            raise Refusal(f"cannot continue {error.filename}: {error.strerror}") from error
        if self.history.backup is not None:
            self.warn(
                f"{CSV_NAME} is damaged or of other parameters; the previous file is kept as "
                f"{self.history.backup.name}"
            )

    def end_epoch(self) -> None:
        """Log and record the bounds and multipliers of an epoch."""
        cpr, epoch = self._cpr, self.trainer.current_epoch
        if cpr is None:
            return
        measure = cpr.measure
        metrics = cpr.metrics(measure)
        for key in LOGGED:
            self.trainer.logger.log(f"cpr_{key}", metrics[key], epoch)
        self.log(
            "CPR: step {step}, measure/bound {measure_to_kappa:.4f}, multiplier mean "
            "{lagrange_multiplier_mean:.3g} max {lagrange_multiplier_max:.3g}, bounds set "
            "{bounded:.0%}, multipliers above 0 {active:.0%}, skipped updates {skipped_updates:.0f}, "
            "limited corrections {limited_corrections:.0f}".format(step=cpr.step_count, **metrics)
        )
        if self.history is not None:
            try:
                self.history.append(epoch, cpr, measure)
            except OSError as error:  # a full disk must not end the training
                self.warn(f"cannot write {CSV_NAME}: {error}; trying again after the next epoch")

    def draw(self, share: float = 0.005) -> None:
        """Draw the figure, if that takes at most a share of the time since it was drawn last."""
        start = time.monotonic()
        if self.history is None or self._drawing_seconds > share * (start - self._drawn_at):
            return
        try:
            draw_progress(self.history)
        except Exception as error:  # a figure must not end the training
            self.warn(f"cannot draw {FIGURE_NAME}: {type(error).__name__}: {one_line(error)}")
        self._drawn_at = time.monotonic()
        self._drawing_seconds = self._drawn_at - start

    def end(self) -> None:
        cpr = self._cpr
        if cpr is None or self.history is None or not self.history.epochs:
            return
        self.draw(share=math.inf)
        verdict = judge_bounds(self.history)
        text, advice = verdict.text, verdict.advice
        limited = cpr.metrics()["limited_corrections"]
        if limited > 1:
            text += f"; {limited:,.0f} corrections were limited, which sets a matrix to 0"
            advice = advice or "choose a lower learning rate or _mu<V>"
        if advice:
            self.warn(f"{text}; {advice}")
        else:
            self.log(f"CPR: {text}")
