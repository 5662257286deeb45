"""All that a trainer's name trains, with the lengths of the trainer, and if it is in force."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.names.training import (
    BaseValues,
    Training,
    default_lr,
    differences_from_longer,
    resolve,
    titles,
)
from nnunet_cpr.nnunet.parts.in_force import Trained, in_force, unmet_settings, unseen_settings
from nnunet_cpr.nnunet.parts.part import Part
from nnunet_cpr.nnunet.parts.schedule import IterationLRScheduler
from nnunet_cpr.refusals import Refusal, counted

FOLLOWED = "nnunet_cpr_defaults"
"""Entry of a checkpoint's ``init_args``: the number of steps that its default warm-up and bound follow.
A training that version 0.3.0 has extended keeps that with which it began. Version 0.2.0, whose defaults
ignored the length, did not write it."""

_NNUNET_LR = FAMILIES["nnUNetTrainerSGD"].lr


class Settings(Part):
    """All that the name trains.

    It is resolved when the optimizer is configured, and compared when lengths have changed since: base
    trainers, and classes derived from ours, set them in ``__init__``, ``initialize``,
    ``configure_optimizers`` or ``on_train_start``. A length on which nothing depends that was built may
    still change; otherwise the training ends, as where a setting of the name is not in force.
    """

    _base: BaseValues | None = None
    _training: Training | None = None
    _followed: float | None = None
    _is_first_iteration = True  # of this process
    _checked: tuple[Any, ...] = (None,)
    _checks_steps = True

    def begin(self) -> None:
        if self.trainer.initial_lr == _NNUNET_LR:
            self.trainer.initial_lr = default_lr(self.trainer.settings)
        self._apply()

    def _apply(self) -> None:
        """Set the hyperparameters that the name gives, which win over those of any base class."""
        settings = self.trainer.settings
        named = {
            "initial_lr": settings.lr,
            "weight_decay": settings.weight_decay,
            "num_epochs": settings.epochs,
            "num_iterations_per_epoch": settings.iterations,
        }
        for attribute, value in named.items():
            if value is not None:
                setattr(self.trainer, attribute, value)

    @property
    def training(self) -> Training:
        """All that the name trains, with the lengths of the trainer."""
        if self._base is None:
            self._apply()  # once more, after those of a user's class
            lr, weight_decay = self.trainer.initial_lr, self.trainer.weight_decay
            self._base = BaseValues(lr=lr, weight_decay=weight_decay, **self._lengths())
        if self._training is None:
            self._training = self.training_that_began_with(self._followed)
            self._keep_followed()
        return self._training

    def _lengths(self) -> dict[str, int]:
        trainer = self.trainer
        # Of nnU-Net's trainers with a warm-up, in epochs.
        epochs = getattr(trainer, "warmup_duration_whole_net", None) or 0
        return {
            "epochs": trainer.num_epochs,
            "iterations": trainer.num_iterations_per_epoch,
            "warmup": epochs * trainer.num_iterations_per_epoch,
        }

    def training_that_began_with(
        self, followed: float | None, name: TrainerName | None = None
    ) -> Training:
        """Return the training, if its defaults follow another number of steps than its own.

        Args:
            followed: as of :func:`~nnunet_cpr.names.training.resolve`.
            name: settings of another name with the base values of this trainer; None for its own.

        Raises:
            Refusal: the lengths of the base trainer do not fit the name.
        """
        assert self._base is not None
        base = dataclasses.replace(self._base, **self._lengths())
        try:
            return resolve(name or self.trainer.settings, base, followed)
        except WrongName as error:
            raise Refusal(f"{self.name}: {error}") from error

    def _keep_followed(self) -> None:
        assert self._training is not None
        followed = self._training.steps if self._followed is None else self._followed
        if math.isinf(followed):
            self.trainer.my_init_kwargs.pop(FOLLOWED, None)
        else:
            self.trainer.my_init_kwargs[FOLLOWED] = followed

    def resolve_again(self) -> None:
        """Resolve the training once more, before an optimizer is built for it."""
        if self._base is not None:
            # The weight decay is 0 where the regularization has taken its place.
            decay = self.trainer.weight_decay or self._base.weight_decay
            lr = self.trainer.initial_lr
            self._base = dataclasses.replace(self._base, lr=lr, weight_decay=decay)
            self._training = None

    @property
    def may_change(self) -> set[str]:
        """Fields that may change after the optimizer was built, as nothing in it depends on them."""
        settings = self.trainer.settings
        is_kept = settings.schedule is None and settings.defaults.keeps_optimizer
        by_iteration = isinstance(self.trainer.lr_scheduler, IterationLRScheduler)
        fields = {"epochs": True, "horizon": is_kept, "iterations": not by_iteration}
        return {field for field, may_change in fields.items() if may_change}

    def _follow_lengths(self) -> None:
        """Resolve the training again if the trainer's lengths have changed since it was.

        Raises:
            Refusal: this would change what is built by then.
        """
        before, now = self.training, self.training_that_began_with(self._followed)
        if not self.may_change.issuperset(now.differences(before)):
            raise Refusal(
                f"{self.name}: its optimizer was built for {counted(before.epochs, 'epoch')} of "
                f"{counted(before.iterations, 'iteration')}, and now it has {now.epochs} of "
                f"{now.iterations}",
                "set them before the optimizer is built, or write them into the name",
            )
        self._training = now
        self._keep_followed()

    # In force

    @property
    def in_force(self) -> Training:
        """All that trains, with what the optimizer and the schedule have where the name says nothing."""
        return in_force(self._trained)

    @property
    def _trained(self) -> Trained:
        regularization = self.parts.regularization
        return Trained(
            self.trainer, self.parts.other, regularization.configured, regularization.given_decays
        )

    def _check_in_force(self, is_continued: bool = False) -> None:
        """Refuse if a setting of the name is not in force, where something has changed."""
        trainer = self.trainer
        used = (
            trainer.optimizer,
            trainer.lr_scheduler,
            trainer.num_epochs,
            trainer.num_iterations_per_epoch,
        )
        if all(own is before for own, before in zip(used, self._checked)):
            return
        self._checked = used
        for problem in unmet_settings(self._trained, is_continued):
            raise Refusal(f"{self.name}: {problem}")
        self._follow_lengths()
        if unseen := " ".join(unseen_settings(self._trained)):
            self.warn(f"cannot see if {unseen} is in force in {self.parts.other.__name__}")

    def initialized(self) -> None:
        self._check_in_force()

    def start(self) -> None:
        trainer = self.trainer
        self._check_in_force(is_continued=trainer.current_epoch > 0)
        self.log(
            f"Training as {self.parts.other.__name__} with {type(trainer.optimizer).__name__} and "
            f"{type(trainer.lr_scheduler).__name__}"
        )
        lines = (f"{title}: {text}" for title, text in self.in_force.rows())
        self.log("\n  ".join([f"{self.name} trains", *lines]))

    def start_iteration(self, iteration: int) -> None:
        """Check before the first iteration of an epoch, after all that trainers do as it starts."""
        if iteration > 0:
            return
        if self._is_first_iteration:  # whatever was changed in place
            self._checked = (None,)
        is_continued = self._is_first_iteration and self.trainer.current_epoch > 0
        self._check_in_force(is_continued)
        self._is_first_iteration = False

    def end_epoch(self) -> None:
        """Refuse if steps of the first epoch are not its iterations, and something needs that.

        A trainer may accumulate gradients over several iterations, and lengths in names are in steps.
        """
        steps = self.parts.regularization.count_steps()
        if not self._checks_steps or not steps:  # a whole epoch may have none
            return
        self._checks_steps = False
        changing = {*differences_from_longer(self.trainer.settings, self.training)}
        changing -= {"horizon", "warmup"}
        if isinstance(self.trainer.lr_scheduler, IterationLRScheduler) and self.training.warmup:
            changing.add("warmup")  # of so many steps; the rest of the schedule follows the iterations
        parts, iterations = titles(changing), self.trainer.num_iterations_per_epoch
        # The count of skipped steps is an estimate; accumulation leaves out half of them or more.
        if parts and abs(iterations - steps) > iterations / 3:
            raise Refusal(
                f"{self.name}: expected an optimizer step in each iteration, from the number of which "
                f"its {' and '.join(parts)} is computed, got {steps} in {iterations}",
                "give a bound in optimizer steps, as _ws<N>, and leave out what follows the length",
            )

    # Continued trainings

    def continue_as_begun(self, arguments: dict[str, Any]) -> None:
        if self.parts.saves.has_started:  # with what the training has
            return
        before = self.training
        self._followed = arguments.get(FOLLOWED, math.inf)
        self._training = None
        if self.training != before:
            self.parts.regularization.configure_anew()
