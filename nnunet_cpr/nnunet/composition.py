"""Trainer classes for names with suffixes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.trainer_name import TrainerName, parse_trainer_name
from nnunet_cpr.nnunet.base_trainer import NamedTrainer


def with_suffixes(family: type[NamedTrainer]) -> Callable[[str], type[NamedTrainer]]:
    """Return the ``__getattr__`` of a module that defines a trainer family.

    Args:
        family: the class named without suffixes.

    Returns:
        A function that takes a name such as ``nnUNetTrainerCPR_ws2000`` and returns a subclass of
        ``family`` of that name with its settings. It raises AttributeError for other names; for a
        misspelt name of a trainer of this package it prints a correction.
    """

    def __getattr__(name: str) -> type[NamedTrainer]:  # noqa: N807
        settings = _parse_name(name)
        if settings is None or settings.family != family.__name__:
            raise AttributeError(name)
        # nnU-Net stores the class name in checkpoints and searches for it again at inference.
        return type(name, (family,), {"settings": settings, "__doc__": family.__doc__})

    return __getattr__


@functools.cache  # so that a misspelt name is reported once, not by the module of each family
def _parse_name(name: str) -> TrainerName | None:
    if not name.lower().startswith("nnunettrainer"):
        return None
    try:
        return parse_trainer_name(name)
    except WrongName as error:
        print(f"nnunet-cpr: {error}", file=sys.stderr)
        return None
