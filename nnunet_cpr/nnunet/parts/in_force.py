"""Settings that are in force in the objects that will train.

Another trainer in the name may build its optimizer and schedule where it likes, and change them later.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from torch.optim import Optimizer

from nnunet_cpr.baselines import DecoupledDecay
from nnunet_cpr.cpr.algorithm import CPR
from nnunet_cpr.cpr.attachment import attached_method
from nnunet_cpr.names.suffixes import Cooldown, find_suffix
from nnunet_cpr.names.training import Training
from nnunet_cpr.nnunet.parts.part import unwrapped
from nnunet_cpr.nnunet.parts.schedule import (
    ConstantLRScheduler,
    CooldownLRScheduler,
    IterationLRScheduler,
    WarmupPolyLRScheduler,
)
from nnunet_cpr.spelling import print_number


@dataclass(frozen=True)
class Trained:
    """Objects that train.

    Attributes:
        trainer: a ``NamedTrainer`` with its optimizer and schedule.
        other: the trainer that it is combined with.
        configured: the optimizer that ``configure_optimizers`` of a family has returned, None if it was
            not called.
        given_decays: weight decays of the parameter groups with which it was built.
    """

    trainer: Any
    other: type
    configured: Optimizer | None
    given_decays: frozenset[Any]

    @property
    def is_ours(self) -> bool:
        """True if the optimizer that trains is the configured one, or wraps it."""
        optimizer: Any = self.trainer.optimizer
        wrapped = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
        return any(each is self.configured for each in (optimizer, *wrapped))

    @property
    def method(self) -> Any:
        """Regularization method of the optimizer."""
        return None if self.configured is None else attached_method(self.configured)

    def in_groups(self, key: str) -> set[Any]:
        """Return the values of a setting of the parameter groups."""
        return {group.get(key) for group in self.trainer.optimizer.param_groups}

    def of_cpr(self, key: str) -> set[Any]:
        """Return the values of a setting of CPR, which parameter groups may have."""
        method = self.method
        return {getattr(own, key) for own in method.settings} if isinstance(method, CPR) else set()


def unmet_settings(trained: Trained, is_continued: bool) -> Iterator[str]:
    """Yield each setting of a trainer's name that is not in force, with what to do.

    A setting that the name does not give is a matter of the base trainer, or of a user's class.

    Args:
        trained: the objects that train.
        is_continued: True for a training whose learning rates were checked when it began.
    """
    trainer = trained.trainer
    settings, other = trainer.settings, trained.other.__name__
    regularizes = settings.defaults.cpr or settings.baseline is not None
    if regularizes or trainer.training.ema or not settings.defaults.keeps_optimizer:
        if trained.configured is None:
            yield (
                f"its configure_optimizers does not call that of {settings.family}, so that it would "
                "train without what its name says; build the optimizer in build_optimizer, or derive "
                "the class from a trainer of nnU-Net and name it after _on_"
            )
            return
        if not trained.is_ours:
            yield (
                f"{other} trains with an optimizer that is not from configure_optimizers, "
                f"{type(trainer.optimizer).__name__} in place of {type(trained.configured).__name__}; "
                "build it there"
            )
            return
    if settings.epochs is not None and not is_continued and (problem := _long_warmup(trained)):
        yield problem
        return
    for field, token in _given(trainer).items():
        if field not in USED or (field == "lr" and is_continued):
            continue
        wanted, used = getattr(trainer.training, field), USED[field](trained)
        tolerance = 1e-3 if field == "lr" else 0  # a schedule may come close to its highest rate only
        is_used = [_is_equal(value, wanted, tolerance) for value in used]
        if used and not (all(is_used) if field == "momentum" else any(is_used)):
            found = " and ".join(sorted(map(_spell, used)))
            suffix = find_suffix(settings.suffixes, token)
            has_value = suffix is not None and suffix.placeholder  # that of timm is none
            choose = f"choose {suffix.syntax} accordingly, or " if suffix and has_value else ""
            yield f"{other} uses {found} in place of _{token}; {choose}leave it out"


def in_force(trained: Trained) -> Training:
    """Return all that trains, with the values in force of what the name does not give."""
    training, given = trained.trainer.training, _given(trained.trainer)
    used = {field: find(trained) for field, find in USED.items() if field not in given}
    changes = {field: next(iter(values)) for field, values in used.items() if len(values) == 1}
    return dataclasses.replace(training, **changes)


def _long_warmup(trained: Trained) -> str | None:
    """Return a refusal if the learning rate of a base trainer only rises in the epochs of the name."""
    trainer = trained.trainer
    stage = getattr(trainer, "warmup_duration_whole_net", None) or math.inf  # which has its schedule
    rates = _learning_rates(trainer, range(trainer.num_epochs)) if stage > trainer.num_epochs else []
    if len(rates) > 1 and all(a < b for a, b in pairwise(rates)):
        return (
            f"the learning-rate warm-up of {trained.other.__name__} is longer than the "
            f"training of {len(rates)} epochs, which ends with a rate of {print_number(rates[-1])}; "
            "choose more epochs"
        )
    return None


def unseen_settings(trained: Trained) -> list[str]:
    """Return the suffixes of a trainer's name of which cannot be seen if they are in force."""
    given = _given(trained.trainer).items()
    return [f"_{token}" for field, token in given if field in USED and not USED[field](trained)]


def _given(trainer: Any) -> dict[str, str]:
    """Return the suffixes of a trainer's name by their fields."""
    settings, given = trainer.settings, trainer.settings.tokens()
    given |= {"timm": settings.timm} if settings.timm else {}
    if settings.baseline is not None and settings.defaults.keeps_optimizer:
        # The method has the decay of the optimizer whose decay it replaces.
        decay = trainer.training.weight_decay
        given |= {} if decay is None else {"weight_decay": f"wd{print_number(decay)}"}
    return given


def _weight_decays(trained: Trained) -> set[Any]:
    method, given = trained.method, trained.given_decays
    if method is not None and trained.trainer.settings.defaults.keeps_optimizer and any(given):
        return {*given}  # before the method took its place
    if isinstance(method, DecoupledDecay):
        return {method.weight_decay}
    return {group.get("weight_decay", 0) for group in trained.trainer.optimizer.param_groups}


def _schedule(trained: Trained) -> set[Any]:
    schedule = trained.trainer.lr_scheduler
    if isinstance(schedule, CooldownLRScheduler):
        return {Cooldown(schedule.percent)}
    if isinstance(schedule, ConstantLRScheduler):
        return {"constant"}
    is_poly = isinstance(schedule, WarmupPolyLRScheduler | PolyLRScheduler)
    return {"poly" if is_poly else type(schedule).__name__}


def _warmup(trained: Trained) -> set[Any]:
    schedule = trained.trainer.lr_scheduler
    if isinstance(schedule, IterationLRScheduler):
        return {schedule.warmup}
    return {0} if type(schedule) is PolyLRScheduler else set()


def _frozen(trained: Trained) -> set[Any]:
    part = trained.trainer.settings.freeze
    if not part:
        return set()
    network = unwrapped(trained.trainer.network)
    if not hasattr(network, part):
        return {f"a network without {part}"}
    parameters = getattr(network, part).parameters()
    return {f"a trained {part}"} if any(p.requires_grad for p in parameters) else {part}


def _highest_rates(trained: Trained) -> set[Any]:
    """Return the highest learning rates of the schedule, evaluated on a copy."""
    trainer = trained.trainer
    first = trainer.current_epoch
    # A trainer with stages has another schedule after its warm-up.
    warmup = getattr(trainer, "warmup_duration_whole_net", None) if first == 0 else None
    end = min(trainer.num_epochs, warmup or trainer.num_epochs)
    # A later schedule may begin anew, or where the one before has ended.
    rates = [_learning_rates(trainer, range(start, end)) for start in {0, first}]
    return {max(each) for each in rates if each}


USED: Mapping[str, Callable[[Trained], set[Any]]] = {
    "timm": lambda trained: {name.partition(",")[0] for name in trained.in_groups("timm") if name},
    "lr": _highest_rates,
    "momentum": lambda trained: trained.in_groups("momentum"),
    "warmup": _warmup,
    "schedule": _schedule,
    "freeze": _frozen,
    "epochs": lambda trained: {trained.trainer.num_epochs},
    "iterations": lambda trained: {trained.trainer.num_iterations_per_epoch},
    "weight_decay": _weight_decays,
    "kappa": lambda trained: trained.of_cpr("kappa"),
    "regularizer": lambda trained: {own.name for own in trained.of_cpr("regularizer")},
    "mu": lambda trained: trained.of_cpr("mu"),
    "adaptive": lambda trained: trained.of_cpr("adaptive"),
}
"""For each field of a training the values that a trainer uses, none where they cannot be seen.

The comparison method and averaged weights are in force if the optimizer is ours. What is left, such as
the seed, this package applies itself."""


def _is_equal(used: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(used, float) and isinstance(wanted, float):
        return math.isclose(used, wanted, rel_tol=tolerance)
    return bool(used == wanted)


def _spell(value: Any) -> str:
    if isinstance(value, Cooldown):
        return f"a cooldown of {value.percent:g} %"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return print_number(value) if is_number else "none" if value is None else str(value)


def _learning_rates(trainer: Any, epochs: range) -> list[float]:
    """Return the highest learning rate of the parameter groups in each epoch.

    It is empty for a schedule that a copy cannot show, for example one that follows the loss.
    """
    schedule: Any = trainer.lr_scheduler
    if isinstance(schedule, IterationLRScheduler):
        return [schedule.lr]  # its warm-up is shorter than the training
    # An optimizer with CPR refuses to be copied, and its weights are not needed.
    groups: list[dict[str, Any]] = [
        {**group, "params": [torch.nn.Parameter(torch.zeros(1))]}
        for group in trainer.optimizer.param_groups
    ]
    stand_in = torch.optim.SGD(groups, lr=0.0)
    try:
        copied = copy.deepcopy(schedule, {id(trainer.optimizer): stand_in})
        return list(_follow(copied, stand_in, trainer, epochs))
    except Exception:  # a class of another package may refuse in any way
        return []


def _follow(
    copied: Any, stand_in: torch.optim.Optimizer, trainer: Any, epochs: range
) -> Iterator[float]:
    # nnU-Net steps it in each epoch, other trainers may in each iteration.
    code = getattr(type(trainer).train_step, "__code__", None)
    steps_in_iterations = code is not None and "lr_scheduler" in code.co_names
    for epoch in epochs:
        highest = 0.0
        for _ in range(trainer.num_iterations_per_epoch if steps_in_iterations else 1):
            copied.step() if steps_in_iterations else copied.step(epoch)
            highest = max([highest, *(float(group["lr"]) for group in stand_in.param_groups)])
        yield highest
