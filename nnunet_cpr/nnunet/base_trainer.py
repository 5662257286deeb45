"""Base classes of the trainers in ``trainers/``.

A trainer family is a subclass of a few lines that builds the optimizer. nnU-Net's search for a name with
suffixes, such as ``nnUNetTrainerCPR_ws2000``, finds a subclass of the family through
:func:`with_suffixes`.
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
    """nnU-Net's trainer with the optimizer and the settings that its name says.

    Without a warm-up the learning rate is nnU-Net's own, set every epoch; with one it is the paper's,
    set every iteration.
    """

    settings: ClassVar[TrainerName]

    def __init__(
        self,
        plans: dict,
        configuration: str,
        fold: int,
        dataset_json: dict,
        device: torch.device = torch.device("cuda"),
    ) -> None:
        self.continues: bool = plans.get("continue_training", False)  # --c; nnU-Net takes it out
        super().__init__(plans, configuration, fold, dataset_json, device)
        settings = self.settings
        self.initial_lr = settings.lr or settings.defaults.lr
        if settings.weight_decay is not None:
            self.weight_decay = settings.weight_decay
        self.baseline_decay = self.weight_decay
        if settings.defaults.cpr or settings.baseline is not None:
            self.weight_decay = 0.0  # what nnU-Net gives its optimizer
        if settings.epochs is not None:
            self.num_epochs = settings.epochs
        if settings.iterations is not None:
            self.num_iterations_per_epoch = settings.iterations
        self.warmup_steps = settings.warmup_steps

    @abstractmethod
    def build_optimizer(self) -> Optimizer:
        """The optimizer over ``self.network``."""

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
        self.logger.plot_progress_png = self._if_it_can(self.logger.plot_progress_png, "progress.png")
        if self.baseline is not None:
            self.print_to_log_file(f"Regularizing with {self.baseline!r}")

    def on_train_epoch_start(self) -> None:
        # From the epoch's number, so that a resumed training draws what an uninterrupted one does.
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
                # Goes to torch.save, which says what failed when it has a file and not a name.
                super().save_checkpoint(file)
        except (OSError, RuntimeError) as error:
            failed = error if isinstance(error, OSError) else error.__context__
            if not isinstance(failed, OSError):
                raise
            self._stop(f"cannot write {filename}: {failed.strerror}; mend that and continue with --c")

    def load_checkpoint(self, filename_or_checkpoint: dict | str) -> None:
        if not isinstance(filename_or_checkpoint, str):
            super().load_checkpoint(filename_or_checkpoint)
            return
        if not self.was_initialized:
            self.initialize()
        path = Path(filename_or_checkpoint)
        older = checkpoints.older_than(path) if self.continues else []
        try:
            path, checkpoint = checkpoints.read_first_whole([path, *older], self._say)
            checkpoints.check_fits(path, checkpoint, self)
            writer = checkpoint["trainer_name"]
            del checkpoint
            with checkpoints.restricted_loading():
                super().load_checkpoint(str(path))
            if writer != type(self).__name__:
                self._say(f"{path} is {writer}'s, and is continued here")
        except DamagedCheckpoint as error:
            self._stop(f"{error}; move it away and continue with --c")
        except UnusableCheckpoint as error:
            self._stop(str(error))
        except ValueError as error:  # the optimizer's, or CPR's
            self._stop(f"{path} does not fit: {error}; {checkpoints.BEGIN_ANEW}")
        except Exception as error:  # whatever a made-up file may say
            self.print_to_log_file(traceback.format_exc(), also_print_to_console=False)
            self._stop(f"{path} cannot be loaded ({type(error).__name__}, see {self.log_file})")

    def _if_it_can(self, draw: Callable[..., None], picture: str) -> Callable[..., None]:
        """``draw``, whose failure costs the picture and not the training; it is told."""

        def told(*args: Any) -> None:
            try:
                draw(*args)
            except Exception as error:
                self._say(f"could not draw {picture}: {type(error).__name__}: {error}")

        return told

    def _say(self, sentence: str) -> None:
        """To the log and in one line on stderr."""
        if self.local_rank == 0:
            self.print_to_log_file(f"WARNING! {sentence}", also_print_to_console=False)
            print(f"nnunet-cpr: {sentence}", file=sys.stderr)

    def _stop(self, sentence: str) -> NoReturn:
        self._say(sentence)
        raise SystemExit(1)

    def _seed(self, stream: int) -> None:
        if self.settings.seed is None:
            return
        seed_all(self.settings.seed, self.local_rank, stream)


class CPRTrainer(NamedTrainer):
    """What the trainers with CPR add: the regularizer's settings and the record of its work."""

    optimizer: SGDCPR | AdamCPR
    history: History | None = None  # on the first rank, from on_train_start on

    @property
    def cpr(self) -> CPR:
        return self.optimizer.cpr

    def on_train_start(self) -> None:
        super().on_train_start()
        _prepare_logger(self.logger, self.current_epoch)
        if self.local_rank == 0:
            try:
                self.history = History.resume(self.output_folder, self.current_epoch, self.cpr.names)
            except OSError as error:
                self._stop(f"cannot continue {error.filename}: {error.strerror}")
            if self.history.backup is not None:
                self._say(
                    f"{CSV_NAME} could not be continued completely ({self.history.backup_reason}); "
                    f"the previous file is {self.history.backup.name}"
                )
        self.print_to_log_file(f"Regularizing with {self.cpr!r}")
        self.print_to_log_file("Regularized:", ", ".join(self.cpr.names))
        steps = self.num_epochs * self.num_iterations_per_epoch
        if self.cpr.bound.earliest >= steps:
            self.print_to_log_file(
                f"WARNING! No bound is set before step {self.cpr.bound.earliest} and this training has "
                f"{steps} steps: nothing will be regularized. Name a trainer with a smaller "
                f"_{self.cpr.bound.keyword}<N>."
            )

    def on_train_epoch_end(self, train_outputs: list[dict]) -> None:
        super().on_train_epoch_end(train_outputs)
        metrics = self.cpr.metrics()
        for key in LOGGED:
            self.logger.log(f"cpr_{key}", metrics[key], self.current_epoch)
        self.print_to_log_file(
            "CPR: step {step}, measure/bound {measure_to_kappa:.4f}, multiplier mean "
            "{lagrange_multiplier_mean:.3g} max {lagrange_multiplier_max:.3g}, bounds set "
            "{bounded:.0%}, multipliers above 0 {active:.0%}, updates left out {skipped_updates:.0f}, "
            "corrections at their limit {limited_corrections:.0f}".format(
                step=self.cpr.step_count, **metrics
            )
        )
        if self.history is not None:
            try:
                self.history.append(self.current_epoch, self.cpr)
            except OSError as error:  # a full disk costs the record, not the training
                self._say(f"could not write {CSV_NAME}: {error}; its rows are kept for the next epoch")

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if self.history is not None:
            self._if_it_can(draw_progress, FIGURE_NAME)(self.history)


LOGGED = ("measure_to_kappa", "lagrange_multiplier_mean", "lagrange_multiplier_max", "active")
"""The epoch means that go into nnU-Net's logger, and from it to W&B, as ``cpr_<name>``."""


def _prepare_logger(logger: Any, epochs_done: int) -> None:
    """nnU-Net's logger takes only keys it has, with one value for every epoch so far."""
    values = logger.local_logger.my_fantastic_logging
    for key in LOGGED:
        logged = values.setdefault(f"cpr_{key}", [])
        logged += [float("nan")] * (epochs_done - len(logged))


ADAM_BETAS = (0.9, 0.99)
"""Betas of Adam in the paper's segmentation runs."""


def with_suffixes(family: type[NamedTrainer]) -> Callable[[str], type[NamedTrainer]]:
    """Return the ``__getattr__`` of a module that defines a trainer family.

    Args:
        family: the class named without suffixes.

    Returns:
        A function that takes a name such as ``nnUNetTrainerCPR_ws2000`` and returns a subclass of
        ``family`` of that name with its settings. It raises AttributeError for the names of other
        trainers, and prints what is wrong with a name that is almost one of ours.
    """

    def __getattr__(name: str) -> type[NamedTrainer]:  # noqa: N807
        settings = _settings_in(name)
        if settings is None or settings.family != family.__name__:
            raise AttributeError(name)
        # nnU-Net stores the class's name in checkpoints and looks it up again as it was typed.
        return type(name, (family,), {"settings": settings, "__doc__": family.__doc__})

    return __getattr__


@functools.cache  # so that a wrong name is reported once, not by each family's module
def _settings_in(name: str) -> TrainerName | None:
    if not name.lower().startswith("nnunettrainer"):
        return None
    try:
        return parse_trainer_name(name)
    except WrongName as error:
        print(f"nnunet-cpr: {error}", file=sys.stderr)
        return None
