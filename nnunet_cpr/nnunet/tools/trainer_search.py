"""Find the trainers of a study without importing every module of nnU-Net."""

from __future__ import annotations

import os
from collections.abc import Iterable

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.trainer_name import TrainerName, parse_trainer_name
from nnunet_cpr.nnunet.trainer_files import EXTERNAL_TRAINERS, file_with


def missing_trainers(names: Iterable[str]) -> dict[str, str]:
    """Return the trainers that nnU-Net does not find, each with the reason.

    If names are misspelt, the others are not searched.

    Args:
        names: class names.

    Example:
        >>> missing_trainers(["nnUNetTrainerSDG", "nnUNetTrainerSGD"])["nnUNetTrainerSDG"][:60]
        "unknown name 'nnUNetTrainerSDG', did you mean nnUNetTrainerS"
    """
    names = list(dict.fromkeys(names))
    misspelt = {name: hint for name in names if (hint := _correction(name))}
    if misspelt:
        return misspelt  # without importing nnU-Net and torch, which takes seconds
    reasons = {name: _why_missing(name) for name in names}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def external_trainers() -> str:
    """Return the value of nnU-Net's variable for trainers of other packages, for messages."""
    return os.environ.get(EXTERNAL_TRAINERS) or "not set"


def _correction(name: str) -> str:
    """Return the correction of a name that resembles ours and is in no module, else ""."""
    try:
        parse_trainer_name(name)
    except WrongName as error:
        tokens = name.split("_")
        stems = ["_".join(tokens[:end]) for end in range(1, len(tokens) + 1)]
        return "" if any(map(file_with, stems)) else _shortened(name, error)
    return ""


def _why_missing(name: str) -> str | None:
    from nnunet_cpr.nnunet.composition import find_trainer, search_trainer

    try:
        found = find_trainer(name)
        if isinstance(found, TrainerName):
            search_trainer(found.family)
    except WrongName as error:
        return _shortened(name, error)
    except Exception as error:  # the module of another package can fail in any way
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return None


def _shortened(name: str, error: WrongName) -> str:
    return str(error).replace(f" in {name!r}", "").removeprefix(f"{name!r}: ").replace("; ", ", ")
