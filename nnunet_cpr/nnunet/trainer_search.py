"""Search for several trainers at once, with the result of nnU-Net's own search.

nnU-Net imports all of its trainer modules, and so torch, for each name that it does not find. The
text of the modules excludes most wrong names within a second.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import warnings
from collections.abc import Iterable

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.trainer_name import FAMILIES, TrainerName, parse_trainer_name, split_suffixes
from nnunet_cpr.nnunet.trainer_files import (
    COMPILED,
    EXTERNAL_TRAINERS,
    external_folders,
    searched_files,
)

_DYNAMIC = {"__getattr__", "setattr", "globals", "vars", "exec", "eval", "*"}
"""Names in modules whose attributes are not all in their text."""


def missing_trainers(names: Iterable[str]) -> dict[str, str]:
    """Return the trainers that nnU-Net does not find, each with a hint, which may be empty.

    If the text of the modules excludes a trainer, the others are not imported, which would take longer.

    Args:
        names: class names.

    Example:
        >>> missing_trainers(["nnUNetTrainerSDG"])["nnUNetTrainerSDG"][:60]
        "unknown name 'nnUNetTrainerSDG', did you mean nnUNetTrainerS"
    """
    names = list(dict.fromkeys(names))
    known = _names_in_text()
    taken = {n: why for n in names if _may_be_taken(n, known) and (why := _taken(n))}
    names = [name for name in names if name not in taken]
    if known is not None:
        missing = {name: _hint(name, known) for name in names if not _may_exist(name, known)}
        if missing:
            return taken | missing
    reasons = {name: _search(name) for name in _one_of_each_family(names)}
    return taken | {name: reason for name, reason in reasons.items() if reason is not None}


def _one_of_each_family(names: Iterable[str]) -> list[str]:
    """Return the names without those that differ from another in suffixes of this package only."""
    chosen: dict[str, str] = {}
    for name in names:
        try:
            settings = parse_trainer_name(name)
        except WrongName:
            settings = None
        chosen.setdefault(name if settings is None else f"{settings.family} {settings.on}", name)
    return list(chosen.values())


def external_trainers() -> str:
    """Return the value of nnU-Net's variable for trainers of other packages, for messages."""
    return os.environ.get(EXTERNAL_TRAINERS) or "not set"


def _names_in_text() -> set[str] | None:
    """Return all names that the searched modules bind, None if their text does not tell."""
    names: set[str] = set()
    for path in searched_files():
        if path.suffix in COMPILED:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escape sequences
                nodes = list(ast.walk(ast.parse(path.read_bytes())))
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name)
            elif isinstance(node, ast.Name):
                names.add(node.id)
    return None if names & _DYNAMIC else names


def _may_exist(name: str, known: set[str]) -> bool:
    """Return True unless the known names exclude a trainer."""
    own, _, other = TrainerName.split(name)
    if other and other not in known:
        return False
    if name in known or any(stem in known for stem, _ in split_suffixes(TrainerName, own)):
        return True
    try:
        settings = parse_trainer_name(name)
    except WrongName:
        return False
    return settings is not None and any(
        (folder / f"{settings.family}.py").is_file() for folder in external_folders()
    )


def _search(name: str) -> str | None:
    """Search for a trainer as nnU-Net does, and return the reason if it is not found."""
    from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

    output = io.StringIO()  # it prints every folder it searches, and our modules the hint
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            recursive_find_trainer_class_by_name(name)
    except Exception as error:  # the module of another package can fail in any way
        if type(error) is RuntimeError and "Could not find" in str(error):
            return _hint_of_composition(name)
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return None


def _may_be_taken(name: str, known: set[str] | None) -> bool:
    """Return True unless the known names exclude another class under a name of this package."""
    own, _, other = TrainerName.split(name)
    tokens = own.split("_")
    parts = {"_".join(tokens[: end + 1]) for end in range(len(tokens))} | {other}
    ours = {part for part in parts if part.partition("_")[0] in FAMILIES}
    return bool(ours) and (known is None or not ours.isdisjoint(known))


def _taken(name: str) -> str:
    """Return the reason if nnU-Net finds somebody else's class under a name of this package, else ""."""
    from nnunet_cpr.nnunet.composition import TakenName, check_not_taken

    try:
        check_not_taken(name)
    except TakenName as error:
        return _shortened(name, error)
    return ""


def _hint(name: str, known: set[str]) -> str:
    """Return the correction of a misspelt name, an empty text for other names."""
    try:
        parse_trainer_name(name)
    except WrongName as error:
        return _shortened(name, error)
    other = TrainerName.split(name)[2]
    return f"nnU-Net finds no trainer {other}" if other and other not in known else ""


def _hint_of_composition(name: str) -> str:
    """Return the reason why a name is no trainer of this package, an empty text for other names."""
    from nnunet_cpr.nnunet.composition import resolve_settings

    try:
        resolve_settings(name)
    except WrongName as error:
        return _shortened(name, error)
    return ""


def _shortened(name: str, error: WrongName) -> str:
    return str(error).replace(f" in {name!r}", "").removeprefix(f"{name!r}: ").replace("; ", ", ")
