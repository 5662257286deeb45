"""From a name to its settings, or to a line that says what is wrong with it and what was meant."""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeVar

from nnunet_cpr.bounds import Bound
from nnunet_cpr.naming.method import MethodName
from nnunet_cpr.naming.suffixes import METHOD_SUFFIXES, Suffix, WrongName

Name = TypeVar("Name", bound=MethodName)

LONGEST = 255
"""Characters of a name: folders are named after it."""


def parse(kind: type[Name], name: str) -> Name | None:
    """The settings in a name of that kind, or None where it is not one, nor meant to be.

    Raises:
        WrongName: the name is almost right.
    """
    if len(name) > LONGEST:
        if not name.startswith(kind.prefix):
            return None
        raise _too_long(name)
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


def read_bound(text: str) -> Bound:
    """The bound that a word such as ``ws1000``, ``ip50``, ``k0p005`` or ``ki0x2`` says.

    Raises:
        WrongName: it says none.
    """
    if len(text) > LONGEST:
        raise _too_long(text)
    bounds = [suffix for suffix in METHOD_SUFFIXES if suffix.field == "kappa"]
    for suffix in bounds:
        value = suffix.match(text)
        if value is None:
            continue
        try:
            return suffix.read(value)
        except ValueError as error:
            raise WrongName(f"the bound {text!r}: {error}") from None
    guess = "".join(_split(text))
    shapes = " ".join(suffix.before + suffix.placeholder for suffix in bounds)
    is_meant = any(_is_valid(suffix, guess) for suffix in bounds)
    advice = f"did you mean {guess}?" if is_meant else f"the bounds are {shapes}, {_SPELLING}"
    raise WrongName(f"no bound is written {text!r}; {advice}")


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


def _too_long(name: str) -> WrongName:
    return WrongName(f"{name[:40]!r}... has {len(name)} characters, and a name can have {LONGEST}")


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
    letters, number = _split(token)
    by_letters = {suffix.before + suffix.after: suffix for suffix in kind.suffixes}
    for close in difflib.get_close_matches(letters, by_letters, n=3, cutoff=0.5):
        suffix = by_letters[close]
        guess = suffix.before + (number if suffix.placeholder else "") + suffix.after
        if _is_valid(suffix, guess):
            return f"did you mean {'_'.join(guess if t == token else t for t in name.split('_'))}?"
        if close == letters:
            return f"it is spelt {suffix.shape}, {_SPELLING}"
    return f"the suffixes are {' '.join(suffix.shape for suffix in kind.suffixes)}, {_SPELLING}"


_SPELLING = "where <N> is a whole number such as 200 and <V> a number such as 0p5 or 1en3"


def _split(token: str) -> tuple[str, str]:
    """The letters of a suffix and the number in it, the number's spelling corrected."""
    text = re.sub(r"(?<![0-9])\.", "0.", token.lower()).replace(".", "p").replace("e-", "en")
    text = re.sub(r"([0-9]+)k(?=$|[a-z])", r"\g<1>000", text)
    numbers = re.findall(r"[0-9]+(?:p[0-9]+)?(?:en?[0-9]+)?(?=$|[a-z])", text)
    return (text.replace(numbers[-1], "", 1), numbers[-1]) if numbers else (text, "")


def _is_valid(suffix: Suffix, token: str) -> bool:
    text = suffix.match(token)
    try:
        return text is not None and suffix.read(text) is not None
    except ValueError:
        return False
