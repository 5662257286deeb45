"""Base class of the trainers with CPR in ``trainers/``."""

from __future__ import annotations

import math
import time
from typing import Any

from torch.optim import Optimizer

from nnunet_cpr.cpr.algorithm import CPR
from nnunet_cpr.cpr.attachment import attached_method
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.bounds_verdict import advise_on_unset, judge_bounds
from nnunet_cpr.nnunet.history import CSV_NAME, History
from nnunet_cpr.nnunet.progress_figure import FIGURE_NAME, draw_progress
from nnunet_cpr.refusals import one_line


class CPRTrainer(NamedTrainer):
    """Base class of the trainers with CPR, whose values it logs, records and plots every epoch."""

    __cpr: CPR | None = None
    __history: History | None = None
    __drawn_at = 0.0
    __drawing_seconds = 2.0  # assumed for the first time

    @property
    def cpr(self) -> CPR:
        """CPR of the optimizer, or the one to be attached to it."""
        if self.__cpr is None:
            self.__cpr = CPR(self.network, **self.cpr_settings)
        return self.__cpr

    def configure_anew(self) -> None:
        self.cpr.detach()
        self.__cpr = None  # its bound is another one now
        super().configure_anew()

    @property
    def history(self) -> History | None:
        """Record of the training on rank 0, None on other ranks and before the training starts."""
        return self.__history

    @property
    def cpr_settings(self) -> dict[str, Any]:
        """Keyword arguments of :class:`CPR` and of the optimizers with CPR."""
        return self.training.cpr_settings

    @property
    def _regularization(self) -> CPR:
        return self.cpr

    def _attach_regularization(self, optimizer: Optimizer) -> None:
        if self.settings.defaults.keeps_optimizer:
            if self.cpr.bound != self.training.kappa and attached_method(optimizer) is not self.cpr:
                self.__cpr = None  # the base trainer has set its length as it built the optimizer
            super()._attach_regularization(optimizer)
            return
        method = attached_method(optimizer)
        if not isinstance(method, CPR):
            self._exit(
                f"{type(self).__name__}.build_optimizer: expected SGDCPR, AdamCPR or MuonCPR, got "
                f"{type(optimizer).__name__} without CPR; derive the class from nnUNetTrainerAttachCPR, "
                "which attaches CPR to any optimizer of configure_optimizers"
            )
        self.__cpr = method

    def on_train_start(self) -> None:
        super().on_train_start()
        self.cpr.warns_of_unset_bounds = False  # the verdict of the training tells of them
        self.__drawn_at = time.monotonic()
        # nnU-Net's logger accepts only keys that it has, with one value for every epoch so far.
        values = self.logger.local_logger.my_fantastic_logging
        for key in LOGGED:
            logged = values.setdefault(f"cpr_{key}", [])
            logged += [float("nan")] * (self.current_epoch - len(logged))
        if self.local_rank == 0:
            try:
                self.__history = History.resume(self.output_folder, self.current_epoch, self.cpr.names)
            except OSError as error:
                self._exit(f"cannot continue {error.filename}: {error.strerror}")
            if self.__history.backup is not None:
                self._warn(
                    f"{CSV_NAME} is damaged or of other parameters; the previous file is kept as "
                    f"{self.__history.backup.name}"
                )
        count = len(self.cpr.names)
        self.print_to_log_file(f"Regularizing {count} parameter matrices with {self.cpr!r}")
        bound, steps = self.cpr.bound, self.training.steps
        if bound.earliest >= steps:
            self._warn(
                f"the bounds are set at step {bound.earliest} or later, but this training has {steps} "
                f"steps: nothing will be regularized; {advise_on_unset(steps)}"
            )

    def on_train_epoch_end(self, train_outputs: list[dict]) -> None:
        self._record_epoch()  # of the weights that train, which averaged ones replace hereafter
        super().on_train_epoch_end(train_outputs)

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self._draw()

    def _record_epoch(self) -> None:
        """Log and record the bounds and multipliers of an epoch."""
        measure = self.cpr.measure
        metrics = self.cpr.metrics(measure)
        for key in LOGGED:
            self.logger.log(f"cpr_{key}", metrics[key], self.current_epoch)
        self.print_to_log_file(
            "CPR: step {step}, measure/bound {measure_to_kappa:.4f}, multiplier mean "
            "{lagrange_multiplier_mean:.3g} max {lagrange_multiplier_max:.3g}, bounds set "
            "{bounded:.0%}, multipliers above 0 {active:.0%}, skipped updates {skipped_updates:.0f}, "
            "limited corrections {limited_corrections:.0f}".format(step=self.cpr.step_count, **metrics)
        )
        if self.history is not None:
            try:
                self.history.append(self.current_epoch, self.cpr, measure)
            except OSError as error:  # a full disk must not end the training
                self._warn(f"cannot write {CSV_NAME}: {error}; trying again after the next epoch")

    def _draw(self, share: float = 0.005) -> None:
        """Draw the figure, if that takes at most a share of the time since it was drawn last."""
        start = time.monotonic()
        if self.history is None or self.__drawing_seconds > share * (start - self.__drawn_at):
            return
        try:
            draw_progress(self.history)
        except Exception as error:  # a figure must not end the training
            self._warn(f"cannot draw {FIGURE_NAME}: {type(error).__name__}: {one_line(error)}")
        self.__drawn_at = time.monotonic()
        self.__drawing_seconds = self.__drawn_at - start

    def run_training(self) -> None:
        super().run_training()
        if self.history is not None and self.history.epochs:
            self._draw(share=math.inf)
            verdict = judge_bounds(self.history)
            text, advice = verdict.text, verdict.advice
            limited = self.cpr.metrics()["limited_corrections"]
            if limited > 1:
                text += f"; {limited:,.0f} corrections were limited, which sets a matrix to 0"
                advice = advice or "choose a lower learning rate or _mu<V>"
            if advice:
                self._warn(f"{text}; {advice}")
            else:
                self.print_to_log_file(f"CPR: {text}")


LOGGED = ("measure_to_kappa", "lagrange_multiplier_mean", "lagrange_multiplier_max", "active")
"""Metrics of CPR in nnU-Net's logger, and through it in W&B, as ``cpr_<name>``."""
