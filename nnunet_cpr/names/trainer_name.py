"""Names of nnU-Net trainers: ``nnUNetTrainerCPR_ws2000_100epochs_on_nnUNetTrainerDA5``.

A name is a family, its suffixes, and last ``_on_`` and the class name of a base trainer, another trainer
of nnU-Net. The training keeps everything of the base trainer except the optimizer or its regularization.

nnU-Net's command has no option for the settings of a trainer, names result folders after the trainer and
searches for it by name at inference. The name therefore holds the settings. This module does not import
nnU-Net.

Table of the suffixes of trainer names, for the terminal and the documentation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from nnunet_cpr.names.settings_and_defaults import BASE_TRAINER, FAMILIES, TrainerName
from nnunet_cpr.names.suffixes import SUFFIXES, Suffix, find_suffix
from nnunet_cpr.names.suggestions import nearest_family, suggest_suffix
from nnunet_cpr.spelling import OTHER_TRAINER, WrongName, with_suffix

__all__ = [
    "TrainerName",
    "parse_name",
    "parse_suffixes",
    "parse_trainer_name",
    "split_suffixes",
    "with_pretrained",
]

Name = TypeVar("Name", bound=TrainerName)


def parse_trainer_name(name: str) -> TrainerName | None:
    """Parse the name of a trainer.

    Returns:
        The settings; None if the name does not resemble a trainer of this package.

    Raises:
        WrongName: the name is misspelt, or its settings contradict each other.

    Example:
        >>> parse_trainer_name("nnUNetTrainerCPR_100epochs_on_nnUNetTrainerDA5").on
        'nnUNetTrainerDA5'
        >>> parse_trainer_name("nnUNetTrainerDA5") is None
        True
    """
    return parse_name(TrainerName, name)


def parse_name(kind: type[Name], name: str) -> Name | None:
    """Parse a name of one kind, as :func:`parse_trainer_name` does."""
    if not name.lower().startswith(kind.prefix.lower()):
        return None
    own, ending, other = kind.split(name)
    family, *tokens = own.split("_")
    if family not in kind.families:
        nearest = nearest_family(kind.families, kind.prefix, family)
        if nearest is None:
            return None
        raise WrongName(
            f"unknown name {family!r}",
            f"did you mean {nearest}{name[len(family) :]}? Every suffix starts with an underscore",
        )
    timm = None
    if kind.families[family].optimizer == "timm":
        if not tokens or find_suffix(kind.suffixes, tokens[0]):
            raise WrongName(f"{name!r} names no optimizer of timm", f"write it first, as {family}_lion")
        timm = tokens.pop(0)
    if ending:
        tokens.append(BASE_TRAINER.before + other)
    settings = parse_suffixes(kind, tokens, name)
    try:
        return kind(family, timm, **settings)
    except WrongName as error:
        raise WrongName(f"{name!r}: {error}") from None


def parse_suffixes(kind: type[TrainerName], tokens: Sequence[str], name: str) -> dict[str, Any]:
    """Return the settings that suffixes of a name give, by field.

    Args:
        kind: :class:`TrainerName` or a subclass, which defines the suffixes.
        tokens: the suffixes, without their underscores.
        name: the whole name, for messages.

    Raises:
        WrongName: a suffix is unknown, or two of them give the same setting.

    Example:
        >>> parse_suffixes(TrainerName, ["lr1en3", "seed1"], "Mine_lr1en3_seed1")
        {'lr': 0.001, 'seed': 1}
    """
    settings: dict[str, Any] = {}
    given: dict[str, str] = {}
    for token in tokens:
        suffix = find_suffix(kind.suffixes, token)
        if suffix is None:
            advice = suggest_suffix(kind.suffixes, kind.prefix, token, name)
            raise WrongName(f"unknown suffix _{token} in {name!r}", f"{advice}")
        first = given.setdefault(suffix.field, token)
        if suffix.field in settings:
            raise WrongName(
                f"_{first} and _{token} in {name!r} contradict each other", "keep one of them"
            )
        try:
            settings[suffix.field] = suffix.parse(token)
        except ValueError as error:
            raise WrongName(f"_{token} in {name!r}: {error}") from None
    return settings


def split_suffixes(kind: type[TrainerName], name: str) -> Iterator[tuple[str, str]]:
    """Yield the ways to split a name into a class name and one or more suffixes, fewest suffixes first.

    Example:
        >>> list(split_suffixes(TrainerName, "Mine_lr1en3_seed1"))
        [('Mine_lr1en3', 'seed1'), ('Mine', 'lr1en3_seed1')]
    """
    tokens = name.split("_")
    for end in range(len(tokens) - 1, 0, -1):
        if find_suffix(kind.suffixes, tokens[end]) is None:
            return
        yield "_".join(tokens[:end]), "_".join(tokens[end:])


def with_pretrained(name: str, weights: str) -> str:
    """Return the name of a trainer with ``_pre<Word>``, so that its runs have a folder of their own.

    Args:
        name: the trainer, perhaps with ``_pre<Word>`` already.
        weights: text that identifies the pretrained weights, whose hash is the word.

    Example:
        >>> with_pretrained("nnUNetTrainerCPR", "Dataset003_Liver/checkpoint_final.pth")
        'nnUNetTrainerCPR_prec82e9328'
        >>> with_pretrained("nnUNetTrainerCPR_preLiver", "Dataset003_Liver/checkpoint_final.pth")
        'nnUNetTrainerCPR_preLiver'
    """
    found = [find_suffix(TrainerName.suffixes, token) for token in TrainerName.split(name)[0].split("_")]
    if any(suffix is not None and suffix.field == "pretrained" for suffix in found):
        return name
    return with_suffix(name, f"_pre{hashlib.sha256(weights.encode()).hexdigest()[:8]}")


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
