"""Suffixes: how one setting is written in a name and read from it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nnunet_cpr._spelling import COUNT, NUMBER, WrongName, parse_number, print_number
from nnunet_cpr.baselines import BASELINES, BaselineEntry
from nnunet_cpr.bounds import BOUNDS, Bound
from nnunet_cpr.regularizers import REGULARIZERS


@dataclass(frozen=True)
class BaselineChoice:
    """One of :data:`~nnunet_cpr.baselines.BASELINES`, with its number where it has one."""

    keyword: str
    value: float | None = None


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


_NOTHING = re.compile(r"")


def _at_least(smallest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise ValueError(f"must be at least {smallest}")
        return value

    return read


def _positive(text: str) -> float:
    value = parse_number(text)
    if not (0 < value < math.inf):
        raise ValueError("must be positive and finite")
    return value


def _not_negative(text: str) -> float:
    return 0.0 if float(parse_number(text)) == 0 else _positive(text)


def count(field: str, before: str, after: str = "", smallest: int = 1) -> Suffix:
    """A suffix with a whole number."""
    return Suffix(field, before, COUNT, _at_least(smallest), str, after, "<N>", smallest)


def number(field: str, before: str, read: Callable[[str], float] = _positive) -> Suffix:
    """A suffix with a positive number."""
    return Suffix(field, before, NUMBER, read, print_number, placeholder="<V>")


def _bound(bound: type[Bound]) -> Suffix:
    setting = dataclasses.fields(bound)[0].name
    counted = dataclasses.fields(bound)[0].type == "int"

    def write(value: Bound) -> str | None:
        if type(value) is not bound:
            return None
        if value != bound(**{setting: getattr(value, setting)}):
            raise WrongName(f"no name can say {value!r}")
        number = getattr(value, setting)
        return str(number) if counted else print_number(number)

    def read(text: str) -> Bound:
        return bound(**{setting: int(text) if counted else parse_number(text)})

    pattern, placeholder = (COUNT, "<N>") if counted else (NUMBER, "<V>")
    return Suffix("kappa", bound.keyword, pattern, read, write, placeholder=placeholder)


def _baseline(entry: BaselineEntry) -> Suffix:
    if entry.setting is None:
        return word("baseline", entry.keyword, BaselineChoice(entry.keyword))

    def read(text: str) -> BaselineChoice:
        return BaselineChoice(entry.keyword, _positive(text))

    def write(value: BaselineChoice) -> str | None:
        return print_number(value.value) if value.keyword == entry.keyword and value.value else None

    return Suffix("baseline", entry.keyword, NUMBER, read, write, placeholder="<V>")


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
