"""Trainer classes by name: their search, as nnU-Net does it, and their composition.

nnU-Net imports the modules of its own folders and of those in ``nnUNet_extTrainer``, and asks each for
the name. For a name such as ``nnUNetTrainerCPR_ws2000_on_nnUNetTrainerDA5`` the modules in ``trainers/``
search for the other trainer and create a class (:func:`with_suffixes`), derived from the family and from
the other trainer, so that Python's method resolution order decides what each of them changes. Suffixes
also apply to trainers that users have derived from a family: ``nnUNetTrainerMine_ws50``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from multiprocessing import parent_process
from pathlib import Path

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.names.trainer_name import TrainerName, parse_suffixes, parse_trainer_name, split_suffixes
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.spelling import OTHER_TRAINER

_NO_TRAINER = (
    "Could not find requested nnunet trainer",
    "The requested nnunet trainer class must inherit",
    "issubclass() arg 1 must be a class",
)
"""Errors of nnU-Net where nothing has the name, or something that a module imports."""

_searched: list[str] = []
"""Names that :func:`search` searches at the moment."""


def search_trainer(name: str, own: str = "") -> type[nnUNetTrainer]:
    """Return a trainer by its class name.

    Args:
        name: its class name.
        own: what is before ``_on_`` if the name is that of a base trainer.

    Raises:
        WrongName: it is not a trainer, or nnU-Net does not find it.
    """
    found = search(name)
    if found is None:
        raise WrongName(f"trainer {name} not found by nnU-Net", f"{_advice(name, own)}")
    return found


def _advice(name: str, own: str) -> str:
    """Return what to write in place of a name that nnU-Net does not find."""
    for stem, suffixes in split_suffixes(TrainerName, name):
        if own and search(stem):
            return f"did you mean {own}_{suffixes}{OTHER_TRAINER}{stem}?"
    rest = name.removeprefix(TrainerName.prefix).removeprefix("_")
    # The search above has imported all of nnU-Net's trainers.
    close = difflib.get_close_matches(name, _subclasses(nnUNetTrainer), n=1, cutoff=0.8)
    for guess in (TrainerName.prefix + rest, *close):
        if guess != name and search(guess):
            return f"did you mean {guess}?"
    return "list its folder in nnUNet_extTrainer, or correct its name"


def _subclasses(trainer: type[nnUNetTrainer]) -> set[str]:
    """Return the names of all classes that derive from a trainer."""
    derived = trainer.__subclasses__()
    return {each.__name__ for each in derived}.union(*map(_subclasses, derived))


@functools.cache  # it imports the modules of external folders again
def search(name: str) -> type[nnUNetTrainer] | None:
    """Search for a trainer as nnU-Net does; return None if there is none of this name."""
    _searched.append(name)
    for family in FAMILIES:  # a file of this name in another folder would not be imported
        sys.modules.pop(family, None)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # nnU-Net prints the searched folders
            return recursive_find_trainer_class_by_name(name)
    except (RuntimeError, AssertionError, TypeError) as error:
        if str(error).startswith(_NO_TRAINER):
            return None
        raise
    finally:
        _searched.remove(name)


def is_searching() -> bool:
    """Return True during a search by this module, whose callers report a wrong name themselves."""
    return bool(_searched)


def check_not_taken(name: str, is_ours: bool = True) -> None:
    """Check that nnU-Net finds our class under the name of each family in a trainer's name.

    Where somebody else's class has that name, the name alone trains theirs, and with suffixes ours.

    Args:
        name: name of a trainer.
        is_ours: False for a trainer of others, whose name may begin with that of a family.

    Raises:
        Refusal: it finds somebody else's class.
    """
    own, _, base = TrainerName.split(name)
    for part in (own, base) if is_ours or own in FAMILIES else (base,):
        family = part.partition("_")[0]
        found = search(family) if family in FAMILIES else None
        if found is not None and "is_family" not in vars(found):
            file, other = _file_of(found), family.replace("nnUNetTrainer", "nnUNetTrainerMy", 1)
            raise Refusal(
                f"{family}: this name of nnunet-cpr is taken by a class in {file}",
                f"rename that class, for example to {other}",
                command=f"grep -nw {family} {shlex.quote(str(file))}",
            )


def _file_of(trainer: type[nnUNetTrainer]) -> Path:
    """Return the file of a class, whose module nnU-Net forgets if it is in an external folder."""
    relative = Path(*trainer.__module__.split(".")).with_suffix(".py")
    folders = os.environ.get("nnUNet_extTrainer", "").split(os.pathsep)
    files = [Path(folder) / relative for folder in folders if folder]
    module = sys.modules.get(trainer.__module__)
    return next(filter(Path.is_file, files), Path(getattr(module, "__file__", None) or relative))


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
        except Refusal as error:
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
        except Refusal as error:
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
            raise WrongName(f"{stem} takes no suffixes", f"write {right}{base}")
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
        own = family if settings.defaults.keeps_optimizer else settings.family
        right = dataclasses.replace(settings, family=own, on=None)
        reason = f"nnUNetTrainer is the default; use {right}"
    elif issubclass(other, NamedTrainer):
        reason = f"{settings.on} is derived from nnunet-cpr already; append suffixes to its name"
    elif not settings.defaults.keeps_optimizer and _builds_optimizer(other):
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
