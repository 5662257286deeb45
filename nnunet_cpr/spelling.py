"""Spelling of names: ``0p5`` is 0.5, ``1en3`` is 0.001, and ``_on_`` precedes another trainer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from decimal import Decimal

from nnunet_cpr.refusals import Refusal, counted

OTHER_TRAINER = "_on_"
"""Text before the other trainer, at the end of a trainer's name."""

WORD = re.compile(r"[0-9A-Za-z]+")
NUMBER = re.compile(r"[0-9]+(?:p[0-9]+)?(?:en?[0-9]{1,3})?")
COUNT = re.compile(r"[0-9]{1,9}")

_MAX_NUMBERS = 10_000

NUMBER_HELP = "where <N> is a whole number such as 200 and <V> a number such as 0p5 or 1en3"


class WrongName(Refusal):
    """A name that cannot be parsed; the message suggests a correction."""


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


def parse_numbers(kind: str, text: str) -> list[int]:
    """Return the numbers of text such as ``1-3`` or ``0,2,5-7``.

    Args:
        kind: ``fold`` or ``seed``. ``all`` is the five folds of nnU-Net's split.
        text: numbers and ranges with commas between them. A single number that may be meant as a count
            is refused, other than that of one of nnU-Net's folds; ``3-3`` is the number 3 alone.

    Raises:
        ValueError: it is anything else, or a number occurs twice.

    Example:
        >>> parse_numbers("seed", "1-3")
        [1, 2, 3]
        >>> parse_numbers("seed", "3")
        Traceback (most recent call last):
        ...
        ValueError: 3 is one seed; for 3 seeds write 1-3, for seed 3 alone 3-3
    """
    text = "0-4" if (kind, text.strip()) == ("fold", "all") else text
    parts = [re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip()) for part in text.split(",")]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    count = sum(map(len, ranges))
    numbers = {number for each in ranges for number in each} if count <= _MAX_NUMBERS else ()
    if None in parts or not all(ranges) or len(numbers) < count:
        raise ValueError("expected different whole numbers such as 0,2 or 1-3")
    number = int(text) if text.strip().isdecimal() else 0
    start, largest = (0, 4) if kind == "fold" else (1, 1)
    if number > largest:
        raise ValueError(
            f"{number} is one {kind}; for {counted(number, kind)} write "
            f"{start}-{number - 1 + start}, for {kind} {number} alone {number}-{number}"
        )
    return sorted(numbers)


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


def nearest_first(given: str, names: Iterable[str]) -> list[str]:
    """Return names, beginning with those that resemble the given one.

    Example:
        >>> nearest_first("seed", ["name", "folds", "seeds"])
        ['seeds', 'name', 'folds']
    """
    names = list(names)
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.7)
    return [*near, *(name for name in names if name not in near)]


def with_suffix(name: str, suffix: str) -> str:
    """Return the name of a trainer with one more suffix, which comes before ``_on_<Trainer>``.

    Example:
        >>> with_suffix("nnUNetTrainerCPR_on_nnUNetTrainerDA5", "_seed1")
        'nnUNetTrainerCPR_seed1_on_nnUNetTrainerDA5'
    """
    own, ending, other = name.partition(OTHER_TRAINER)
    return f"{own}{suffix}{ending}{other}"
