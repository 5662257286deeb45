"""Base class of the trainers in ``trainers/``.

A trainer family is a short subclass in ``trainers/`` that builds the optimizer. Its name and defaults
are listed in ``FAMILIES`` of :mod:`nnunet_cpr.names.trainer_name`.
"""

from __future__ import annotations

import sys
import time
import traceback
from abc import ABC
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.default_n_proc_DA import get_allowed_n_proc_DA
from torch import distributed
from torch.optim import Optimizer

from nnunet_cpr._attachment import RegularizationMethod, attached_method
from nnunet_cpr._files import remove_temporary_files
from nnunet_cpr._seeding import seed_all
from nnunet_cpr._spelling import print_number
from nnunet_cpr.baselines import Baseline
from nnunet_cpr.names.trainer_name import DEFAULT_LR, TrainerName
from nnunet_cpr.nnunet import checkpoints, other_optimizer
from nnunet_cpr.nnunet.checkpoints import (
    START_ANEW,
    EpochStart,
    Interruption,
    UnusableCheckpoint,
    one_line,
    save_interval,
    saved_as_a_whole,
)
from nnunet_cpr.nnunet.cpu_threads import limit_cpu_threads
from nnunet_cpr.nnunet.figure_schedule import FigureSchedule
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT, LATEST_CHECKPOINT
from nnunet_cpr.nnunet.poly_lr import WarmupPolyLRScheduler
from nnunet_cpr.nnunet.tensorboard import (
    VARIABLE,
    TensorBoardLogger,
    TensorBoardMissing,
    require_tensorboard,
)

ADAM_BETAS = (0.9, 0.99)
"""Coefficients of Adam's running averages in the paper's segmentation runs."""


class NamedTrainer(nnUNetTrainer, ABC):
    """nnU-Net's trainer with the settings of its class name.

    A family either builds its optimizer (:meth:`build_optimizer`) or keeps that of the other trainer in
    its name or among its base classes, with that trainer's learning-rate schedule. The schedule of the
    former is nnU-Net's own, set every epoch; with learning-rate warm-up it is the paper's, set every
    iteration.

    Attributes:
        settings: settings parsed from the class name.
        defined_in: file of the class if it is a family, None for classes derived from one.
        is_created: True if the class was created for a name with suffixes.
        baseline: comparison method attached to the optimizer, None if the name has none.
        epoch_start: checkpoint of the start of the running epoch, empty on other ranks than 0.
        figures: times at which rank 0 draws, None on other ranks and before the training starts.
        tensorboard: TensorBoard's logger if ``nnUNet_tensorboard_enabled`` asks for it, on rank 0.
    """

    settings: ClassVar[TrainerName]
    defined_in: ClassVar[str | None] = None
    is_created: ClassVar[bool] = False
    baseline: Baseline | None = None
    figures: FigureSchedule | None = None
    tensorboard: TensorBoardLogger | None = None
    initial_lr: float
    weight_decay: float
    baseline_decay: float
    _configured: Optimizer | None = None
    _first_epoch = 0
    _keeps_epoch_start = True

    def __init__(
        self,
        plans: dict,
        configuration: str,
        fold: int,
        dataset_json: dict,
        device: torch.device = torch.device("cuda"),
    ) -> None:
        self.continues: bool = plans.get("continue_training", False)  # --c; nnU-Net removes the entry
        # By keyword, since other trainers may have their parameters in another order.
        super().__init__(
            plans=plans,
            configuration=configuration,
            fold=fold,
            dataset_json=dataset_json,
            device=device,
        )
        if self.initial_lr == DEFAULT_LR:
            self.initial_lr = self.settings.defaults.lr
        self.apply_settings()
        try:
            if self.device.type == "cpu":
                limit_cpu_threads()
            self._save_interval = save_interval()
        except ValueError as error:
            self._exit(str(error))
        self.epoch_start = EpochStart(Path(self.output_folder) / LATEST_CHECKPOINT)
        self._interruption = Interruption(self.epoch_start.write_file, self._warn)
        self._saved_at = time.monotonic()
        self._seed(0)  # the network's initial weights

    def apply_settings(self) -> None:
        """Set the hyperparameters that the name gives, which win over those of any base class."""
        settings = self.settings
        for attribute, value in (
            ("initial_lr", settings.lr),
            ("weight_decay", settings.weight_decay),
            ("num_epochs", settings.epochs),
            ("num_iterations_per_epoch", settings.iterations),
        ):
            if value is not None:
                setattr(self, attribute, value)

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer of ``self.network``."""
        raise NotImplementedError(f"{self.settings.family} keeps the optimizer of the other trainer")

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of the training."""
        return self.num_epochs * self.num_iterations_per_epoch

    @property
    def warmup_steps(self) -> int:
        """Steps of linear learning-rate warm-up."""
        if self.settings.keeps_optimizer:  # the attribute of nnU-Net's trainers with warm-up, in epochs
            return getattr(self, "warmup_duration_whole_net", 0) * self.num_iterations_per_epoch
        return self.settings.warmup_steps

    def configure_optimizers(self, *args: Any, **kwargs: Any) -> tuple[Optimizer, Any]:
        """Return the optimizer, with the regularization of the name attached, and its schedule.

        Trainers with stages pass the stage; a second call continues the regularization.
        """
        if not hasattr(self, "baseline_decay"):
            self.baseline_decay = self.weight_decay
            if not self.settings.keeps_optimizer and (
                self.settings.defaults.cpr or self.settings.baseline
            ):
                self.weight_decay = 0.0  # replaced by the regularization
        if self.baseline is None:
            self.baseline = self.settings.build_baseline(
                self.network, self.baseline_decay, self.total_steps
            )
        if self.settings.keeps_optimizer:
            optimizer, schedule = self._configure_other_optimizer(*args, **kwargs)
        else:
            optimizer = self.build_optimizer()
            for group in optimizer.param_groups if self.settings.momentum is not None else []:
                group["momentum"] = self.settings.momentum
            schedule = self._build_schedule(optimizer)
        self._attach_regularization(optimizer)
        self._configured = optimizer
        return optimizer, schedule

    def _configure_other_optimizer(self, *args: Any, **kwargs: Any) -> tuple[Optimizer, Any]:
        """Call the other trainer's method, without weight decay of the regularized parameters."""
        method, other = self._regularization, self.other_trainer().__name__
        with other_optimizer.without_weight_decay([] if method is None else method.parameters) as given:
            try:
                returned = super().configure_optimizers(*args, **kwargs)
            except (ValueError, IndexError) as error:
                if given.split == 0:
                    raise
                self._exit(
                    f"{type(self).__name__}: {other} expects its {given.count} parameter groups, of "
                    f"which {given.split} are split for the regularization: {error}"
                )
        is_pair = isinstance(returned, tuple | list) and len(returned) == 2
        if not is_pair or not isinstance(returned[0], Optimizer):
            self._exit(
                f"{type(self).__name__}: configure_optimizers of {other}: expected one torch optimizer "
                f"and one schedule, got {type(returned).__name__}; such a trainer cannot be combined"
            )
        if given.split and given.count > 1:
            self._warn(
                f"{given.split} of the {given.count} parameter groups of {other} are split for the "
                "regularization; a learning rate that it sets by the number of a group reaches another"
            )
        if given.count:  # not a later stage with the same optimizer
            self._check_is_used("lr", self.settings.lr, given.learning_rates)
            decay = self.settings.weight_decay
            if self.baseline is None:
                self._check_is_used("wd", decay, given.weight_decays)
            elif self.settings.decays and decay is None and any(given.weight_decays):
                self._check_is_used("wd", self.baseline_decay, given.weight_decays)
        return returned[0], returned[1]

    def _check_is_used(self, suffix: str, value: float | None, used: set[Any]) -> None:
        """End the training if the other trainer gives its optimizer another value."""
        if value is not None and value not in used:
            self._exit(
                f"{type(self).__name__}: {self.other_trainer().__name__} uses "
                f"{' and '.join(print_number(other) for other in sorted(used))} in place of "
                f"_{suffix}{print_number(value)}; choose _{suffix}<V> accordingly, or leave it out"
            )

    @property
    def _regularization(self) -> RegularizationMethod | None:
        """Method in place of the optimizer's weight decay."""
        return self.baseline

    def _attach_regularization(self, optimizer: Optimizer) -> None:
        method = self._regularization
        if method is not None and attached_method(optimizer) is not method:
            method.detach()  # from the optimizer of an earlier stage
            try:
                method.attach(optimizer)
            except ValueError as error:
                self._exit(f"{type(self).__name__}: {error}")

    def _build_schedule(self, optimizer: Optimizer) -> Any:
        if self.warmup_steps == 0:
            return PolyLRScheduler(optimizer, self.initial_lr, self.num_epochs)
        if self.warmup_steps >= self.total_steps:
            self._exit(
                f"{type(self).__name__}: expected a learning-rate warm-up shorter than the training of "
                f"{self.total_steps} steps, got {self.warmup_steps} steps; choose _warmup<N>"
            )
        return WarmupPolyLRScheduler(
            optimizer,
            self.initial_lr,
            self.warmup_steps,
            self.num_epochs,
            self.num_iterations_per_epoch,
        )

    @classmethod
    def other_trainer(cls) -> type[nnUNetTrainer]:
        """Return the first base class that is not from this package, ``nnUNetTrainer`` or another."""
        others = (base for base in cls.__mro__ if not issubclass(base, NamedTrainer))
        return next(base for base in others if issubclass(base, nnUNetTrainer))

    def _describe(self) -> str:
        """Return the optimizer and the hyperparameters in one line."""
        decays = sorted({group.get("weight_decay", 0) for group in self.optimizer.param_groups})
        return (
            f"Training as {self.other_trainer().__name__} with {type(self.optimizer).__name__} and "
            f"{type(self.lr_scheduler).__name__}: learning rate {self.initial_lr:g}, weight decay "
            f"{' and '.join(f'{decay:g}' for decay in decays)}, {self.num_epochs} epochs of "
            f"{self.num_iterations_per_epoch} iterations"
        )

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
            checkpoints.remove_unfinished(folder)
            remove_temporary_files(folder, "cpr_*")
            if self.figures is None:
                self._draw_nnunets = self.logger.plot_progress_png
                self.logger.plot_progress_png = self._draw_if_due
            self.figures = FigureSchedule()
        schedule = self.lr_scheduler
        if isinstance(schedule, WarmupPolyLRScheduler):
            schedule.step_before_each(self.optimizer)
        if logs_to_tensorboard:
            self.tensorboard = TensorBoardLogger(folder, self.current_epoch)
            self.tensorboard.update_config(
                {"trainer": type(self).__name__, "dataset": self.dataset_json}
            )
            self.logger.loggers.append(self.tensorboard)
        self.print_to_log_file(self._describe())
        if self.baseline is not None:
            self.print_to_log_file(f"Regularizing with {self.baseline!r}")
        if self.settings.seed is not None and get_allowed_n_proc_DA() != 0:
            self._warn(
                f"_seed{self.settings.seed} does not make this training reproducible, because processes "
                "load the data; set nnUNet_n_proc_DA=0 if it should be"
            )
        self.epoch_start.path = folder / LATEST_CHECKPOINT
        self._saved_at, self._first_epoch = time.monotonic(), self.current_epoch

    def on_epoch_start(self) -> None:
        # Before anything of the epoch, so that a training that is continued here does the same.
        if not self.disable_checkpointing:
            if self.current_epoch > self._first_epoch and self._is_overdue():
                self._save_start_of_epoch(str(self.epoch_start.path))
            self._keep_start_of_epoch()
        self._seed(1 + self.current_epoch)
        super().on_epoch_start()

    def on_epoch_end(self) -> None:
        self._check_optimizer()
        super().on_epoch_end()

    def _is_overdue(self) -> bool:
        """Return True if rank 0 has not saved within the save interval."""
        overdue = [time.monotonic() - self._saved_at >= self._save_interval]
        if self.is_ddp:
            distributed.broadcast_object_list(overdue)
        return overdue[0]

    def _keep_start_of_epoch(self) -> None:
        # On all ranks, which other trainers may synchronize when they save; only rank 0 has something.
        if self._keeps_epoch_start:
            try:
                with self._interruption.deferred():
                    self.epoch_start.renew(self._save_start_of_epoch, self.current_epoch)
            except (AttributeError, TypeError) as error:
                self._keeps_epoch_start = False
                self._warn(
                    f"save_checkpoint of {self.other_trainer().__name__} takes paths only ({error}): a "
                    "training that a signal ends will continue from its last checkpoint"
                )

    def _save_start_of_epoch(self, file: Any) -> None:
        """Save to a path or a file object."""
        self.current_epoch -= 1  # nnU-Net stores the next epoch; its on_train_end does the same
        try:
            self.save_checkpoint(file)
        finally:
            self.current_epoch += 1

    def _check_optimizer(self) -> None:
        """End the training if it does not use the optimizer that is regularized."""
        if self.settings.keeps_optimizer and self._regularization is None:
            return
        ours = self._configured
        if self.optimizer is not ours and (ours is None or not ours.state):  # nor wraps ours
            self._exit(
                f"{type(self).__name__}: {self.other_trainer().__name__} trains with an optimizer that "
                "is not from configure_optimizers; build it there, so that it can be regularized"
            )

    def run_training(self) -> None:
        with self._interruption.watched():
            super().run_training()
        self.finish_training()

    def finish_training(self) -> None:
        """Draw the last state; called at the end of a training."""
        if self.figures is not None:
            self._draw()

    def perform_actual_validation(self, save_probabilities: bool = False) -> None:
        with self._interruption.watched():
            super().perform_actual_validation(save_probabilities)

    def _draw_if_due(self, folder: str) -> None:
        if self.figures is not None and self.figures.is_due:
            self._draw()

    def _draw(self) -> None:
        """Draw the figures; a figure that fails does not end the training."""
        assert self.figures is not None
        with self.figures.timed():
            for name, draw in self._figures_to_draw().items():
                try:
                    draw()
                except Exception as error:
                    self._warn(f"cannot draw {name}: {type(error).__name__}: {one_line(error)}")

    def _figures_to_draw(self) -> dict[str, Callable[[], None]]:
        """Return the functions that draw the figures, by file name."""
        return {"progress.png": lambda: self._draw_nnunets(self.output_folder)}

    def save_checkpoint(self, filename: str) -> None:
        if self.local_rank != 0 or self.disable_checkpointing or not isinstance(filename, str):
            super().save_checkpoint(filename)  # to a file object for ``epoch_start``
            return
        path = Path(filename)
        try:
            with self._interruption.deferred():
                with saved_as_a_whole(path) as temporary:
                    super().save_checkpoint(str(temporary))
                if path.name in (LATEST_CHECKPOINT, FINAL_CHECKPOINT):
                    self.epoch_start.clear()  # it is older
        except OSError as error:
            self._exit(f"cannot write {path}: {error.strerror}; fix this and continue with --c")
        except RuntimeError as error:  # torch's writer does not say what failed
            self._exit(f"cannot write {path}, is the disk full? Continue with --c ({one_line(error)})")
        self._saved_at = time.monotonic()

    def load_checkpoint(self, filename_or_checkpoint: dict | str) -> None:
        if not isinstance(filename_or_checkpoint, str):
            super().load_checkpoint(filename_or_checkpoint)
            return
        if not self.was_initialized:
            self.initialize()
        path = Path(filename_or_checkpoint)
        try:
            if self.continues:
                path, checkpoint = checkpoints.read_newest(path, self._warn)
            else:
                checkpoint = checkpoints.read(path)
            checkpoints.check_matches(path, checkpoint, self, self.settings.keeps_optimizer)
            written_by = checkpoint["trainer_name"]
            del checkpoint
            with checkpoints.restricted_loading():
                super().load_checkpoint(str(path))
        except UnusableCheckpoint as error:
            self._exit(str(error))
        except Exception as error:  # of another network, or crafted
            self.print_to_log_file(traceback.format_exc(), also_print_to_console=False)
            self._exit(f"{path} does not match this training: {one_line(error)}; {START_ANEW}")
        if written_by != type(self).__name__:
            self._warn(f"continuing {path}, which was written by {written_by}")

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
