"""Table of the suffixes of trainer names, for the terminal and the documentation."""

from __future__ import annotations

from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.names.suffixes import SUFFIXES, Suffix
from nnunet_cpr.names.value import TrainerName
from nnunet_cpr.spelling import OTHER_TRAINER, WrongName


def suffix_table() -> list[tuple[str, str, str]]:
    """Return a row for each suffix: its syntax, the families that take it, and its meaning.

    Example:
        >>> suffix_table()[0]
        ('_k<V>', 'with CPR', 'bound: the same value for every parameter matrix')
    """
    rows = [(suffix.syntax, _describe_families(suffix), suffix.meaning) for suffix in SUFFIXES]
    return [*rows, (f"{OTHER_TRAINER}<Trainer>", "all", "like another trainer; the last suffix")]


def _describe_families(suffix: Suffix) -> str:
    taken = [name for name in FAMILIES if _takes(name, suffix)]
    refused = [name for name in FAMILIES if name not in taken]
    with_cpr = [family.name for family in FAMILIES.values() if family.cpr]
    if not refused:
        return "all"
    if taken == with_cpr:
        return "with CPR"
    if refused == with_cpr:
        return "without CPR"
    if set(refused) == {*with_cpr, "nnUNetTrainerAMOS"}:
        return "without CPR (not AMOS)"
    short = [name.removeprefix("nnUNetTrainer") for name in (refused if len(refused) <= 2 else taken)]
    return "all but " + " and ".join(short) if len(refused) <= 2 else ", ".join(short)


def _takes(family: str, suffix: Suffix) -> bool:
    value = {"<N>": "10", "<V>": "0p5", "<Word>": "Liver"}.get(suffix.placeholder, "")
    sample = suffix.before + value + suffix.after
    try:
        TrainerName(family, **{suffix.field: suffix.parse(sample)})
    except WrongName:
        return False
    return True
