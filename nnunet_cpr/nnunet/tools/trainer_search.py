"""Search for the trainers of a study."""

from __future__ import annotations

import os
from collections.abc import Iterable

from nnunet_cpr.names import WrongName
from nnunet_cpr.nnunet.composition import TakenName, resolve_settings, search_trainer
from nnunet_cpr.nnunet.trainer_files import EXTERNAL_TRAINERS


def missing_trainers(names: Iterable[str]) -> dict[str, str]:
    """Return the trainers that nnU-Net does not find, each with the reason.

    Args:
        names: class names.

    Example:
        >>> missing_trainers(["nnUNetTrainerSDG", "nnUNetTrainerSGD"])["nnUNetTrainerSDG"][:60]
        "unknown name 'nnUNetTrainerSDG', did you mean nnUNetTrainerS"
    """
    reasons = {name: _why_missing(name) for name in dict.fromkeys(names)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def external_trainers() -> str:
    """Return the value of nnU-Net's variable for trainers of other packages, for messages."""
    return os.environ.get(EXTERNAL_TRAINERS) or "not set"


def _why_missing(name: str) -> str | None:
    try:
        try:
            wrong, settings = None, resolve_settings(name)
        except TakenName:
            raise
        except WrongName as error:  # or a trainer of another package whose name resembles ours
            wrong, settings = error, None
        try:
            search_trainer(name if settings is None else settings.family)
        except WrongName as error:
            raise wrong or error from None
    except WrongName as error:
        text = str(error).replace(f" in {name!r}", "").removeprefix(f"{name!r}: ")
        return text.replace("; ", ", ")
    except Exception as error:  # the module of another package can fail in any way
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return None
