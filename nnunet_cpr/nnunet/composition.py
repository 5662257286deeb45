"""Trainer classes for names with suffixes and with another trainer.

When nnU-Net searches for a name such as ``nnUNetTrainerCPR_ws2000_on_nnUNetTrainerDA5``, the modules in
``trainers/`` create a class for it (:func:`with_suffixes`), derived from the family and from the other
trainer, so that Python's method resolution order decides what each of them changes. Suffixes also apply
to trainers that users have derived from a family: ``nnUNetTrainerMine_ws50``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import sys
from collections.abc import Callable
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.trainer_name import (
    FAMILIES,
    TrainerName,
    parse_suffixes,
    parse_trainer_name,
    split_suffixes,
)
from nnunet_cpr.nnunet.base_trainer import NamedTrainer

_NOT_FOUND = "Could not find requested nnunet trainer"
_searched: list[str] = []
"""Names that this module searches at the moment; it reports wrong ones itself."""


def with_suffixes(family: type[NamedTrainer]) -> Callable[[str], type[NamedTrainer]]:
    """Return the ``__getattr__`` of a module that defines a trainer family.

    Args:
        family: the class named without suffixes.

    Returns:
        A function that takes a name such as ``nnUNetTrainerCPR_ws2000`` and returns a subclass of
        ``family`` of that name with its settings. It raises AttributeError for other names; for a wrong
        name of a trainer of this package, nnU-Net's command ends with one line that corrects it.
    """

    def __getattr__(name: str) -> type[NamedTrainer]:  # noqa: N807
        if name.startswith("__") or name in FAMILIES:
            raise AttributeError(name)
        try:
            base, settings = _resolve(name)
        except WrongName as error:
            is_command = Path(sys.argv[0]).name.startswith("nnUNetv2_")
            if is_command and parent_process() is None and not _searched and not _search(name):
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


def find_trainer(name: str) -> TrainerName | type[nnUNetTrainer]:
    """Return the settings of a name of this package, or the class of another trainer.

    Raises:
        WrongName: the name is misspelt, its parts cannot be combined, or nnU-Net does not find it.
    """
    try:
        return resolve_settings(name) or search_trainer(name)
    except WrongName:  # or a trainer of another package whose name resembles ours
        with contextlib.suppress(WrongName):
            return search_trainer(name)
        raise


@functools.cache  # the module of each family asks
def _resolve(name: str) -> tuple[type[NamedTrainer] | None, TrainerName | None]:
    """Return the class that a name derives from, None for its family, and the settings.

    Raises:
        WrongName: the name is misspelt, or its parts cannot be combined.
    """
    base, settings = None, None
    try:
        settings = parse_trainer_name(name)
    except WrongName:
        base, settings = _derived_trainer(name)
        if settings is None:
            raise
    if settings is None:
        base, settings = _derived_trainer(name)
    if settings is not None and settings.on is not None:
        _check_composition(name, settings, search_trainer(settings.on))
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
    body = {"settings": settings, "is_created": True, "__doc__": base.__doc__}
    created: Any = type(name, bases, body)

    # nnU-Net inspects the names of the parameters.
    def __init__(  # noqa: N807
        self: Any,
        plans: dict,
        configuration: str,
        fold: int,
        dataset_json: dict,
        device: torch.device = torch.device("cuda"),
    ) -> None:
        super(created, self).__init__(plans, configuration, fold, dataset_json, device)
        self.apply_settings()  # once more, since the base may be a user's class

    created.__init__ = __init__
    return created


def _derived_trainer(name: str) -> tuple[type[NamedTrainer] | None, TrainerName | None]:
    """Return the user's trainer that a name with suffixes is derived from, and the settings.

    Raises:
        WrongName: the suffixes do not fit the trainer, or it is another trainer, which takes none.
    """
    own, ending, other = TrainerName.split(name)
    splits = list(split_suffixes(TrainerName, own))
    for stem, suffixes in splits:
        # A class that this module creates would hide that its suffixes contradict the others.
        found = None if _is_valid(stem) else _search(stem)
        if found is None or vars(found).get("is_created"):
            continue
        parse_suffixes(TrainerName, splits[-1][1].split("_"), name)  # none contradicts another
        if not issubclass(found, NamedTrainer):
            names = [f"{_family(found, cpr)}_{suffixes}" for cpr in (False, True)]
            right = names[0] if _is_valid(names[0]) else names[1]
            base = "" if found is nnUNetTrainer else f"_on_{stem}"
            raise WrongName(f"{stem} takes no suffixes; write {right}{base}")
        as_family = f"{found.settings.family}_{suffixes}{ending}{other}"
        try:
            given = parse_trainer_name(as_family)
        except WrongName as error:
            raise WrongName(str(error).replace(as_family, name)) from None
        assert given is not None
        named = {
            field.name: getattr(given, field.name)
            for field in dataclasses.fields(given)
            if getattr(given, field.name) != field.default
        }
        return found, dataclasses.replace(found.settings, **named)
    return None, None


def name_with_cpr(trainer: type[nnUNetTrainer]) -> TrainerName:
    """Return the name that puts CPR on another trainer."""
    on = None if trainer is nnUNetTrainer else trainer.__name__
    return TrainerName(_family(trainer, cpr=True), on=on)


def search_trainer(name: str) -> type[nnUNetTrainer]:
    """Return a trainer by its class name.

    Raises:
        WrongName: it is not a trainer, or nnU-Net does not find it.
    """
    found = _search(name)
    if found is None:
        full = f"nnUNetTrainer{name}"
        advice = "list its folder in nnUNet_extTrainer, or correct its name"
        if not name.startswith("nnUNetTrainer") and _search(full):
            advice = f"did you mean {full}?"
        raise WrongName(f"trainer {name} not found by nnU-Net; {advice}")
    return found


@functools.cache  # it imports the modules of external folders again
def _search(name: str) -> type[nnUNetTrainer] | None:
    """Search for a trainer as nnU-Net does; return None if there is none of this name.

    Raises:
        WrongName: what has the name is not a trainer of nnU-Net.
    """
    _searched.append(name)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # nnU-Net prints the searched folders
            return recursive_find_trainer_class_by_name(name)
    except RuntimeError as error:
        if str(error).startswith(_NOT_FOUND):
            return None
        raise
    except (AssertionError, TypeError):
        raise WrongName(f"{name} is not a trainer of nnU-Net") from None
    finally:
        _searched.remove(name)


def _check_composition(name: str, settings: TrainerName, other: type[nnUNetTrainer]) -> None:
    """Check that a family can be combined with another trainer.

    Raises:
        WrongName: it cannot.
    """
    if other is nnUNetTrainer:
        family = settings.family
        if settings.keeps_optimizer:
            family = _family(other, settings.defaults.cpr)
        right = dataclasses.replace(settings, family=family, on=None)
        raise WrongName(f"{name!r}: nnUNetTrainer is the default; use {right}")
    if issubclass(other, NamedTrainer):
        raise WrongName(
            f"{name!r}: {settings.on} is derived from nnunet-cpr already; append suffixes to its name"
        )
    if not settings.keeps_optimizer and _builds_optimizer(other):
        family = _family(other, settings.defaults.cpr)
        right = dataclasses.replace(settings, family=family, warmup=None)
        raise WrongName(f"{name!r}: {settings.on} builds an optimizer of its own; use {right}")


def _family(trainer: type[nnUNetTrainer], cpr: bool) -> str:
    """Return the family whose optimizer matches the given trainer's, with or without CPR."""
    if _builds_optimizer(trainer):
        return "nnUNetTrainerAttachCPR" if cpr else "nnUNetTrainerPlain"
    return "nnUNetTrainerCPR" if cpr else "nnUNetTrainerSGD"


def _builds_optimizer(trainer: type[nnUNetTrainer]) -> bool:
    return trainer.configure_optimizers is not nnUNetTrainer.configure_optimizers
