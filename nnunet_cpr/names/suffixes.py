"""Suffixes: the notation of one setting in a name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nnunet_cpr._spelling import COUNT, NUMBER, WrongName, parse_number, print_number
from nnunet_cpr._validation import positive_number
from nnunet_cpr.baselines.registry import BASELINES, BaselineEntry
from nnunet_cpr.bounds import BOUNDS, Bound, KappaWS, has_count

REGULARIZER_WORDS = ("l2", "l1", "std", "huber")
"""Keys of :data:`~nnunet_cpr.regularizers.REGULARIZERS`, whose module imports torch."""


@dataclass(frozen=True)
class BaselineChoice:
    """Comparison method of a name.

    Attributes:
        keyword: key of :data:`~nnunet_cpr.baselines.registry.BASELINES`.
        value: its setting, None if it has none.
    """

    keyword: str
    value: float | None = None


@dataclass(frozen=True)
class WarmStartShare:
    """Warm start of a name, as a share of the training, whose length the name may not contain.

    Attributes:
        percent: share of the optimizer steps in percent, above 0 and below 100.

    Raises:
        WrongName: ``percent`` is out of range.

    Example:
        >>> WarmStartShare(2).resolve(total_steps=250_000)
        KappaWS(steps=5000)
    """

    percent: float

    def __post_init__(self) -> None:
        if not 0 < self.percent < 100:
            raise WrongName(
                f"warm start: expected a share above 0 and below 100 percent, got {self.percent:g}"
            )
        object.__setattr__(self, "percent", float(self.percent))

    def resolve(self, total_steps: int) -> KappaWS:
        """Return the bound for a training of ``total_steps`` optimizer steps, set after at least one."""
        return KappaWS(max(1, round(self.percent * total_steps / 100)))


@dataclass(frozen=True)
class Suffix:
    """Notation of one field of a :class:`MethodName`: ``before`` + value + ``after``.

    Attributes:
        field: name of the field.
        meaning: the setting in a few words.
        before, after: fixed text around the value.
        pattern: regular expression of the value's text.
        parse: converts the text to the value; raises ValueError if it is out of range.
        format: converts the value to text; returns None if another suffix of the field writes it.
        placeholder: ``<N>`` for a whole number, ``<V>`` for a number, empty for a word.
        minimum: lower limit of a whole number.
    """

    field: str
    meaning: str
    before: str
    pattern: re.Pattern[str]
    parse: Callable[[str], Any]
    format: Callable[[Any], str | None]
    after: str = ""
    placeholder: str = ""
    minimum: int | None = None

    @property
    def syntax(self) -> str:
        """Notation with a placeholder, such as ``_ws<N>``."""
        return f"_{self.before}{self.placeholder}{self.after}"

    def match(self, token: str) -> str | None:
        """Return the text of the value, None if the token is another suffix."""
        if not token.startswith(self.before) or not token.endswith(self.after):
            return None
        text = token[len(self.before) : len(token) - len(self.after)]
        return text if self.pattern.fullmatch(text) else None


def count(field: str, meaning: str, before: str, after: str = "", minimum: int = 1) -> Suffix:
    """Return the suffix of a whole number.

    Example:
        >>> count("epochs", "number of epochs", "", "epochs").syntax
        '_<N>epochs'
    """

    def parse(text: str) -> int:
        if int(text) < minimum:
            raise ValueError(f"expected a whole number, {minimum} or above, got {text}")
        return int(text)

    return Suffix(field, meaning, before, COUNT, parse, str, after, "<N>", minimum)


def number(field: str, meaning: str, before: str, allow_zero: bool = False) -> Suffix:
    """Return the suffix of a positive number."""

    def parse(text: str) -> float:
        return positive_number(field, parse_number(text), allow_zero=allow_zero)

    return Suffix(field, meaning, before, NUMBER, parse, print_number, placeholder="<V>")


def word(field: str, meaning: str, word: str, value: Any) -> Suffix:
    """Return the suffix of a fixed value."""

    def format(given: Any) -> str | None:
        return "" if given == value else None

    return Suffix(field, meaning, word, re.compile(""), lambda _: value, format)


def _bound(bound: type[Bound]) -> Suffix:
    setting = dataclasses.fields(bound)[0].name
    is_count = has_count(bound)

    def parse(text: str) -> Bound:
        return bound(**{setting: int(text) if is_count else parse_number(text)})

    def format(value: Bound) -> str | None:
        if type(value) is not bound:
            return None
        number = getattr(value, setting)
        if value != bound(**{setting: number}):
            raise WrongName(f"{value!r} cannot be written in a name")
        return str(number) if is_count else print_number(number)

    pattern, placeholder = (COUNT, "<N>") if is_count else (NUMBER, "<V>")
    meaning = f"bound: {bound.title}"
    return Suffix("kappa", meaning, bound.keyword, pattern, parse, format, placeholder=placeholder)


def _baseline(entry: BaselineEntry) -> Suffix:
    if entry.setting is None:
        return word("baseline", entry.title, entry.keyword, BaselineChoice(entry.keyword))

    def parse(text: str) -> BaselineChoice:
        value = positive_number(entry.keyword, int(text) if entry.is_count else parse_number(text))
        return BaselineChoice(entry.keyword, value)

    def format(value: BaselineChoice) -> str | None:
        if value.keyword != entry.keyword or not value.value:
            return None
        return f"{value.value:.0f}" if entry.is_count else print_number(value.value)

    pattern, placeholder = (COUNT, "<N>") if entry.is_count else (NUMBER, "<V>")
    meaning = f"{entry.title}; {placeholder[1]} is {entry.setting}"
    return Suffix("baseline", meaning, entry.keyword, pattern, parse, format, placeholder=placeholder)


def _warm_start_share() -> Suffix:
    def format(value: Any) -> str | None:
        return print_number(value.percent) if isinstance(value, WarmStartShare) else None

    return Suffix(
        "kappa",
        "bound: R after a share of the training (warm start); V is in percent",
        KappaWS.keyword,
        NUMBER,
        lambda text: WarmStartShare(parse_number(text)),
        format,
        after="p",
        placeholder="<V>",
    )


METHOD_SUFFIXES: tuple[Suffix, ...] = (
    *(_bound(bound) for bound in BOUNDS.values()),
    _warm_start_share(),
    *(word("regularizer", f"regularization function {name}", name, name) for name in REGULARIZER_WORDS),
    number("mu", "update rate of the multipliers", "mu"),
    word("adaptive", "adaptive bounds (AdaCPR)", "ada", True),
    *(_baseline(entry) for entry in BASELINES.values()),
    number("lr", "highest learning rate", "lr"),
    number("momentum", "momentum of SGD or Muon, below 1", "momentum"),
    number("weight_decay", "weight decay", "wd", allow_zero=True),
    count("warmup", "steps of learning-rate warm-up", "warmup", minimum=0),
    count("seed", "seed of weights, data and augmentation", "seed", minimum=0),
)
"""Suffixes of all kinds of names. Entries of the registries of bounds and comparison methods are added
automatically."""
