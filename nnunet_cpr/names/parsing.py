"""Parsing of names, with a suggestion for a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from nnunet_cpr._spelling import (
    MAX_LENGTH,
    NUMBER_HELP,
    OTHER_TRAINER,
    WrongName,
    check_length,
    split_word,
)
from nnunet_cpr.names.method import MethodName
from nnunet_cpr.names.suffixes import Suffix

_SPELLED_OUT = {"warmstart": "ws", "learningrate": "lr", "weightdecay": "wd"}
"""Words that users may write in place of a suffix, which resemble another one."""

Name = TypeVar("Name", bound=MethodName)


def parse_name(kind: type[Name], name: str) -> Name | None:
    """Parse a name.

    Args:
        kind: subclass of :class:`MethodName`, which defines the families and suffixes.
        name: the text.

    Returns:
        The settings; None if the name does not resemble one of this kind.

    Raises:
        WrongName: the name is misspelt, or its settings contradict each other.

    Example:
        >>> from nnunet_cpr.names.run_name import RunName
        >>> parse_name(RunName, "AdamCPR_lr1en3").lr
        0.001
    """
    if len(name) > MAX_LENGTH and not name.startswith(kind.prefix):
        return None
    check_length(name)
    own, ending, other = kind.split(name)
    base, *tokens = own.split("_")
    if base not in kind.families:
        nearest = _nearest_family(kind, base)
        if nearest is None:
            return None
        raise WrongName(
            f"unknown name {base!r}; did you mean {'_'.join([nearest, *tokens])}{ending}{other}? "
            "Every suffix starts with an underscore"
        )
    values = parse_suffixes(kind, tokens, name)
    if ending:
        values["on"] = other
    try:
        return kind(base, **values)
    except WrongName as error:
        raise WrongName(f"{name!r}: {error}") from None


def parse_suffixes(kind: type[MethodName], tokens: Sequence[str], name: str) -> dict[str, Any]:
    """Return the values of fields that suffixes of a name set.

    Args:
        kind: subclass of :class:`MethodName`, which defines the suffixes.
        tokens: the suffixes, without their underscores.
        name: the whole name, for messages.

    Raises:
        WrongName: a suffix is unknown, or two of them set the same field.
    """
    values: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for token in tokens:
        suffix, value = _parse_suffix(kind, token, name)
        if suffix.field in seen:
            first = seen[suffix.field]
            raise WrongName(f"_{first} and _{token} in {name!r} contradict each other; keep one of them")
        seen[suffix.field] = token
        values[suffix.field] = value
    return values


def split_suffixes(kind: type[MethodName], name: str) -> Iterator[tuple[str, str]]:
    """Yield the ways to split a name into a class name and one or more suffixes, fewest suffixes first.

    Example:
        >>> from nnunet_cpr.names.run_name import RunName
        >>> list(split_suffixes(RunName, "Mine_lr1en3_seed1"))
        [('Mine_lr1en3', 'seed1'), ('Mine', 'lr1en3_seed1')]
    """
    tokens = name.split("_")
    for end in range(len(tokens) - 1, 0, -1):
        if not _matches_suffix(kind, tokens[end]):
            return
        yield "_".join(tokens[:end]), "_".join(tokens[end:])


def _parse_suffix(kind: type[MethodName], token: str, name: str) -> tuple[Suffix, Any]:
    for suffix in kind.suffixes:
        text = suffix.match(token)
        if text is None:
            continue
        try:
            return suffix, suffix.parse(text)
        except ValueError as error:
            raise WrongName(f"_{token} in {name!r}: {error}") from None
    raise WrongName(f"unknown suffix _{token} in {name!r}; {_suggestion(kind, token, name)}")


def _nearest_family(kind: type[MethodName], base: str) -> str | None:
    prefix = kind.prefix.lower()
    if not base.lower().startswith(prefix):
        return None
    rests = {family[len(prefix) :].lower(): family for family in kind.families}
    rest = base[len(prefix) :].lower()
    if close := difflib.get_close_matches(rest, rests, n=1, cutoff=0.85):
        return rests[close[0]]
    if "cpr" in rest:
        optimizer = next((word for word in ("adam", "muon") if word in rest), "sgd")
        return next(f.name for f in kind.families.values() if f.cpr and f.optimizer == optimizer)
    close = difflib.get_close_matches(rest, rests, n=1, cutoff=0.6)
    return rests[close[0]] if close else None


def _suggestion(kind: type[MethodName], token: str, name: str) -> str:
    own, ending, other = kind.split(name)
    letters, number = split_word(token)
    letters = _SPELLED_OUT.get(letters.lower(), letters)
    by_letters = {suffix.before + suffix.after: suffix for suffix in kind.suffixes}
    if token != token.lower() and letters not in by_letters and kind.prefix:
        return _advise_other_trainer(kind, token, own)
    for close in difflib.get_close_matches(letters, by_letters, n=3, cutoff=0.5):
        suffix = by_letters[close]
        guess = suffix.before + (number if suffix.placeholder else "") + suffix.after
        if _is_valid(suffix, guess):
            corrected = "_".join(guess if t == token else t for t in own.split("_"))
            return f"did you mean {corrected}{ending}{other}?"
        if close == letters:
            return f"write it as {suffix.syntax}, {NUMBER_HELP}"
    choices = [suffix.syntax for suffix in kind.suffixes]
    if kind.prefix:
        choices.append(f"{OTHER_TRAINER}<Trainer>")
    return f"choose from {' '.join(choices)}, {NUMBER_HELP}"


def _advise_other_trainer(kind: type[MethodName], token: str, own: str) -> str:
    """Return advice for a name that contains another trainer's name, such as ``_DA5``."""
    before, _, rest = own.partition(f"_{token}")
    suffixes = [t for t in rest.split("_") if t and _matches_suffix(kind, t)]
    words = [t for t in rest.split("_") if t and not _matches_suffix(kind, t)]
    trainer = "_".join([token, *words])
    if not trainer.startswith(kind.prefix):
        trainer = kind.prefix + ("_" if trainer[0].islower() else "") + trainer
    name = "_".join([before, *suffixes])
    return (
        f"to train like another trainer, end the name with {OTHER_TRAINER}<Trainer>, such as "
        f"{name}{OTHER_TRAINER}{trainer}"
    )


def _matches_suffix(kind: type[MethodName], token: str) -> bool:
    return any(_is_valid(suffix, token) for suffix in kind.suffixes)


def _is_valid(suffix: Suffix, token: str) -> bool:
    text = suffix.match(token)
    try:
        return text is not None and suffix.parse(text) is not None
    except ValueError:
        return False
