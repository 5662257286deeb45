"""Base class of the trainers in ``trainers/``.

A trainer family is a short subclass in ``trainers/`` that builds the optimizer. Its name and defaults
are listed in ``FAMILIES`` of :mod:`nnunet_cpr.names.trainer_name`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.default_n_proc_DA import get_allowed_n_proc_DA
from torch.optim import Optimizer

from nnunet_cpr import timm_optimizers
from nnunet_cpr._attachment import RegularizationMethod, attached_method
from nnunet_cpr._files import remove_temporary_files
from nnunet_cpr._seeding import seed_all
from nnunet_cpr._validation import positive_integer
from nnunet_cpr.baselines import Baseline
from nnunet_cpr.names.trainer_name import DEFAULT_LR, TrainerName
from nnunet_cpr.nnunet import checkpoints
from nnunet_cpr.nnunet.checkpoint_policy import STARTED, CheckpointPolicy
from nnunet_cpr.nnunet.checkpoints import START_ANEW, UnusableCheckpoint
from nnunet_cpr.nnunet.commands import CPU_THREADS
from nnunet_cpr.nnunet.fold_claim import FoldInUse, claimed
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT
from nnunet_cpr.nnunet.interruption import Interruption
from nnunet_cpr.nnunet.other_optimizer import without_weight_decay
from nnunet_cpr.nnunet.poly_lr import WarmupPolyLRScheduler
from nnunet_cpr.nnunet.settings_check import unmet_settings

KEPT_NAMES = (
    *("settings", "is_family", "is_created", "continues", "checkpoint_policy"),
    *("baseline", "baseline_decay", "cpr", "cpr_settings", "history"),
    *("build_optimizer", "build_timm_optimizer", "apply_settings", "other_trainer"),
)
"""Public names on a trainer that nnU-Net's does not have; another trainer cannot use them."""

ADAM_BETAS = (0.9, 0.99)
"""Coefficients of Adam's running averages in the paper's segmentation runs."""


class _NoLog:
    """nnU-Net's logger for a checkpoint without what was logged."""

    get_checkpoint = dict


class NamedTrainer(nnUNetTrainer):
    """nnU-Net's trainer with the settings of its class name.

    A family either builds its optimizer (:meth:`build_optimizer`) or keeps that of the other trainer in
    its name or among its base classes, with that trainer's learning-rate schedule. The schedule of the
    former is nnU-Net's own, set every epoch; with learning-rate warm-up it is the paper's, set every
    iteration.

    Attributes:
        settings: settings parsed from the class name.
        is_family: True for the class of a family, which others derive from.
        is_created: True if the class was created for a name with suffixes.
        baseline: comparison method attached to the optimizer, None if the name has none.
        checkpoint_policy: what is saved when, and what ``--c`` continues from.
    """

    settings: ClassVar[TrainerName]
    is_family: ClassVar[bool] = False
    is_created: ClassVar[bool] = False
    baseline: Baseline | None = None
    initial_lr: float
    weight_decay: float
    baseline_decay: float
    _given_decays: set[Any] = set()  # noqa: RUF012 (replaced, never changed)
    logger: Any
    _checked: tuple[Any, ...] | None = None

    def __init__(
        self,
        plans: dict,
        configuration: str,
        fold: int,
        dataset_json: dict,
        device: torch.device = torch.device("cuda"),
    ) -> None:
        continues: bool = plans.get("continue_training", False)  # --c; nnU-Net removes the entry
        try:
            # By keyword, since other trainers may have their parameters in another order.
            super().__init__(
                plans=plans,
                configuration=configuration,
                fold=fold,
                dataset_json=dataset_json,
                device=device,
            )
        except AttributeError as error:  # of a property of ours
            self._refuse_names(name for name in KEPT_NAMES if f"'{name}'" in str(error))
            raise
        others = [base for base in type(self).__mro__ if not issubclass(base, NamedTrainer)]
        self._refuse_names(
            name for name in KEPT_NAMES if any(name in vars(holder) for holder in (self, *others))
        )
        self.continues = continues
        if self.initial_lr == DEFAULT_LR:
            self.initial_lr = self.settings.default_lr
        self.apply_settings()
        try:
            threads = os.environ.get(CPU_THREADS)
            if self.device.type == "cpu" and threads:  # for which nnU-Net takes all cores
                number = int(threads) if threads.isdecimal() else threads
                torch.set_num_threads(positive_integer(CPU_THREADS, number))
            self.checkpoint_policy = CheckpointPolicy(self._warn)
        except ValueError as error:
            self._exit(str(error))
        self.my_init_kwargs[STARTED] = self.checkpoint_policy.started
        self._interruption = Interruption(self.checkpoint_policy.end, self._warn)
        self._seed(0)  # the network's initial weights

    def _refuse_names(self, taken: Iterable[str]) -> None:
        """End the training if another trainer uses a name that this package keeps on trainers."""
        for name in taken:
            other = type(self).other_trainer().__name__
            self._exit(
                f"{other}: the attribute {name!r} has another meaning in nnunet-cpr; rename it there"
            )

    def initialize(self) -> None:
        super().initialize()
        self._check_settings(0)

    def apply_settings(self) -> None:
        """Set the hyperparameters that the name gives, which win over those of any base class."""
        settings = self.settings
        named = {
            "initial_lr": settings.lr,
            "weight_decay": settings.weight_decay,
            "num_epochs": settings.epochs,
            "num_iterations_per_epoch": settings.iterations,
        }
        for attribute, value in named.items():
            if value is not None:
                setattr(self, attribute, value)

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer of ``self.network``."""
        raise NotImplementedError(f"{self.settings.family} keeps the optimizer of the other trainer")

    def build_timm_optimizer(self, weight_decay: float) -> Optimizer:
        """Return the optimizer of timm that the name gives."""
        if self.settings.timm is None:  # nnU-Net has found the class of the family itself
            family = self.settings.family
            self._exit(f"{family} names no optimizer of timm; write it first, as {family}_lion")
        parameters = self.network.parameters()
        return timm_optimizers.build(parameters, self.settings.timm, self.initial_lr, weight_decay)

    @property
    def _total_steps(self) -> int:
        """Number of optimizer steps of the training."""
        return self.num_epochs * self.num_iterations_per_epoch

    @property
    def _warmup_steps(self) -> int:
        """Steps of linear learning-rate warm-up."""
        if self.settings.keeps_optimizer:  # the attribute of nnU-Net's trainers with warm-up, in epochs
            return getattr(self, "warmup_duration_whole_net", 0) * self.num_iterations_per_epoch
        return self.settings.warmup_steps

    def configure_optimizers(self, *args: Any, **kwargs: Any) -> tuple[Optimizer, Any]:
        """Return the optimizer, with the regularization of the name attached, and its schedule.

        Trainers with stages pass the stage; a second call continues the regularization.
        """
        settings = self.settings
        if not hasattr(self, "baseline_decay"):
            self.apply_settings()  # once more, after those of a user's class
            self.baseline_decay = decay = self.weight_decay
            if not settings.keeps_optimizer and (settings.defaults.cpr or settings.baseline):
                self.weight_decay = 0.0  # replaced by the regularization
            self.baseline = settings.build_baseline(self.network, decay, self._total_steps)
        if settings.keeps_optimizer:
            optimizer, schedule = self._configure_other_optimizer(*args, **kwargs)
        else:
            optimizer = self.build_optimizer()
            self._given_decays = {group.get("weight_decay", 0) for group in optimizer.param_groups}
            for group in optimizer.param_groups if settings.momentum is not None else []:
                group["momentum"] = settings.momentum
            schedule = self._build_schedule(optimizer)
        self._attach_regularization(optimizer)
        self._configured = optimizer
        return optimizer, schedule

    def _configure_other_optimizer(self, *args: Any, **kwargs: Any) -> tuple[Optimizer, Any]:
        """Call the other trainer's method, without weight decay of the regularized parameters."""
        method, other = self._regularization, self.other_trainer().__name__
        with without_weight_decay([] if method is None else method.parameters) as given:
            configured = super().configure_optimizers(*args, **kwargs)
        optimizer, schedule = configured if isinstance(configured, tuple | list) else (configured, None)
        if not isinstance(optimizer, Optimizer) or schedule is None:
            self._exit(
                f"{type(self).__name__}: expected one optimizer and one schedule from {other}, got "
                f"{type(optimizer).__name__} and {type(schedule).__name__}; it cannot be combined"
            )
        if len(given) > 1 and any(group["is_split"] for group in given):
            self._warn(
                f"parameter groups of {other} are split for the regularization; a learning rate that it "
                "sets by the number of a group reaches another"
            )
        if given:  # not a later stage with the same optimizer
            self._given_decays = {group["weight_decay"] for group in given}
        return optimizer, schedule

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
        if self._warmup_steps == 0:
            return PolyLRScheduler(optimizer, self.initial_lr, self.num_epochs)
        if self._warmup_steps >= self._total_steps:
            self._exit(
                f"{type(self).__name__}: expected a learning-rate warm-up shorter than the training of "
                f"{self._total_steps} steps, got {self._warmup_steps} steps; choose _warmup<N>"
            )
        return WarmupPolyLRScheduler(
            optimizer,
            self.initial_lr,
            self._warmup_steps,
            self.num_epochs,
            self.num_iterations_per_epoch,
        )

    @classmethod
    def other_trainer(cls) -> type[nnUNetTrainer]:
        """Return the first base class that is not from this package, ``nnUNetTrainer`` or another."""
        others = (base for base in cls.__mro__ if not issubclass(base, NamedTrainer))
        return next(base for base in others if issubclass(base, nnUNetTrainer))

    def on_train_start(self) -> None:
        super().on_train_start()
        folder = Path(self.output_folder)
        if self.local_rank == 0:
            remove_temporary_files(folder, "cpr_*", "checkpoint_*")
        if isinstance(schedule := self.lr_scheduler, WarmupPolyLRScheduler):
            self.optimizer.register_step_pre_hook(lambda *_: schedule.step_iteration())
        self.print_to_log_file(
            f"Training as {self.other_trainer().__name__} with {type(self.optimizer).__name__} and "
            f"{type(self.lr_scheduler).__name__}"
        )
        if self.baseline is not None:
            self.print_to_log_file(f"Regularizing with {self.baseline!r}")
        if self.settings.seed is not None and self.device.type == "cuda":
            self._warn(
                f"_seed{self.settings.seed} does not make this training reproducible: on a GPU each run "
                "rounds sums differently; repeat it with several seeds"
            )
        elif self.settings.seed is not None and get_allowed_n_proc_DA() != 0:
            self._warn(
                f"_seed{self.settings.seed} does not make this training reproducible, because processes "
                "load the data; set nnUNet_n_proc_DA=0 if it should be"
            )
        self.checkpoint_policy.begin(folder)
        self._check_settings(0 if self.current_epoch == 0 else None)

    def on_epoch_start(self) -> None:
        # Before anything of the epoch, so that a training that is continued here does the same.
        if self.local_rank == 0 and self._saves_as_nnunet:
            self._keep_start_of_epoch()
        self._seed(1 + self.current_epoch)
        super().on_epoch_start()

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self._check_settings(self.current_epoch)

    def _check_settings(self, first_epoch: int | None) -> None:
        """End the training if a setting of its name is not in force, where something has changed."""
        used = self.optimizer, self.lr_scheduler, self.num_epochs, self.num_iterations_per_epoch
        if all(own is before for own, before in zip(used, self._checked or (None,))):
            return
        self._checked = used
        for problem in unmet_settings(
            self, self._configured, self._regularization is not None, self._given_decays, first_epoch
        ):
            self._exit(f"{type(self).__name__}: {problem}")

    @property
    def _saves_as_nnunet(self) -> bool:
        """True if nnU-Net's own method saves; those of other trainers may write several files."""
        is_own = type(self).save_checkpoint is NamedTrainer.save_checkpoint
        is_nnunets = self.other_trainer().save_checkpoint is nnUNetTrainer.save_checkpoint
        return is_own and is_nnunets and not self.disable_checkpointing

    def _keep_start_of_epoch(self) -> None:
        logger, self.logger = self.logger, _NoLog()  # thousands of numbers, which are slow to pickle
        self.current_epoch -= 1  # nnU-Net stores the next epoch; its on_train_end does the same
        try:
            with self._interruption.deferred(), self._exit_if_not_written():
                self.checkpoint_policy.start_epoch(
                    super().save_checkpoint, self.current_epoch + 1, logger.get_checkpoint()
                )
        finally:
            self.logger = logger
            self.current_epoch += 1

    @contextmanager
    def _exit_if_not_written(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch's writer does not say what failed
            self._exit(
                f"cannot write a checkpoint in {self.output_folder}, is the disk full? "
                f"Continue with --c ({checkpoints.one_line(error)})"
            )

    def run_training(self) -> None:
        claim = claimed(Path(self.output_folder)) if self.local_rank == 0 else nullcontext()
        try:
            with self._interruption.watched(), claim:
                super().run_training()
        except FoldInUse as error:
            self._exit(str(error))

    def save_checkpoint(self, filename: str) -> None:
        if self.local_rank != 0 or not self._saves_as_nnunet:
            super().save_checkpoint(filename)
            return
        with self._interruption.deferred(), self._exit_if_not_written():
            self.checkpoint_policy.save(Path(filename), super().save_checkpoint, self.current_epoch + 1)

    def load_checkpoint(
        self, filename_or_checkpoint: str | dict[str, Any] | None = None, **renamed: Any
    ) -> None:
        # The main branch of nnU-Net gives the argument another name, or the content in its place.
        given = next(iter(renamed.values()), filename_or_checkpoint)
        if not self.was_initialized:
            self.initialize()
        path = Path(given) if isinstance(given, str) else Path(self.output_folder) / FINAL_CHECKPOINT
        try:
            if self.continues:
                path, checkpoint = self.checkpoint_policy.continue_from(path)
                given = str(path)
            else:
                checkpoint = given if isinstance(given, dict) else checkpoints.read(path)
            self._check_written_by(path, checkpoint)
            with checkpoints.restricted_loading():
                super().load_checkpoint(given)
        except UnusableCheckpoint as error:
            self._exit(str(error))
        except Exception as error:  # of another network, or crafted
            self.print_to_log_file(traceback.format_exc(), also_print_to_console=False)
            reason = checkpoints.one_line(error)
            self._exit(f"{path} does not match this training: {reason}; {START_ANEW}")
        self.my_init_kwargs[STARTED] = self.checkpoint_policy.started  # nnU-Net takes those of the file
        written_by = checkpoint["trainer_name"]
        if written_by != type(self).__name__:
            self._warn(f"continuing {path}, which was written by {written_by}")

    def _check_written_by(self, path: Path, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint is of this fold, configuration and optimizer.

        Raises:
            UnusableCheckpoint: it is not.
        """
        own, saved = self.my_init_kwargs, checkpoint["init_args"]
        differences = [
            f"{key}: expected {own.get(key)}, got {saved.get(key)}"
            for key in ("configuration", "fold")
            if own.get(key) != saved.get(key)
        ]
        differences += checkpoints.optimizer_differences(
            checkpoint["optimizer_state"], self.optimizer, not self.settings.keeps_optimizer
        )
        for difference in differences:
            raise UnusableCheckpoint(
                path,
                f"was written by {checkpoint['trainer_name']}, expected {type(self).__name__}: "
                f"{difference}; {START_ANEW}",
            )

    def _warn(self, message: str) -> None:
        """Write a message of rank 0 to the log and in one line to stderr."""
        if self.local_rank == 0:
            self.print_to_log_file(f"WARNING! {message}", also_print_to_console=False)
            print(f"nnunet-cpr: {message}", file=sys.stderr)

    def _exit(self, message: str) -> NoReturn:
        self._warn(message)
        if self.local_rank != 0:  # the others may go on, and would wait for this one
            print(f"nnunet-cpr: rank {self.local_rank}: {message}", file=sys.stderr)
        raise SystemExit(1)

    def _seed(self, stream: int) -> None:
        if self.settings.seed is None:
            return
        seed_all(self.settings.seed, self.local_rank, stream)
