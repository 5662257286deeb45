"""Base classes of the trainers in ``trainers/``.

A trainer family is a short subclass in ``trainers/`` that builds the optimizer. Its name and defaults
are listed in ``FAMILIES`` of :mod:`nnunet_cpr.names.trainer_name`. When nnU-Net searches for a name with
suffixes, such as ``nnUNetTrainerCPR_ws2000``, :func:`with_suffixes` creates a subclass of the family.
"""

from __future__ import annotations

import functools
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch.optim import Optimizer

from nnunet_cpr._files import atomic_write, remove_temporary_files
from nnunet_cpr._seeding import seed_all
from nnunet_cpr.baselines import Baseline
from nnunet_cpr.cpr import CPR
from nnunet_cpr.names import WrongName
from nnunet_cpr.names.trainer_name import TrainerName, parse_trainer_name
from nnunet_cpr.nnunet import checkpoints
from nnunet_cpr.nnunet.checkpoints import DamagedCheckpoint, UnusableCheckpoint
from nnunet_cpr.nnunet.history import CSV_NAME, History
from nnunet_cpr.nnunet.poly_lr import WarmupPolyLRScheduler
from nnunet_cpr.nnunet.progress_figure import FIGURE_NAME, draw_progress
from nnunet_cpr.optimizers import SGDCPR, AdamCPR


class NamedTrainer(nnUNetTrainer, ABC):
    """nnU-Net's trainer with the settings of its class name.

    Without learning-rate warm-up the schedule is nnU-Net's own, set every epoch; with warm-up it is the
    paper's, set every iteration.

    Attributes:
        settings: settings parsed from the class name.
        baseline: comparison method attached to the optimizer, None if the name has none.
    """

    settings: ClassVar[TrainerName]
    baseline: Baseline | None

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
        super().on_train_start()
        if self.local_rank == 0:
            remove_temporary_files(Path(self.output_folder), "checkpoint_*", "cpr_*")
        self.logger.plot_progress_png = self._log_plotting_errors(
            self.logger.plot_progress_png, "progress.png"
        )
        if self.baseline is not None:
            self.print_to_log_file(f"Regularizing with {self.baseline!r}")

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

    def _log_plotting_errors(self, draw: Callable[..., None], file: str) -> Callable[..., None]:
        """Return ``draw`` with its errors logged instead of raised."""

        @functools.wraps(draw)
        def draw_and_log(*args: Any) -> None:
            try:
                draw(*args)
            except Exception as error:
                self._warn(f"cannot draw {file}: {type(error).__name__}: {error}")

        return draw_and_log

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


class CPRTrainer(NamedTrainer):
    """Base class of the trainers with CPR, whose values it logs, records and plots every epoch.

    Attributes:
        history: record of the training on rank 0, None on other ranks and before the training starts.
    """

    optimizer: SGDCPR | AdamCPR
    history: History | None = None

    @property
    def cpr(self) -> CPR:
        """CPR of the optimizer."""
        return self.optimizer.cpr

    def on_train_start(self) -> None:
        super().on_train_start()
        _prepare_logger(self.logger, self.current_epoch)
        if self.local_rank == 0:
            try:
                self.history = History.resume(self.output_folder, self.current_epoch, self.cpr.names)
            except OSError as error:
                self._exit(f"cannot continue {error.filename}: {error.strerror}")
            if self.history.backup is not None:
                self._warn(
                    f"{CSV_NAME} could not be continued completely ({self.history.backup_reason}); "
                    f"the previous file is {self.history.backup.name}"
                )
        self.print_to_log_file(f"Regularizing with {self.cpr!r}")
        self.print_to_log_file("Regularized:", ", ".join(self.cpr.names))
        steps = self.num_epochs * self.num_iterations_per_epoch
        if self.cpr.bound.earliest >= steps:
            self.print_to_log_file(
                f"WARNING! The bounds are set at step {self.cpr.bound.earliest} or later, but this "
                f"training has {steps} steps: nothing will be regularized. Choose a smaller "
                f"_{self.cpr.bound.keyword}<N> in the trainer's name."
            )

    def on_train_epoch_end(self, train_outputs: list[dict]) -> None:
        super().on_train_epoch_end(train_outputs)
        metrics = self.cpr.metrics()
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
                self.history.append(self.current_epoch, self.cpr)
            except OSError as error:  # a full disk must not end the training
                self._warn(f"cannot write {CSV_NAME}: {error}; trying again after the next epoch")

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if self.history is not None:
            self._log_plotting_errors(draw_progress, FIGURE_NAME)(self.history)


LOGGED = ("measure_to_kappa", "lagrange_multiplier_mean", "lagrange_multiplier_max", "active")
"""Metrics of CPR in nnU-Net's logger, and through it in W&B, as ``cpr_<name>``."""


def _prepare_logger(logger: Any, epochs_done: int) -> None:
    """Add the metrics of CPR to nnU-Net's logger, with NaN for the epochs done before.

    The logger accepts only keys that it has, with one value for every epoch so far.
    """
    values = logger.local_logger.my_fantastic_logging
    for key in LOGGED:
        logged = values.setdefault(f"cpr_{key}", [])
        logged += [float("nan")] * (epochs_done - len(logged))


ADAM_BETAS = (0.9, 0.99)
"""Coefficients of Adam's running averages in the paper's segmentation runs."""


def with_suffixes(family: type[NamedTrainer]) -> Callable[[str], type[NamedTrainer]]:
    """Return the ``__getattr__`` of a module that defines a trainer family.

    Args:
        family: the class named without suffixes.

    Returns:
        A function that takes a name such as ``nnUNetTrainerCPR_ws2000`` and returns a subclass of
        ``family`` of that name with its settings. It raises AttributeError for other names; for a
        misspelt name of a trainer of this package it prints a correction.
    """

    def __getattr__(name: str) -> type[NamedTrainer]:  # noqa: N807
        settings = _parse_name(name)
        if settings is None or settings.family != family.__name__:
            raise AttributeError(name)
        # nnU-Net stores the class name in checkpoints and searches for it again at inference.
        return type(name, (family,), {"settings": settings, "__doc__": family.__doc__})

    return __getattr__


@functools.cache  # so that a misspelt name is reported once, not by the module of each family
def _parse_name(name: str) -> TrainerName | None:
    if not name.lower().startswith("nnunettrainer"):
        return None
    try:
        return parse_trainer_name(name)
    except WrongName as error:
        print(f"nnunet-cpr: {error}", file=sys.stderr)
        return None
