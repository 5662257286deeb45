"""Base class of the trainers in ``trainers/``.

A trainer family is a short subclass in ``trainers/`` that builds the optimizer. Its name and defaults
are listed in ``FAMILIES`` of :mod:`nnunet_cpr.names.trainer_name`.
"""

from __future__ import annotations

import sys
import traceback
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.default_n_proc_DA import get_allowed_n_proc_DA
from torch.optim import Optimizer

from nnunet_cpr._files import atomic_write, remove_temporary_files
from nnunet_cpr._seeding import seed_all
from nnunet_cpr.baselines import Baseline
from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.nnunet import checkpoints
from nnunet_cpr.nnunet.checkpoints import DamagedCheckpoint, UnusableCheckpoint
from nnunet_cpr.nnunet.figure_process import FigureProcess
from nnunet_cpr.nnunet.poly_lr import WarmupPolyLRScheduler
from nnunet_cpr.nnunet.tensorboard import (
    VARIABLE,
    TensorBoardLogger,
    TensorBoardMissing,
    class_names,
    require_tensorboard,
)

ADAM_BETAS = (0.9, 0.99)
"""Coefficients of Adam's running averages in the paper's segmentation runs."""


class NamedTrainer(nnUNetTrainer, ABC):
    """nnU-Net's trainer with the settings of its class name.

    Without learning-rate warm-up the schedule is nnU-Net's own, set every epoch; with warm-up it is the
    paper's, set every iteration.

    Attributes:
        settings: settings parsed from the class name.
        baseline: comparison method attached to the optimizer, None if the name has none.
        figures: process that draws on rank 0, None on other ranks and before the training starts.
        tensorboard: TensorBoard's logger if ``nnUNet_tensorboard_enabled`` asks for it, on rank 0.
    """

    settings: ClassVar[TrainerName]
    baseline: Baseline | None
    figures: FigureProcess | None = None
    tensorboard: TensorBoardLogger | None = None

    def __init__(
        self,
        plans: dict,
        configuration: str,
        fold: int,
        dataset_json: dict,
        device: torch.device = torch.device("cuda"),
    ) -> None:
        self.continues: bool = plans.get("continue_training", False)  # --c; nnU-Net removes the entry
        super().__init__(plans, configuration, fold, dataset_json, device)
        settings = self.settings
        self.initial_lr = settings.lr or settings.defaults.lr
        if settings.weight_decay is not None:
            self.weight_decay = settings.weight_decay
        self.baseline_decay = self.weight_decay
        if settings.defaults.cpr or settings.baseline is not None:
            self.weight_decay = 0.0  # of the optimizer
        if settings.epochs is not None:
            self.num_epochs = settings.epochs
        if settings.iterations is not None:
            self.num_iterations_per_epoch = settings.iterations
        self.warmup_steps = settings.warmup_steps

    @abstractmethod
    def build_optimizer(self) -> Optimizer:
        """Return the optimizer of ``self.network``."""

    def configure_optimizers(self) -> tuple[Optimizer, Any]:
        optimizer = self.build_optimizer()
        self.baseline = self.settings.build_baseline(self.network, self.baseline_decay)
        if self.baseline is not None:
            self.baseline.attach(optimizer)
        if self.warmup_steps == 0:
            return optimizer, PolyLRScheduler(optimizer, self.initial_lr, self.num_epochs)
        return optimizer, WarmupPolyLRScheduler(
            optimizer,
            self.initial_lr,
            self.warmup_steps,
            self.num_epochs,
            self.num_iterations_per_epoch,
        )

    def initialize(self) -> None:
        self._seed(0)  # the network's initial weights
        super().initialize()

    def on_train_start(self) -> None:
        logs_to_tensorboard = self.local_rank == 0 and self.logger._is_logger_enabled(VARIABLE)
        if logs_to_tensorboard:
            try:
                require_tensorboard()  # before nnU-Net starts processes
            except TensorBoardMissing as error:
                self._exit(str(error))
        super().on_train_start()
        folder = Path(self.output_folder)
        if self.local_rank == 0:
            remove_temporary_files(folder, "checkpoint_*", "cpr_*", "progress*")
            figures = self.figures = FigureProcess(folder, self._warn)
            self.logger.plot_progress_png = lambda _: figures.draw(self.logger.get_checkpoint())
        if logs_to_tensorboard:
            logged = self.logger.get_checkpoint()
            names = class_names(self.label_manager)
            self.tensorboard = TensorBoardLogger(folder, self.current_epoch, logged, names)
            self.tensorboard.update_config(
                {"trainer": type(self).__name__, "dataset": self.dataset_json}
            )
            self.logger.loggers.append(self.tensorboard)
        if self.baseline is not None:
            self.print_to_log_file(f"Regularizing with {self.baseline!r}")
        if self.settings.seed is not None and get_allowed_n_proc_DA() != 0:
            self._warn(
                f"_seed{self.settings.seed} does not make this training reproducible, because processes "
                "load the data; set nnUNet_n_proc_DA=0 if it should be"
            )

    def on_train_end(self) -> None:
        super().on_train_end()
        self.draw_last_state()

    def draw_last_state(self, timeout: float = 300) -> None:
        """Draw the figures once more and wait, at the end of a training or when it is interrupted.

        Args:
            timeout: seconds after which drawing is given up.
        """
        if self.figures is not None and self.logger.get_value("epoch_end_timestamps", None):
            self.figures.finish(self.logger.get_checkpoint(), timeout)

    def on_train_epoch_start(self) -> None:
        # Depends on the epoch alone, so that a resumed training draws the same random numbers.
        self._seed(1 + self.current_epoch)
        super().on_train_epoch_start()

    def train_step(self, batch: dict) -> dict:
        if isinstance(self.lr_scheduler, WarmupPolyLRScheduler):
            self.lr_scheduler.step_iteration()
        return super().train_step(batch)

    def save_checkpoint(self, filename: str) -> None:
        if self.local_rank != 0 or self.disable_checkpointing:
            super().save_checkpoint(filename)
            return
        try:
            with atomic_write(Path(filename)) as temporary, open(temporary, "wb") as file:
                # torch.save reports the cause of an error for a file object, but not for a path.
                super().save_checkpoint(file)
        except (OSError, RuntimeError) as error:
            failed = error if isinstance(error, OSError) else error.__context__
            if not isinstance(failed, OSError):
                raise
            self._exit(f"cannot write {filename}: {failed.strerror}; fix this and continue with --c")

    def load_checkpoint(self, filename_or_checkpoint: dict | str) -> None:
        if not isinstance(filename_or_checkpoint, str):
            super().load_checkpoint(filename_or_checkpoint)
            return
        if not self.was_initialized:
            self.initialize()
        path = Path(filename_or_checkpoint)
        fallbacks = checkpoints.fallbacks(path) if self.continues else []
        try:
            path, checkpoint = checkpoints.read_first_intact([path, *fallbacks], self._warn)
            checkpoints.check_matches(path, checkpoint, self)
            written_by = checkpoint["trainer_name"]
            del checkpoint
            with checkpoints.restricted_loading():
                super().load_checkpoint(str(path))
            if written_by != type(self).__name__:
                self._warn(f"continuing {path}, which was written by {written_by}")
        except DamagedCheckpoint as error:
            self._exit(f"{error}; move it away and continue with --c")
        except UnusableCheckpoint as error:
            self._exit(str(error))
        except ValueError as error:  # from load_state_dict of the optimizer or CPR
            self._exit(f"{path} does not match: {error}; {checkpoints.START_ANEW}")
        except Exception as error:  # a crafted file can fail in any way
            self.print_to_log_file(traceback.format_exc(), also_print_to_console=False)
            self._exit(f"{path} cannot be loaded ({type(error).__name__}, see {self.log_file})")

    def _warn(self, message: str) -> None:
        """Write a message to the log and in one line to stderr."""
        if self.local_rank == 0:
            self.print_to_log_file(f"WARNING! {message}", also_print_to_console=False)
            print(f"nnunet-cpr: {message}", file=sys.stderr)

    def _exit(self, message: str) -> NoReturn:
        self._warn(message)
        raise SystemExit(1)

    def _seed(self, stream: int) -> None:
        if self.settings.seed is None:
            return
        seed_all(self.settings.seed, self.local_rank, stream)
