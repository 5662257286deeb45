"""Import of the trainers in ``trainers/`` by name, for scripts and for subclasses.

nnU-Net itself does not need this module. To derive a class from a trainer:

    from nnunet_cpr.nnunet.trainer import nnUNetTrainerCPR
"""

from __future__ import annotations

import functools
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import nnunet_cpr
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.classes import resolve_settings


@functools.cache
def trainer_class(name: str) -> type[NamedTrainer] | None:
    """Return the trainer class of a name, None if it is not a trainer of this package.

    Args:
        name: a trainer family, with or without suffixes.

    Raises:
        WrongName: the name is misspelt, or its parts cannot be combined.

    Example:
        >>> trainer_class("nnUNetTrainerCPR_ws2000").settings.kappa
        KappaWS(steps=2000)
    """
    settings = resolve_settings(name)
    found: type[NamedTrainer] | None = getattr(_module(settings.family), name) if settings else None
    return found


def __getattr__(name: str) -> Any:
    if name not in FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not by trainer_class, which would search the module that imports this for a class of the name.
    return getattr(_module(name), name)


@functools.cache
def _module(family: str) -> ModuleType:
    """Import the module of a trainer family."""
    parent = Path(nnunet_cpr.__file__).parents[1]
    # "nnunet_cpr_trainers" in an installed wheel, "trainers" in a checkout.
    files = [parent / folder / f"{family}.py" for folder in ("nnunet_cpr_trainers", "trainers")]
    # A qualified name, since another package may have a module with the file's name.
    spec = spec_from_file_location(f"{__name__}.{family}", next(filter(Path.is_file, files)))
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
