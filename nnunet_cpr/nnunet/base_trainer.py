"""Base class of the trainers in ``trainers/``.

A trainer family is a short subclass in ``trainers/`` that builds the optimizer. Its name and defaults
are listed in ``FAMILIES`` of :mod:`nnunet_cpr.names.families`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.utilities.default_n_proc_DA import get_allowed_n_proc_DA
from torch.optim import Optimizer

from nnunet_cpr.baselines import Baseline, DecoupledDecay
from nnunet_cpr.cpr.attachment import attached_method, is_within_step
from nnunet_cpr.cpr.method import RegularizationMethod
from nnunet_cpr.environment import seed_all
from nnunet_cpr.integrations import from_timm
from nnunet_cpr.names.suffixes import Cooldown
from nnunet_cpr.names.training import Training, differences_from_longer, titles
from nnunet_cpr.nnunet import checkpoints, schedules
from nnunet_cpr.nnunet.commands import CPU_THREADS
from nnunet_cpr.nnunet.other_optimizer import without_weight_decay
from nnunet_cpr.nnunet.recorded_trainer import RecordedTrainer
from nnunet_cpr.nnunet.settings_in_force import Trained, in_force, unmet_settings, unseen_settings
from nnunet_cpr.refusals import positive_integer

ADAM_BETAS = (0.9, 0.99)
"""Coefficients of Adam's running averages in the paper's segmentation runs."""


def _skips_overflows(optimizer: Any) -> bool:
    """Return True if ``GradScaler`` calls the step of an optimizer after an overflow, too."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def describe_frozen(network: torch.nn.Module) -> str:
    """Return how many parameters of a network are trained."""
    total = sum(p.numel() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return f"{trained:,} of {total:,} parameters; the others keep their weights"


class NamedTrainer(RecordedTrainer):
    """nnU-Net's trainer with the settings of its class name.

    A family either builds its optimizer (:meth:`build_optimizer`) or keeps that of the other trainer in
    its name or among its base classes, with that trainer's learning-rate schedule. The schedule of the
    former is nnU-Net's own, set every epoch; with learning-rate warm-up it is the paper's, set every
    iteration. A schedule in the name replaces both.

    Attributes:
        is_family: True for the class of a family, which others derive from.
        is_created: True if the class was created for a name with suffixes.
    """

    is_family: ClassVar[bool] = False
    is_created: ClassVar[bool] = False
    __baseline: Baseline | None = None
    __given_decays: set[Any] = set()  # noqa: RUF012 (replaced, never changed)
    __configured: Optimizer | None = None
    __checked: tuple[Any, ...] = (None,)
    __counter: Any = None  # handle of the hook that counts the steps of the first epoch
    __steps: int | None = None  # before it
    __scale = 1.0  # of GradScaler when the count began

    def __init__(
        self,
        plans: dict,
        configuration: str,
        fold: int,
        dataset_json: dict,
        device: torch.device = torch.device("cuda"),
    ) -> None:
        super().__init__(
            plans=plans, configuration=configuration, fold=fold, dataset_json=dataset_json, device=device
        )
        threads = os.environ.get(CPU_THREADS)
        if self.device.type == "cpu" and threads:  # for which nnU-Net takes all cores
            try:
                number = int(threads) if threads.isdecimal() else threads
                torch.set_num_threads(positive_integer(CPU_THREADS, number))
            except ValueError as error:
                self._exit(str(error))
        self._seed(0)  # the network's initial weights

    @property
    def baseline(self) -> Baseline | None:
        """Comparison method attached to the optimizer, None if the name has none."""
        return self.__baseline

    def initialize(self) -> None:
        super().initialize()
        self._check_settings()

    @property
    def is_step_fused(self) -> bool | None:
        """Argument ``fused`` of optimizers: True in mixed precision, else None, which leaves it to them.

        The step then skips overflows itself. Otherwise ``GradScaler`` waits for the backward pass before
        each step, and the GPU waits for the host, which only then prepares the step.
        """
        return True if self.grad_scaler is not None else None

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer of ``self.network``."""
        raise NotImplementedError(f"{self.settings.family} keeps the optimizer of the other trainer")

    def build_timm_optimizer(self, weight_decay: float) -> Optimizer:
        """Return the optimizer of timm that the name gives."""
        name = self.settings.timm
        if name is None:  # nnU-Net has found the class of the family itself
            family = self.settings.family
            self._exit(f"{family} names no optimizer of timm; write it first, as {family}_lion")
        return from_timm.build(
            self.network.parameters(), name, self.initial_lr, weight_decay, fused=self.is_step_fused
        )

    def configure_optimizers(self, *args: Any, **kwargs: Any) -> tuple[Optimizer, Any]:
        """Return the optimizer, with the regularization of the name attached, and its schedule.

        Trainers with stages pass the stage; a second call continues the regularization.
        """
        self._resolve_again()
        settings, training = self.settings, self.training
        self._freeze()
        if self.__baseline is None:
            self.__baseline = training.build_baseline(self.network)
        if settings.defaults.keeps_optimizer:
            optimizer, schedule = self._configure_other_optimizer(*args, **kwargs)
        else:
            if settings.defaults.cpr or self.__baseline is not None:
                self.weight_decay = 0.0  # replaced by the regularization
            optimizer = self.build_optimizer()
            self.__given_decays = {group.get("weight_decay", 0) for group in optimizer.param_groups}
            if isinstance(additional := attached_method(optimizer), DecoupledDecay):  # AMOS's
                self.__given_decays.add(additional.weight_decay)
            for group in optimizer.param_groups if settings.momentum is not None else []:
                group |= {"momentum": settings.momentum} if "momentum" in group else {}
            schedule = self._build_schedule(optimizer, self.initial_lr)
        self._attach_regularization(optimizer)
        if optimizer is not self.__configured:  # not a later stage with the same one
            self.average_after_steps(optimizer)
        self.__configured = optimizer
        return optimizer, schedule

    def _freeze(self) -> None:
        """Exclude the part of the network that the name gives from the training."""
        part = self.settings.freeze
        if part is None:
            return
        network = self.unwrapped_network
        if not isinstance(frozen := getattr(network, part, None), torch.nn.Module):
            parts = ", ".join(name for name, _ in network.named_children())
            self._exit(
                f"{type(self).__name__}: expected a network with a part {part!r}, got "
                f"{type(network).__name__} with {parts or 'none'}; leave _freeze{part} out"
            )
        frozen.requires_grad_(False)

    def _configure_other_optimizer(self, *args: Any, **kwargs: Any) -> tuple[Optimizer, Any]:
        """Call the other trainer's method, without weight decay of the regularized parameters."""
        method, other = self._regularization, self.other_trainer().__name__
        with without_weight_decay([] if method is None else method.parameters) as given:
            configured = super().configure_optimizers(*args, **kwargs)
        self._resolve_again()  # it may set lengths, too
        optimizer, schedule = configured if isinstance(configured, tuple | list) else (configured, None)
        if not isinstance(optimizer, Optimizer) or schedule is None:
            self._exit(
                f"{type(self).__name__}: expected one optimizer and one schedule from {other}, got "
                f"{type(optimizer).__name__} and {type(schedule).__name__}; it cannot be combined"
            )
        if self.settings.schedule is not None:
            if type(schedule) is not PolyLRScheduler:
                self._exit(
                    f"{type(self).__name__}: expected nnU-Net's own schedule of {other}, which "
                    f"_{self.settings.tokens()['schedule']} replaces, got {type(schedule).__name__}; "
                    "leave the suffix out"
                )
            schedule = self._build_schedule(optimizer, schedule.initial_lr)
        if len(given) > 1 and any(group["is_split"] for group in given):
            self._warn(
                f"parameter groups of {other} are split for the regularization; a learning rate that it "
                "sets by the number of a group reaches another"
            )
        if given:  # not a later stage with the same optimizer
            self.__given_decays = {group["weight_decay"] for group in given}
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

    def _build_schedule(self, optimizer: Optimizer, lr: float) -> Any:
        training = self.training
        length = training.warmup, training.epochs, training.iterations
        if isinstance(training.schedule, Cooldown):
            return schedules.CooldownLRScheduler(optimizer, lr, *length, training.schedule.percent)
        if training.schedule == "poly" and training.warmup:
            return schedules.WarmupPolyLRScheduler(optimizer, lr, *length)
        if training.schedule == "poly":
            return PolyLRScheduler(optimizer, lr, training.epochs)
        return schedules.ConstantLRScheduler(optimizer, lr, *length)

    def on_train_start(self) -> None:
        super().on_train_start()
        if isinstance(schedule := self.lr_scheduler, schedules.IterationLRScheduler):
            self.optimizer.register_step_pre_hook(lambda *_: schedule.step_iteration())
        self.print_to_log_file(
            f"Training as {self.other_trainer().__name__} with {type(self.optimizer).__name__} and "
            f"{type(self.lr_scheduler).__name__}"
        )
        if self.settings.freeze is not None:
            self.print_to_log_file(f"Training {describe_frozen(self.network)}")
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
        self._check_settings(is_continued=self.current_epoch > 0)
        lines = (f"{title}: {text}" for title, text in self.training_in_force.rows())
        self.print_to_log_file("\n  ".join([f"{type(self).__name__} trains", *lines]))
        if self.__configured is not None:
            self.__counter = self.__configured.register_step_pre_hook(self.__count_step)

    def __count_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.__steps is not None and not is_within_step(optimizer):
            self.__steps += 1

    def __begin_counting_steps(self) -> None:
        self.__steps = 0
        if self.grad_scaler is not None:
            self.__scale = self.grad_scaler.get_scale()

    def __check_steps(self) -> None:
        """End the training if steps of its first epoch are not its iterations, and something needs that.

        A trainer may accumulate gradients over several iterations, and lengths in names are in steps.
        """
        if self.__counter is None or not self.__steps:  # a whole epoch may have none
            return
        self.__counter.remove()
        self.__counter, steps, iterations = None, self.__steps, self.num_iterations_per_epoch
        if self.grad_scaler is not None and not _skips_overflows(self.__configured):
            shrinking = math.log(max(self.__scale / self.grad_scaler.get_scale(), 1))
            steps += round(shrinking / -math.log(self.grad_scaler.get_backoff_factor()))
        changing = {*differences_from_longer(self.settings, self.training)} - {"horizon", "warmup"}
        if isinstance(self.lr_scheduler, schedules.IterationLRScheduler):
            changing.add("lr")
        parts = titles(changing)
        # The count of skipped steps is an estimate; accumulation leaves out half of them or more.
        if parts and abs(iterations - steps) > iterations / 3:
            self._exit(
                f"{type(self).__name__}: expected an optimizer step in each iteration, from the number "
                f"of which its {' and '.join(parts)} is computed, got {steps} in {iterations}; give a "
                "bound in optimizer steps, as _ws<N>, and leave out what follows the length"
            )

    def on_epoch_start(self) -> None:
        self._seed(1 + self.current_epoch)
        super().on_epoch_start()

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.__steps is None:  # in the first epoch, whatever was changed in place
            self.__checked = (None,)
        self._check_settings(is_continued=self.__steps is None and self.current_epoch > 0)
        if self.__steps is None:
            self.__begin_counting_steps()
        else:
            self.__check_steps()

    def on_train_epoch_end(self, train_outputs: list[dict]) -> None:
        super().on_train_epoch_end(train_outputs)
        self.__check_steps()

    @property
    def __trained(self) -> Trained:
        return Trained(self, self.__configured, self.__given_decays)

    @property
    def training_in_force(self) -> Training:
        """All that trains, with what the optimizer and the schedule have where the name says nothing."""
        return in_force(self.__trained)

    def _check_settings(self, is_continued: bool = False) -> None:
        """End the training if a setting of its name is not in force, where something has changed."""
        used = self.optimizer, self.lr_scheduler, self.num_epochs, self.num_iterations_per_epoch
        if all(own is before for own, before in zip(used, self.__checked)):
            return
        self.__checked = used
        for problem in unmet_settings(self.__trained, is_continued):
            self._exit(f"{type(self).__name__}: {problem}")
        self._follow_lengths()
        if unseen := " ".join(unseen_settings(self.__trained)):
            self._warn(f"cannot see if {unseen} is in force in {self.other_trainer().__name__}")

    def _differences(self, checkpoint: dict[str, Any]) -> Iterator[str]:
        yield from super()._differences(checkpoint)
        yield from checkpoints.optimizer_differences(
            checkpoint["optimizer_state"], self.optimizer, not self.settings.defaults.keeps_optimizer
        )
        yield from self._record_differences(checkpoint)

    def _seed(self, stream: int) -> None:
        if self.settings.seed is None:
            return
        seed_all(self.settings.seed, self.local_rank, stream)
