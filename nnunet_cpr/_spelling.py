"""Spelling of names: ``0p5`` is 0.5, ``1en3`` is 0.001, and ``_on_`` precedes another trainer."""

from __future__ import annotations

import re
from decimal import Decimal

OTHER_TRAINER = "_on_"
"""Text before the other trainer, at the end of a trainer's name."""

NUMBER = re.compile(r"[0-9]+(?:p[0-9]+)?(?:en?[0-9]{1,3})?")
COUNT = re.compile(r"[0-9]{1,9}")

NUMBER_HELP = "where <N> is a whole number such as 200 and <V> a number such as 0p5 or 1en3"


class WrongName(ValueError):
    """A name that cannot be parsed; the message is one line and suggests a correction."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def parse_number(text: str) -> float:
    """Return the number that ``text`` spells.

    Example:
        >>> parse_number("0p5"), parse_number("1en3")
        (0.5, 0.001)
    """
    return float(text.replace("p", ".").replace("en", "e-"))


def print_number(value: float) -> str:
    """Return the shortest spelling that :func:`parse_number` reads as the same float.

    Example:
        >>> print_number(0.5), print_number(0.001), print_number(200)
        ('0p5', '1en3', '200')
    """
    _, digits, exponent = Decimal(repr(float(value))).normalize().as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f"expected a finite number, got {value:g}")
    if value == 0 or 1e-2 <= value < 1e6:
        text = format(Decimal(repr(float(value))), "f").removesuffix(".0")
    else:
        whole, *rest = map(str, digits)
        power = exponent + len(rest)
        text = whole + ("." + "".join(rest) if rest else "") + f"e{power}"
    return text.replace(".", "p").replace("e-", "en")


def split_word(token: str) -> tuple[str, str]:
    """Return the letters and the number of a word, with common misspellings corrected.

    Example:
        >>> split_word("WS1k"), split_word("k.5")
        (('ws', '1000'), ('k', '0p5'))
    """
    text = re.sub(r"(?<![0-9])\.", "0.", token.lower()).replace(".", "p").replace("e-", "en")
    text = re.sub(r"([0-9]+)k(?=$|[a-z])", r"\g<1>000", text)
    numbers = re.findall(r"[0-9]+(?:p[0-9]+)?(?:en?[0-9]+)?(?=$|[a-z])", text)
    return (text.replace(numbers[-1], "", 1), numbers[-1]) if numbers else (text, "")


def with_seed(name: str, seed: int) -> str:
    """Return the name of a trainer with ``_seed<N>``, which comes before ``_on_<Trainer>``.

    Example:
        >>> with_seed("nnUNetTrainerCPR_on_nnUNetTrainerDA5", 1)
        'nnUNetTrainerCPR_seed1_on_nnUNetTrainerDA5'
    """
    own, ending, other = name.partition(OTHER_TRAINER)
    return f"{own}_seed{seed}{ending}{other}"
