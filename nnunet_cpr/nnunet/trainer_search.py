"""Search for trainers by class name, as nnU-Net does it.

nnU-Net imports the modules of its own folders and of those in ``nnUNet_extTrainer``, and asks each for
the name. Those in ``trainers/`` answer a name with ``_on_`` by a search for the other trainer.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import os
import shlex
import sys
from pathlib import Path

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.names.trainer_name import TrainerName, split_suffixes
from nnunet_cpr.spelling import OTHER_TRAINER

_NO_TRAINER = (
    "Could not find requested nnunet trainer",
    "The requested nnunet trainer class must inherit",
    "issubclass() arg 1 must be a class",
)
"""Errors of nnU-Net where nothing has the name, or something that a module imports."""

_searched: list[str] = []
"""Names that :func:`search` searches at the moment."""


class TakenName(WrongName):
    """Name of a trainer family under which nnU-Net finds somebody else's class.

    Attributes:
        remedy: shell command that shows where that class is.
    """

    def __init__(self, family: str, file: Path) -> None:
        other = family.replace("nnUNetTrainer", "nnUNetTrainerMy", 1)
        super().__init__(
            f"{family}: this name of nnunet-cpr is taken by a class in {file}; rename that class, for "
            f"example to {other}"
        )
        self.remedy = f"grep -nw {family} {shlex.quote(str(file))}"


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
        raise WrongName(f"trainer {name} not found by nnU-Net; {_advice(name, own)}")
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
        TakenName: it finds somebody else's class.
    """
    own, _, other = TrainerName.split(name)
    for part in (own, other) if is_ours or own in FAMILIES else (other,):
        family = part.partition("_")[0]
        found = search(family) if family in FAMILIES else None
        if found is not None and "is_family" not in vars(found):
            raise TakenName(family, _file_of(found))


def _file_of(trainer: type[nnUNetTrainer]) -> Path:
    """Return the file of a class, whose module nnU-Net forgets if it is in an external folder."""
    relative = Path(*trainer.__module__.split(".")).with_suffix(".py")
    folders = os.environ.get("nnUNet_extTrainer", "").split(os.pathsep)
    files = [Path(folder) / relative for folder in folders if folder]
    module = sys.modules.get(trainer.__module__)
    return next(filter(Path.is_file, files), Path(getattr(module, "__file__", None) or relative))
