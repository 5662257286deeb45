"""Spelling of numbers and words in names: ``0p5`` is 0.5, ``1en3`` is 0.001."""

from __future__ import annotations

import re
from decimal import Decimal

LONGEST = 255
"""Maximum number of characters of a name, since folders carry it."""

NUMBER = re.compile(r"[0-9]+(?:p[0-9]+)?(?:en?[0-9]{1,3})?")
COUNT = re.compile(r"[0-9]{1,9}")

EXPLANATION = "where <N> is a whole number such as 200 and <V> a number such as 0p5 or 1en3"


class WrongName(ValueError):
    """A name or word that cannot be read; the message is one line and suggests a correction."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def refuse_too_long(text: str) -> None:
    """Raise if a name has more than :data:`LONGEST` characters.

    Raises:
        WrongName: it has.
    """
    if len(text) > LONGEST:
        raise WrongName(f"{text[:40]!r}... has {len(text)} characters, and a name can have {LONGEST}")


def parse_number(text: str) -> float:
    """Return the number that ``text`` spells, such as 0.5 for ``0p5``."""
    return float(text.replace("p", ".").replace("en", "e-"))


def print_number(value: float) -> str:
    """Return the shortest spelling that reads back as the same float."""
    _, digits, exponent = Decimal(repr(float(value))).normalize().as_tuple()
    assert isinstance(exponent, int)  # the callers take only finite numbers
    if value == 0 or 1e-2 <= value < 1e6:
        text = format(Decimal(repr(float(value))), "f").removesuffix(".0")
    else:
        whole, *rest = map(str, digits)
        power = exponent + len(rest)
        text = whole + ("." + "".join(rest) if rest else "") + f"e{power}"
    return text.replace(".", "p").replace("e-", "en")


def split_word(token: str) -> tuple[str, str]:
    """Return the letters of a word and its number, with common misspellings corrected."""
    text = re.sub(r"(?<![0-9])\.", "0.", token.lower()).replace(".", "p").replace("e-", "en")
    text = re.sub(r"([0-9]+)k(?=$|[a-z])", r"\g<1>000", text)
    numbers = re.findall(r"[0-9]+(?:p[0-9]+)?(?:en?[0-9]+)?(?=$|[a-z])", text)
    return (text.replace(numbers[-1], "", 1), numbers[-1]) if numbers else (text, "")
