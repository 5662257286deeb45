"""nnU-Net's trainer that knows all that its name trains, with the lengths of the trainer itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.names.training import BaseValues, Training, default_lr, resolve
from nnunet_cpr.nnunet.resuming_trainer import ResumingTrainer
from nnunet_cpr.nnunet.schedules import IterationLRScheduler

FOLLOWED = "nnunet_cpr_defaults"
"""Entry of a checkpoint's ``init_args``: the number of steps that its default warm-up and bound follow.
A training that version 0.3.0 has extended keeps that with which it began. Version 0.2.0, whose defaults
ignored the length, did not write it."""


class ResolvedTrainer(ResumingTrainer):
    """nnU-Net's trainer that knows all that its name trains.

    It is resolved when the optimizer is configured, and compared when lengths have changed since: base
    trainers, and classes derived from ours, set them in ``__init__``, ``initialize``,
    ``configure_optimizers`` or ``on_train_start``. A length on which nothing depends that was built may
    still change; otherwise the training ends.

    Attributes:
        settings: settings parsed from the class name.
    """

    settings: ClassVar[TrainerName]
    initial_lr: float
    weight_decay: float
    __base: BaseValues | None = None
    __training: Training | None = None
    __followed: float | None = None
    __has_started = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.initial_lr == 1e-2:  # nnU-Net's
            self.initial_lr = default_lr(self.settings)
        self.apply_settings()

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

    @property
    def training(self) -> Training:
        """All that the name trains, with the lengths of this trainer."""
        if self.__base is None:
            self.apply_settings()  # once more, after those of a user's class
            self.__base = BaseValues(
                lr=self.initial_lr, weight_decay=self.weight_decay, **self.__lengths()
            )
        if self.__training is None:
            self.__training = self.training_that_began_with(self.__followed)
            self.__record_followed()
        return self.__training

    def __lengths(self) -> dict[str, int]:
        # Of nnU-Net's trainers with a warm-up, in epochs.
        epochs = getattr(self, "warmup_duration_whole_net", None) or 0
        warmup = epochs * self.num_iterations_per_epoch
        return {
            "epochs": self.num_epochs,
            "iterations": self.num_iterations_per_epoch,
            "warmup": warmup,
        }

    def training_that_began_with(
        self, followed: float | None, name: TrainerName | None = None
    ) -> Training:
        """Return the training, if its defaults follow another number of steps than its own.

        Args:
            followed: as of :func:`~nnunet_cpr.names.training.resolve`.
            name: settings of another name with the base values of this trainer; None for its own.
        """
        assert self.__base is not None
        base = dataclasses.replace(self.__base, **self.__lengths())
        try:
            return resolve(name or self.settings, base, followed)
        except WrongName as error:  # by the lengths of the base trainer
            self._exit(f"{type(self).__name__}: {error}")

    def __record_followed(self) -> None:
        assert self.__training is not None
        followed = self.__training.steps if self.__followed is None else self.__followed
        if math.isinf(followed):
            self.my_init_kwargs.pop(FOLLOWED, None)
        else:
            self.my_init_kwargs[FOLLOWED] = followed

    def _resolve_again(self) -> None:
        """Resolve the training once more, before an optimizer is built for it."""
        if self.__base is not None:
            # The weight decay is 0 where the regularization has taken its place.
            decay = self.weight_decay or self.__base.weight_decay
            self.__base = dataclasses.replace(self.__base, lr=self.initial_lr, weight_decay=decay)
            self.__training = None

    @property
    def _may_change(self) -> set[str]:
        """Fields that may change after the optimizer was built, as nothing in it depends on them."""
        is_kept = self.settings.schedule is None and self.settings.defaults.keeps_optimizer
        by_iteration = isinstance(self.lr_scheduler, IterationLRScheduler)
        fields = {"epochs": True, "horizon": is_kept, "iterations": not by_iteration}
        return {field for field, may_change in fields.items() if may_change}

    def _follow_lengths(self) -> None:
        """Resolve the training again if the trainer's lengths have changed since it was.

        It ends if this would change what is built by then.
        """
        before, now = self.training, self.training_that_began_with(self.__followed)
        if not self._may_change.issuperset(now.differences(before)):
            self._exit(
                f"{type(self).__name__}: its optimizer was built for {before.epochs} epochs of "
                f"{before.iterations} iterations, and now it has {now.epochs} of {now.iterations}; set "
                "them before the optimizer is built, or write them into the name"
            )
        self.__training = now
        self.__record_followed()

    def on_train_start(self) -> None:
        super().on_train_start()
        self.__has_started = True

    def _continue_as_begun(self, arguments: dict[str, Any]) -> None:
        super()._continue_as_begun(arguments)
        if self.__has_started:  # with what the training has
            return
        before = self.training
        self.__followed = arguments.get(FOLLOWED, math.inf)
        self.__training = None
        if self.training != before:
            self.configure_anew()

    def configure_anew(self) -> None:
        """Build the optimizer, its schedule and the regularization once more."""
        self.optimizer, self.lr_scheduler = self.configure_optimizers()
