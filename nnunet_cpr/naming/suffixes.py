"""Suffixes: how one setting is written in a name and read from it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from nnunet_cpr.baselines import BASELINES, Entry
from nnunet_cpr.bounds import BOUNDS, Bound
from nnunet_cpr.regularizers import REGULARIZERS


class WrongName(ValueError):
    """A name that is almost a right one; its message, one line, says what is wrong and what is meant."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


@dataclass(frozen=True)
class BaselineChoice:
    """One of :data:`~nnunet_cpr.baselines.BASELINES`, with its number where it has one."""

    keyword: str
    value: float | None = None


# Numbers

_NUMBER = re.compile(r"[0-9]+(?:p[0-9]+)?(?:en?[0-9]{1,3})?")


def _parse_number(text: str) -> float:
    return float(text.replace("p", ".").replace("en", "e-"))


def _print_number(value: float) -> str:
    """The shortest decimal that reads back as the same float, in nnU-Net's spelling."""
    _, digits, exponent = Decimal(repr(float(value))).normalize().as_tuple()
    assert isinstance(exponent, int)  # the constructors take only finite numbers
    if value == 0 or 1e-2 <= value < 1e6:
        text = format(Decimal(repr(float(value))), "f").removesuffix(".0")
    else:
        whole, *rest = map(str, digits)
        power = exponent + len(rest)
        text = whole + ("." + "".join(rest) if rest else "") + f"e{power}"
    return text.replace(".", "p").replace("e-", "en")


# One suffix


@dataclass(frozen=True)
class Suffix:
    """One suffix: ``before`` + value + ``after``, which sets one field of a :class:`MethodName`."""

    field: str
    before: str
    pattern: re.Pattern[str]
    read: Callable[[str], Any]
    write: Callable[[Any], str | None]
    after: str = ""
    placeholder: str = ""
    smallest: int | None = None
    """Of a count, the least that it can be."""

    @property
    def shape(self) -> str:
        return f"_{self.before}{self.placeholder}{self.after}"

    def match(self, token: str) -> str | None:
        """The value's text, or None where the token is not of this suffix."""
        if not token.startswith(self.before) or not token.endswith(self.after):
            return None
        text = token[len(self.before) : len(token) - len(self.after)]
        return text if self.pattern.fullmatch(text) else None


_COUNT = re.compile(r"[0-9]{1,9}")
_NOTHING = re.compile(r"")


def _at_least(smallest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise ValueError(f"must be at least {smallest}")
        return value

    return read


def _positive(text: str) -> float:
    value = _parse_number(text)
    if not (0 < value < math.inf):
        raise ValueError("must be positive and finite")
    return value


def _not_negative(text: str) -> float:
    return 0.0 if float(_parse_number(text)) == 0 else _positive(text)


def count(field: str, before: str, after: str = "", smallest: int = 1) -> Suffix:
    """A suffix with a whole number."""
    return Suffix(field, before, _COUNT, _at_least(smallest), str, after, "<N>", smallest)


def number(field: str, before: str, read: Callable[[str], float] = _positive) -> Suffix:
    """A suffix with a positive number."""
    return Suffix(field, before, _NUMBER, read, _print_number, placeholder="<V>")


def _bound(bound: type[Bound]) -> Suffix:
    setting = dataclasses.fields(bound)[0].name
    counted = dataclasses.fields(bound)[0].type == "int"

    def write(value: Bound) -> str | None:
        if type(value) is not bound:
            return None
        if value != bound(**{setting: getattr(value, setting)}):
            raise WrongName(f"no name can say {value!r}")
        number = getattr(value, setting)
        return str(number) if counted else _print_number(number)

    def read(text: str) -> Bound:
        return bound(**{setting: int(text) if counted else _parse_number(text)})

    pattern, placeholder = (_COUNT, "<N>") if counted else (_NUMBER, "<V>")
    return Suffix("kappa", bound.keyword, pattern, read, write, placeholder=placeholder)


def _baseline(entry: Entry) -> Suffix:
    if entry.setting is None:
        return word("baseline", entry.keyword, BaselineChoice(entry.keyword))

    def read(text: str) -> BaselineChoice:
        return BaselineChoice(entry.keyword, _positive(text))

    def write(value: BaselineChoice) -> str | None:
        return _print_number(value.value) if value.keyword == entry.keyword and value.value else None

    return Suffix("baseline", entry.keyword, _NUMBER, read, write, placeholder="<V>")


def word(field: str, word: str, value: Any) -> Suffix:
    """A suffix that is there or is not."""
    return Suffix(field, word, _NOTHING, lambda _: value, lambda v: "" if v == value else None)


METHOD_SUFFIXES: tuple[Suffix, ...] = (
    *(_bound(bound) for bound in BOUNDS.values()),
    *(word("regularizer", name, name) for name in REGULARIZERS),
    number("mu", "mu"),
    word("adaptive", "ada", True),
    *(_baseline(entry) for entry in BASELINES.values()),
    number("lr", "lr"),
    number("weight_decay", "wd", _not_negative),
    count("warmup", "warmup", smallest=0),
    count("seed", "seed", smallest=0),
)
"""What every kind of names shares. A bound, measure or baseline is here once it is in its registry."""
