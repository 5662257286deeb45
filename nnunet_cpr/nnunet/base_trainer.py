"""Base class of the trainers in ``trainers/``.

A trainer family is a short subclass in ``trainers/`` that builds the optimizer. Its name and defaults
are listed in ``FAMILIES`` of :mod:`nnunet_cpr.names.families`. All else is done by parts
(:mod:`nnunet_cpr.nnunet.parts`) at the moments of :mod:`nnunet_cpr.nnunet.moments`.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, cast

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch.optim import Optimizer

from nnunet_cpr.baselines import Baseline
from nnunet_cpr.cpr.algorithm import CPR
from nnunet_cpr.integrations import from_timm
from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.names.training import Training
from nnunet_cpr.nnunet.moments import METHODS, Moments, end
from nnunet_cpr.nnunet.parts.parts import Parts
from nnunet_cpr.refusals import Refusal

ADAM_BETAS = (0.9, 0.99)
"""Coefficients of Adam's running averages in the paper's segmentation runs."""


class NamedTrainer(nnUNetTrainer):
    """nnU-Net's trainer with the settings of its class name.

    All names of this class that nnU-Net's trainer does not have are ours (:func:`kept_names`), since
    trainers are composed by inheritance and their attributes stand side by side on one object. Whoever
    sets one of them, in a class or later on the object, means something else, and the training ends with
    one line.

    Attributes:
        settings: settings parsed from the class name.
        is_family: True for the class of a family, which others derive from.
        is_created: True if the class was created for a name with suffixes.
    """

    settings: ClassVar[TrainerName]
    is_family: ClassVar[bool] = False
    is_created: ClassVar[bool] = False
    __kept: ClassVar[frozenset[str]]
    __moments: Moments | None = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.__kept = kept_names(cls)

    def __init__(
        self,
        plans: dict,
        configuration: str,
        fold: int,
        dataset_json: dict,
        device: torch.device = torch.device("cuda"),
    ) -> None:
        # By keyword, since other trainers may have their parameters in another order.
        arguments = {
            "plans": plans,
            "configuration": configuration,
            "fold": fold,
            "dataset_json": dataset_json,
            "device": device,
        }
        if not isinstance(self.settings, TrainerName):
            self.__refuse_name("settings", type(self))
        self.__parts = Parts(self, other_trainer(type(self)))
        moments = Moments(self, self.__parts)
        try:
            moments.each("before", arguments)
            super().__init__(**arguments)
            self.__refuse_taken_names()
            moments.each("begin")
            moments.install()
            if self.was_initialized:  # in the other trainer's __init__
                moments.each("initialized")
        except Refusal as error:
            end(self, str(error), self.__parts)
        self.__moments = moments

    # What the name says

    @property
    def training(self) -> Training:
        """All that the name trains, with the lengths of this trainer."""
        return self.__parts.settings.training

    @property
    def cpr(self) -> CPR | None:
        """CPR of the optimizer, or the one to be attached to it; None if the family has none."""
        return self.__parts.regularization.cpr

    @property
    def cpr_settings(self) -> dict[str, Any]:
        """Keyword arguments of :class:`CPR` and of the optimizers with CPR."""
        return self.training.cpr_settings

    @property
    def baseline(self) -> Baseline | None:
        """Comparison method attached to the optimizer, None if the name has none."""
        return self.__parts.regularization.baseline

    # What families and users' classes build

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer of ``self.network``."""
        raise NotImplementedError(f"{self.settings.family} keeps the optimizer of the other trainer")

    def build_timm_optimizer(self, weight_decay: float) -> Optimizer:
        """Return the optimizer of timm that the name gives."""
        name = self.settings.timm
        if name is None:  # nnU-Net has found the class of the family itself
            family = self.settings.family
            raise Refusal(f"{family} names no optimizer of timm", f"write it first, as {family}_lion")
        return from_timm.build(
            self.network.parameters(), name, self.initial_lr, weight_decay, fused=fuses_steps(self)
        )

    def configure_optimizers(self, *args: Any, **kwargs: Any) -> tuple[Optimizer, Any]:
        """Return the optimizer, with the regularization of the name attached, and its schedule.

        Trainers with stages pass the stage; a second call continues the regularization.
        """
        other = super().configure_optimizers
        if "_NamedTrainer__parts" not in vars(self):
            end(self, f"{type(self).__name__}: its __init__ has to call super().__init__")
        try:
            return self.__parts.regularization.configure(lambda: other(*args, **kwargs))
        except Refusal as error:
            end(self, str(error), self.__parts)

    # Names of ours

    def __setattr__(self, name: str, value: Any) -> None:
        if name in METHODS and self.__moments is not None:
            self.__moments.set_method(name, value)
            return
        if name in self.__kept:
            other = other_trainer(type(self))
            self.__refuse_name(name, type(self) if other is nnUNetTrainer else other)
        super().__setattr__(name, value)

    def __refuse_taken_names(self) -> None:
        for base in type(self).__mro__:
            is_derived = issubclass(base, NamedTrainer) and base is not NamedTrainer
            kept = _NEVER_DERIVED if is_derived else self.__kept
            if base is not NamedTrainer:
                for name in sorted(kept.intersection(vars(base))):
                    self.__refuse_name(name, base)

    def __refuse_name(self, name: str, other: type) -> NoReturn:
        taken = f"the attribute {name!r} has another meaning in nnunet-cpr"
        parts = vars(self).get("_NamedTrainer__parts")  # a name can be wrong before there are any
        end(self, f"{other.__name__}: {taken}; rename it there", parts)


_NEVER_DERIVED = frozenset({"training", "cpr", "baseline"})
"""Names of ours that classes which derive from a family do not replace."""


def parts_of(trainer: Any) -> Parts:
    """Return the parts of a trainer."""
    return cast(Parts, vars(trainer)["_NamedTrainer__parts"])


def other_trainer(trainer: type[nnUNetTrainer]) -> type[nnUNetTrainer]:
    """Return the first base class that is not from this package, ``nnUNetTrainer`` or another."""
    others = (base for base in trainer.__mro__ if not issubclass(base, NamedTrainer))
    return next(base for base in others if issubclass(base, nnUNetTrainer))


def kept_names(trainer: type[NamedTrainer]) -> frozenset[str]:
    """Return the names of this package on a trainer that nnU-Net's trainer does not have."""
    package = __name__.partition(".")[0]
    own = [base for base in trainer.__mro__ if base.__module__.partition(".")[0] == package]
    names = {"settings"}.union(*map(vars, own)).difference(dir(nnUNetTrainer))
    return frozenset(name for name in names if "__" not in name)  # those of one class


def fuses_steps(trainer: nnUNetTrainer) -> bool | None:
    """Return the argument ``fused`` of optimizers: True in mixed precision, else None, their default.

    The step then skips overflows itself. Otherwise ``GradScaler`` waits for the backward pass before
    each step, and the GPU waits for the host, which only then prepares the step.
    """
    return True if trainer.grad_scaler is not None else None
