"""From a name to its settings, or to a line that says what is wrong with it and what was meant."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

from nnunet_cpr._spelling import MAX_LENGTH, NUMBER_HELP, WrongName, check_length, split_word
from nnunet_cpr.names.method import MethodName
from nnunet_cpr.names.suffixes import Suffix

Name = TypeVar("Name", bound=MethodName)


def parse(kind: type[Name], name: str) -> Name | None:
    """The settings in a name of that kind, or None where it is not one, nor meant to be.

    Raises:
        WrongName: the name is almost right.
    """
    if len(name) > MAX_LENGTH and not name.startswith(kind.prefix):
        return None
    check_length(name)
    base, *tokens = name.split("_")
    if base not in kind.families:
        nearest = _nearest_family(kind, base)
        if nearest is None:
            return None
        raise WrongName(
            f"nothing is named {base!r}; did you mean {'_'.join([nearest, *tokens])}? "
            "Every suffix begins with an underscore"
        )
    values: dict[str, Any] = {}
    words: dict[str, str] = {}
    for token in tokens:
        suffix, value = _read(kind, token, name)
        if suffix.field in words:
            first = words[suffix.field]
            raise WrongName(f"_{first} and _{token} in {name!r} contradict each other; keep one of them")
        words[suffix.field] = token
        values[suffix.field] = value
    try:
        return kind(base, **values)
    except WrongName as error:
        raise WrongName(f"{name!r}: {error}") from None


def _read(kind: type[MethodName], token: str, name: str) -> tuple[Suffix, Any]:
    for suffix in kind.suffixes:
        text = suffix.match(token)
        if text is None:
            continue
        try:
            return suffix, suffix.read(text)
        except ValueError as error:
            raise WrongName(f"_{token} in {name!r}: {error}") from None
    raise WrongName(f"unknown suffix _{token} in {name!r}; {_advice(kind, token, name)}")


# What a wrong name was meant to be


def _nearest_family(kind: type[MethodName], base: str) -> str | None:
    prefix = kind.prefix.lower()
    if not base.lower().startswith(prefix):
        return None
    rests = {family[len(prefix) :].lower(): family for family in kind.families}
    rest = base[len(prefix) :].lower()
    if "cpr" in rest:
        optimizer = "adam" if "adam" in rest else "sgd"
        return next(f.name for f in kind.families.values() if f.cpr and f.optimizer == optimizer)
    close = difflib.get_close_matches(rest, rests, n=1, cutoff=0.6)
    return rests[close[0]] if close else None


def _advice(kind: type[MethodName], token: str, name: str) -> str:
    letters, number = split_word(token)
    by_letters = {suffix.before + suffix.after: suffix for suffix in kind.suffixes}
    for close in difflib.get_close_matches(letters, by_letters, n=3, cutoff=0.5):
        suffix = by_letters[close]
        guess = suffix.before + (number if suffix.placeholder else "") + suffix.after
        if _is_valid(suffix, guess):
            return f"did you mean {'_'.join(guess if t == token else t for t in name.split('_'))}?"
        if close == letters:
            return f"it is spelt {suffix.shape}, {NUMBER_HELP}"
    return f"the suffixes are {' '.join(suffix.shape for suffix in kind.suffixes)}, {NUMBER_HELP}"


def _is_valid(suffix: Suffix, token: str) -> bool:
    text = suffix.match(token)
    try:
        return text is not None and suffix.read(text) is not None
    except ValueError:
        return False
