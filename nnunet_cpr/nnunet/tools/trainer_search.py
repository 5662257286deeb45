"""Search for the trainers of a study before its first training starts."""

from __future__ import annotations

import os
from collections.abc import Iterable

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.trainer_name import TrainerName

EXTERNAL_TRAINERS = "nnUNet_extTrainer"
"""Environment variable with the folders that nnU-Net searches after its own."""


def missing_trainers(names: Iterable[str]) -> dict[str, str]:
    """Return the trainers that nnU-Net does not find, each with the reason.

    Args:
        names: class names.

    Example:
        >>> missing_trainers(["nnUNetTrainerSDG", "nnUNetTrainerSGD"])["nnUNetTrainerSDG"][:60]
        "unknown name 'nnUNetTrainerSDG', did you mean nnUNetTrainerS"
    """
    missing: dict[str, str] = {}
    if not (names := dict.fromkeys(names)):
        return missing  # without importing torch
    from nnunet_cpr.nnunet.composition import find_trainer, search_trainer

    for name in names:
        try:
            found = find_trainer(name)
            if isinstance(found, TrainerName):
                search_trainer(found.family)
        except WrongName as error:
            reason = str(error).replace(f" in {name!r}", "").removeprefix(f"{name!r}: ")
            missing[name] = reason.replace("; ", ", ")
        except Exception as error:  # the module of another package can fail in any way
            missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return missing


def external_trainers() -> str:
    """Return the value of nnU-Net's variable for trainers of other packages, for messages."""
    return os.environ.get(EXTERNAL_TRAINERS) or "not set"
