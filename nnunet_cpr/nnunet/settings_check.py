"""Check that the settings of a trainer's name are in force in the objects that will train.

Another trainer in the name may build its optimizer and schedule where it likes, and change them later.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch

from nnunet_cpr.nnunet.schedules import CooldownLRScheduler, IterationLRScheduler
from nnunet_cpr.spelling import print_number


def unmet_settings(
    trainer: Any, configured: Any, has_method: bool, given_decays: set[Any], first_epoch: int | None
) -> Iterator[str]:
    """Yield each setting of a trainer's name that is not in force, with what to do.

    =====================  =============================================================================
    setting                is in force if
    =====================  =============================================================================
    optimizer,             the optimizer that trains is that of ``configure_optimizers``, or wraps it
    regularization,
    ``_ema<V>``
    ``_constant``,         the schedule that trains is that of ``configure_optimizers``
    ``_cooldown<V>p``,
    ``_anytime``
    ``_momentum<V>``       each parameter group has it
    ``_wd<V>``             a parameter group has it, as the other trainer has built it
    ``_<N>epochs``,        the trainer has them
    ``_<N>iters``
    ``_lr<V>``, warm-up    the highest rate of the schedule, evaluated on a copy, is that of the name
                           (or of the trainer, where a family builds the optimizer), and is reached
    =====================  =============================================================================

    Args:
        trainer: a ``NamedTrainer`` with its optimizer and schedule.
        configured: the optimizer that ``configure_optimizers`` has returned.
        has_method: True if a regularization method is attached to it.
        given_decays: weight decays of the parameter groups with which it was built.
        first_epoch: epoch in which the schedule begins; None for one that is continued, whose rates were
            checked when it began.
    """
    settings, other = trainer.settings, trainer.other_trainer().__name__
    optimizer: Any = trainer.optimizer
    wrapped = [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]
    is_ours = any(each is configured for each in (optimizer, *wrapped))
    needs_hooks = has_method or settings.averaging_decay is not None
    if configured is None and (needs_hooks or not settings.keeps_optimizer):
        yield (
            f"its configure_optimizers does not call that of {settings.family}, so that it would train "
            "without what its name says; build the optimizer in build_optimizer, or derive the class "
            "from a trainer of nnU-Net and name it after _on_"
        )
        return
    if not is_ours and (needs_hooks or not settings.keeps_optimizer):
        yield (
            f"{other} trains with an optimizer that is not from configure_optimizers, "
            f"{type(optimizer).__name__} in place of {type(configured).__name__}; build it there"
        )
        return
    momenta = {group.get("momentum") for group in optimizer.param_groups}
    if settings.momentum is not None and momenta != {settings.momentum}:
        yield _in_place_of(other, momenta, "momentum<V>", settings.momentum)
    decay = _weight_decay(trainer, given_decays)
    if decay is not None and decay not in given_decays:
        yield _in_place_of(other, given_decays, "wd<V>", decay)
    for suffix, length, used in (
        ("<N>epochs", settings.epochs, trainer.num_epochs),
        ("<N>iters", settings.iterations, trainer.num_iterations_per_epoch),
    ):
        if length is not None and length != used:
            yield _in_place_of(other, {used}, suffix, length)
    if settings.schedule is not None:
        schedule, suffix = trainer.lr_scheduler, settings.tokens()["schedule"]
        steps = trainer.num_epochs * trainer.num_iterations_per_epoch
        if not isinstance(schedule, IterationLRScheduler):
            yield f"{other} trains with {type(schedule).__name__} in place of _{suffix}; leave it out"
            return
        if isinstance(schedule, CooldownLRScheduler) and schedule.total != steps:
            yield (
                f"{other} trains {steps:,} steps, but _{suffix} was built for {schedule.total:,}; leave "
                "it out"
            )
    if first_epoch is not None:
        yield from _unmet_rate(trainer, other, first_epoch)


def _weight_decay(trainer: Any, given_decays: set[Any]) -> float | None:
    """Return the weight decay that the optimizer must be given, None if it does not matter."""
    settings = trainer.settings
    if trainer.baseline is None:
        return settings.weight_decay
    # A method in place of another trainer's decay has the same.
    replaces = settings.keeps_optimizer and settings.decays and any(given_decays)
    return trainer.baseline_decay if replaces else None


def _unmet_rate(trainer: Any, other: str, first_epoch: int) -> Iterator[str]:
    settings = trainer.settings
    # A trainer with stages has another schedule after its warm-up.
    warmup = getattr(trainer, "warmup_duration_whole_net", 0) if first_epoch == 0 else 0
    end = min(trainer.num_epochs, warmup or trainer.num_epochs)
    rates = _learning_rates(trainer, range(first_epoch, end))
    if not rates:
        return
    is_rising = len(rates) > 1 and all(a < b for a, b in pairwise(rates))
    if settings.epochs is not None and is_rising and end == trainer.num_epochs and end != warmup:
        yield (
            f"the learning-rate warm-up of {other} is longer than the training of {end} epochs, which "
            f"ends with a rate of {print_number(rates[-1])}; choose more epochs"
        )
        return
    # A later schedule may begin anew, or where the one before has ended.
    anew = _learning_rates(trainer, range(end)) if first_epoch else []
    highest = {max(rates), *([max(anew)] if anew else [])}
    wanted = settings.lr if settings.keeps_optimizer else trainer.initial_lr
    if wanted is not None and not any(math.isclose(rate, wanted, rel_tol=1e-3) for rate in highest):
        yield _in_place_of(other, {max(rates)}, "lr<V>", wanted)


def _in_place_of(other: str, used: Iterable[Any], suffix: str, wanted: float) -> str:
    found = " and ".join(sorted("none" if value is None else print_number(value) for value in used))
    written = suffix.replace("<V>", print_number(wanted)).replace("<N>", print_number(wanted))
    advice = f"choose _{suffix} accordingly, or leave it out"
    return f"{other} uses {found or 'none'} in place of _{written}; {advice}"


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
    code = getattr(trainer.other_trainer().train_step, "__code__", None)
    steps_in_iterations = code is not None and "lr_scheduler" in code.co_names
    for epoch in epochs:
        highest = 0.0
        for _ in range(trainer.num_iterations_per_epoch if steps_in_iterations else 1):
            copied.step() if steps_in_iterations else copied.step(epoch)
            highest = max([highest, *(float(group["lr"]) for group in stand_in.param_groups)])
        yield highest
