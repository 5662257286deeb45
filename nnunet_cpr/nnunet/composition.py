"""Trainer classes for names with suffixes and with another trainer.

When nnU-Net searches for a name such as ``nnUNetTrainerCPR_ws2000_on_nnUNetTrainerDA5``, the modules in
``trainers/`` create a class for it (:func:`with_suffixes`), derived from the family and from the other
trainer, so that Python's method resolution order decides what each of them changes. Suffixes also apply
to trainers that users have derived from a family: ``nnUNetTrainerMine_ws50``.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from multiprocessing import parent_process
from pathlib import Path

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.names.trainer_name import parse_suffixes, parse_trainer_name, split_suffixes
from nnunet_cpr.names.value import TrainerName
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.trainer_search import (
    TakenName,
    check_not_taken,
    is_searching,
    search,
    search_trainer,
)


def with_suffixes(family: type[NamedTrainer]) -> Callable[[str], type[NamedTrainer]]:
    """Return the ``__getattr__`` of a module that defines a trainer family.

    Args:
        family: the class named without suffixes.

    Returns:
        A function that takes a name such as ``nnUNetTrainerCPR_ws2000`` and returns a subclass of
        ``family`` of that name with its settings. It raises AttributeError for other names; for a wrong
        name of a trainer of this package, nnU-Net's command ends with one line that corrects it.
    """
    family.is_family = True

    def __getattr__(name: str) -> type[NamedTrainer]:  # noqa: N807
        if name.startswith("__") or name in FAMILIES:
            raise AttributeError(name)
        try:
            base, settings = _resolve(name)
        except WrongName as error:
            is_command = Path(sys.argv[0]).name.startswith("nnUNetv2_")
            if is_command and parent_process() is None and not is_searching() and not search(name):
                # In place of nnU-Net's traceback, which does not say what is wrong.
                raise SystemExit(f"nnunet-cpr: {error}") from None
            raise AttributeError(name) from None
        if settings is None or settings.family != family.__name__:
            raise AttributeError(name)
        return _create(name, base or family, settings)

    return __getattr__


def resolve_settings(name: str) -> TrainerName | None:
    """Return the settings of a trainer of this package or of a class derived from one, else None.

    Raises:
        WrongName: the name is misspelt, or its parts cannot be combined.
    """
    return _resolve(name)[1]


def find_trainer(name: str) -> type[nnUNetTrainer]:
    """Return a trainer as :func:`search_trainer`, and correct misspelt names of this package.

    Raises:
        WrongName: the name is misspelt, its parts cannot be combined, or nnU-Net does not find it.
    """
    try:
        resolve_settings(name)
    except TakenName:
        raise
    except WrongName:
        if found := search(name):  # a trainer of another package whose name resembles ours
            return found
        raise
    return search_trainer(name)


def missing_trainers(names: Iterable[str]) -> dict[str, str]:
    """Return the trainers that nnU-Net does not find, each with the reason.

    Args:
        names: class names.

    Example:
        >>> missing_trainers(["nnUNetTrainerSDG", "nnUNetTrainerSGD"])["nnUNetTrainerSDG"][:60]
        "unknown name 'nnUNetTrainerSDG', did you mean nnUNetTrainerS"
    """
    missing: dict[str, str] = {}
    for name in names:
        try:
            find_trainer(name)
        except WrongName as error:
            reason = str(error).replace(f" in {name!r}", "").removeprefix(f"{name!r}: ")
            missing[name] = reason.replace("; ", ", ")
        except Exception as error:  # the module of another package can fail in any way
            missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return missing


@functools.cache  # the module of each family asks
def _resolve(name: str) -> tuple[type[NamedTrainer] | None, TrainerName | None]:
    """Return the class that a name derives from, None for its family, and the settings.

    Raises:
        WrongName: the name is misspelt, or its parts cannot be combined.
    """
    base, settings, reason = None, None, None
    try:
        settings = parse_trainer_name(name)
    except WrongName as error:
        reason = error
    check_not_taken(name, is_ours=settings is not None)
    if settings is None:
        base, settings = _derived_trainer(name)
        if settings is None and reason:
            raise reason
    if settings is not None and settings.on is not None:
        other = search_trainer(settings.on, TrainerName.split(name)[0])
        _check_composition(name, settings, other)
    return base, settings


def _is_valid(name: str) -> bool:
    """Return True for the name of a trainer of this package."""
    try:
        return parse_trainer_name(name) is not None
    except WrongName:
        return False


def _create(name: str, base: type[NamedTrainer], settings: TrainerName) -> type[NamedTrainer]:
    bases = (base,) if settings.on is None else (base, search_trainer(settings.on))
    # nnU-Net stores the class name in checkpoints and searches for it again at inference.
    attributes = {"settings": settings, "is_created": True, "__doc__": base.__doc__}
    # The module named explicitly, as a metaclass such as ABCMeta would enter its own.
    return type(name, bases, {"__module__": __name__, **attributes})


def _derived_trainer(name: str) -> tuple[type[NamedTrainer] | None, TrainerName | None]:
    """Return the user's trainer that a name with suffixes is derived from, and the settings.

    Raises:
        WrongName: the suffixes do not fit the trainer, or it is another trainer, which takes none.
    """
    own, ending, other = TrainerName.split(name)
    for stem, suffixes in split_suffixes(TrainerName, own):
        # A class that this module creates would hide that its suffixes contradict the others.
        found = None if _is_valid(stem) else search(stem)
        if found is None or vars(found).get("is_created"):
            continue
        given = parse_suffixes(TrainerName, suffixes.split("_"), name)
        if not issubclass(found, NamedTrainer):
            names = [f"{_family(found, cpr)}_{suffixes}" for cpr in (False, True)]
            right = names[0] if _is_valid(names[0]) else names[1]
            base = "" if found is nnUNetTrainer else f"_on_{stem}"
            raise WrongName(f"{stem} takes no suffixes; write {right}{base}")
        if ending:
            given["on"] = other
        try:
            return found, dataclasses.replace(found.settings, **given)
        except WrongName as error:
            raise WrongName(f"{name!r}: {error}") from None
    return None, None


def name_with_cpr(trainer: type[nnUNetTrainer]) -> TrainerName:
    """Return the name that puts CPR on another trainer."""
    on = None if trainer is nnUNetTrainer else trainer.__name__
    return TrainerName(_family(trainer, cpr=True), on=on)


def _check_composition(name: str, settings: TrainerName, other: type[nnUNetTrainer]) -> None:
    """Check that a family can be combined with another trainer.

    Raises:
        WrongName: it cannot.
    """
    family = _family(other, settings.defaults.cpr)
    if other is nnUNetTrainer:
        own = family if settings.keeps_optimizer else settings.family
        right = dataclasses.replace(settings, family=own, on=None)
        reason = f"nnUNetTrainer is the default; use {right}"
    elif issubclass(other, NamedTrainer):
        reason = f"{settings.on} is derived from nnunet-cpr already; append suffixes to its name"
    elif not settings.keeps_optimizer and _builds_optimizer(other):
        right = dataclasses.replace(settings, family=family, warmup=None)
        reason = f"{settings.on} builds an optimizer of its own; use {right}"
    else:
        return
    raise WrongName(f"{name!r}: {reason}")


def _family(trainer: type[nnUNetTrainer], cpr: bool) -> str:
    """Return the family whose optimizer matches the given trainer's, with or without CPR."""
    if _builds_optimizer(trainer):
        return "nnUNetTrainerAttachCPR" if cpr else "nnUNetTrainerPlain"
    return "nnUNetTrainerCPR" if cpr else "nnUNetTrainerSGD"


def _builds_optimizer(trainer: type[nnUNetTrainer]) -> bool:
    return trainer.configure_optimizers is not nnUNetTrainer.configure_optimizers
