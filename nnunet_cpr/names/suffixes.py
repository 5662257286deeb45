"""Suffixes of names, each the notation of one setting."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from nnunet_cpr.baselines.registry import BASELINES, BaselineEntry
from nnunet_cpr.cpr.bounds import BOUNDS, Bound, KappaWS, has_count
from nnunet_cpr.refusals import positive_integer, positive_number
from nnunet_cpr.spelling import COUNT, NUMBER, WORD, parse_number, print_number

REGULARIZER_WORDS = ("l2", "l1", "std", "huber")
"""Keys of :data:`~nnunet_cpr.regularizers.REGULARIZERS`, whose module imports torch."""

_NOTATIONS: dict[str, tuple[re.Pattern[str], Callable[[str], Any], Callable[[Any], str]]] = {
    "": (re.compile(""), lambda _: None, lambda _: ""),
    "<N>": (COUNT, int, "{:.9g}".format),
    "<V>": (NUMBER, parse_number, print_number),
    "<Word>": (WORD, str, str),
    "<Trainer>": (re.compile(".*"), str, str),
}
"""For each placeholder, the pattern of its text, and the functions that parse and print it."""


def number_below(limit: float, name: str, value: float) -> float:
    """Return a positive number below a limit.

    Args:
        limit: the number above the range.
        name: the setting, for the error message.
        value: the number.

    Raises:
        ValueError: it is out of range.

    Example:
        >>> number_below(1, "momentum", 0.9)
        0.9
    """
    if value >= limit:
        raise ValueError(f"{name}: expected a number below {limit:g}, got {value:g}")
    return positive_number(name, value)


@dataclass(frozen=True)
class BaselineChoice:
    """Comparison method of a name.

    Attributes:
        keyword: key of :data:`~nnunet_cpr.baselines.registry.BASELINES`.
        value: its setting, None if it has none.

    Raises:
        ValueError: ``value`` is not positive and finite.
    """

    keyword: str
    value: float | None = None

    def __post_init__(self) -> None:
        if self.value is not None:
            positive_number(self.keyword, self.value)

    @property
    def needs_length(self) -> bool:
        """True if the method follows the length of the training."""
        return BASELINES[self.keyword].needs_length


@dataclass(frozen=True)
class Share:
    """Share of a training, whose length the name may not contain.

    Attributes:
        percent: share of the optimizer steps in percent, above 0 and below 100.

    Raises:
        ValueError: ``percent`` is out of range.
    """

    percent: float

    def __post_init__(self) -> None:
        number_below(100, "percent", self.percent)


class WarmStartShare(Share):
    """Warm start of a name, as a share of the training.

    Example:
        >>> WarmStartShare(2).resolve(total_steps=250_000)
        KappaWS(steps=5000)
    """

    def resolve(self, total_steps: int) -> KappaWS:
        """Return the bound for a training of ``total_steps`` optimizer steps, set after at least one."""
        return KappaWS(max(1, round(self.percent * total_steps / 100)))


class Cooldown(Share):
    """Share of a training at its end, in which the learning rate falls linearly to 0."""


@dataclass(frozen=True)
class Suffix:
    """Notation of one setting: ``before`` + text of the placeholder + ``after``.

    Attributes:
        field: field of :class:`~nnunet_cpr.names.trainer_name.TrainerName`.
        meaning: the setting in a few words.
        before, after: fixed text.
        placeholder: ``<N>`` for a whole number, ``<V>`` for a number, ``<Word>`` for letters and digits,
            ``<Trainer>`` for a class name, empty without one.
        build: converts the placeholder's value to the setting; raises ValueError if it is out of range.
        attribute: attribute of the setting that is the number; None if it is the setting itself.

    Example:
        >>> suffix = Suffix("mu", "update rate of the multipliers", "mu", "<V>", build=float)
        >>> suffix.syntax, suffix.parse("mu0p5"), suffix.format(0.5)
        ('_mu<V>', 0.5, 'mu0p5')
    """

    field: str
    meaning: str
    before: str
    placeholder: str = ""
    after: str = ""
    build: Callable[[Any], Any] = str
    attribute: str | None = None

    @property
    def syntax(self) -> str:
        """Notation with a placeholder, such as ``_ws<N>``."""
        return f"_{self.before}{self.placeholder}{self.after}"

    def matches(self, token: str) -> bool:
        """Return True if a token has this notation; its number may be out of range."""
        text = token.removeprefix(self.before).removesuffix(self.after)
        pattern = _NOTATIONS[self.placeholder][0]
        return token == self.before + text + self.after and pattern.fullmatch(text) is not None

    def parse(self, token: str) -> Any:
        """Return the setting of a token that matches.

        Raises:
            ValueError: the number is out of range.
        """
        text = token.removeprefix(self.before).removesuffix(self.after)
        return self.build(_NOTATIONS[self.placeholder][1](text))

    def format(self, setting: Any) -> str | None:
        """Return the token, without underscore, None if this suffix cannot express the setting."""
        value = None  # of a word
        if self.placeholder:
            value = setting if self.attribute is None else getattr(setting, self.attribute, None)
            if value is None:
                return None
        try:
            if self.build(value) != setting:  # the setting of another suffix
                return None
            token = self.before + _NOTATIONS[self.placeholder][2](value) + self.after
        except (TypeError, ValueError):  # not a number, or out of range
            return None
        return token if self.matches(token) else None


def find_suffix(suffixes: Sequence[Suffix], token: str) -> Suffix | None:
    """Return the suffix that matches a token, which has no underscore, None if none does."""
    return next((suffix for suffix in suffixes if suffix.matches(token)), None)


def number(field: str, meaning: str, syntax: str, allow_zero: bool = False) -> Suffix:
    """Return the suffix of a positive number, a whole one for the placeholder ``<N>``.

    Example:
        >>> number("epochs", "number of epochs", "<N>epochs").parse("100epochs")
        100
    """
    before, placeholder, after = re.split("(<.>)", syntax)
    check = positive_integer if placeholder == "<N>" else positive_number
    build = partial(check, field, allow_zero=allow_zero)
    return Suffix(field, meaning, before, placeholder, after, build)


def _word(field: str, meaning: str, word: str, setting: Any) -> Suffix:
    return Suffix(field, meaning, word, build=lambda _: setting)


def _bound(bound: type[Bound]) -> Suffix:
    placeholder = "<N>" if has_count(bound) else "<V>"
    setting = fields(bound)[0].name
    return Suffix("kappa", f"bound: {bound.title}", bound.keyword, placeholder, "", bound, setting)


def _baseline(entry: BaselineEntry) -> Suffix:
    placeholder = "<N>" if entry.is_count else "<V>" if entry.argument else ""
    build = partial(BaselineChoice, entry.keyword)
    return Suffix("baseline", entry.title, entry.keyword, placeholder, "", build, "value")


_SHARE = "bound: R after a share of the training (warm start); V is in percent"

METHOD_SUFFIXES = (
    *(_bound(bound) for bound in BOUNDS.values()),
    Suffix("kappa", _SHARE, KappaWS.keyword, "<V>", "p", WarmStartShare, "percent"),
    *(_word("regularizer", f"regularization function {name}", name, name) for name in REGULARIZER_WORDS),
    number("mu", "update rate of the multipliers", "mu<V>"),
    _word("adaptive", "adaptive bounds (AdaCPR)", "ada", True),
    *(_baseline(entry) for entry in BASELINES.values()),
    number("lr", "highest learning rate", "lr<V>"),
    Suffix("momentum", "momentum below 1", "momentum", "<V>", "", partial(number_below, 1, "momentum")),
    number("weight_decay", "weight decay", "wd<V>", allow_zero=True),
    number("warmup", "steps of learning-rate warm-up", "warmup<N>", allow_zero=True),
    number("seed", "seed of weights, data and augmentation", "seed<N>", allow_zero=True),
)
"""Suffixes of all kinds of names. Entries of the registries of bounds and comparison methods are added
automatically."""

DEFAULT_AVERAGING_DECAY = 0.999
_AVERAGED = "averaged weights, which are validated and saved"
_COOLDOWN = "constant learning rate, linear to 0 over the last V percent"

SUFFIXES = (
    *METHOD_SUFFIXES,
    _word("schedule", "_constant with _ema, for trainings of any length", "anytime", "anytime"),
    _word("schedule", "constant learning rate after the warm-up", "constant", "constant"),
    Suffix("schedule", _COOLDOWN, "cooldown", "<V>", "p", Cooldown, "percent"),
    Suffix("ema", f"{_AVERAGED}; V is their decay", "ema", "<V>", "", partial(number_below, 1, "ema")),
    _word("ema", f"{_AVERAGED}; decay {DEFAULT_AVERAGING_DECAY}", "ema", DEFAULT_AVERAGING_DECAY),
    _word("freeze", "the encoder keeps its weights", "freezeencoder", "encoder"),
    Suffix("pretrained", "training from pretrained weights of this name", "pre", "<Word>"),
    number("epochs", "epochs", "<N>epochs"),
    number("iterations", "iterations per epoch", "<N>iters"),
)
"""Suffixes of trainer names, except ``_on_<Trainer>``."""
