"""Trainer names that carry their settings: ``nnUNetTrainerCPR_ws2000_warmup2000_100epochs``.

nnU-Net's command takes a trainer's name and no other options, names its result folders after it, and
finds the trainer again by it at inference. So the settings stand in the name. Numbers are spelt as in
nnU-Net's own trainer names: 1e-3 is ``1en3``, 0.5 is ``0p5``. Suffixes may come in any order.

This module parses and prints such names; it does not import nnU-Net.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from nnunet_cpr.bounds import BOUNDS, Bound, KappaWS
from nnunet_cpr.regularizers import REGULARIZERS, get_regularizer

COMMON_PREFIX = "nnUNetTrainer"
DEFAULT_EPOCHS = 1000
DEFAULT_ITERATIONS = 250
STEPS_AFTER_WARMUP = 1000
"""The paper's best warm start on average: this many steps after the learning-rate warm-up."""


@dataclass(frozen=True)
class Family:
    """What a trainer does before its suffixes change it."""

    name: str
    cpr: bool
    warmup: int
    lr: float = 1e-2


FAMILIES = {
    family.name: family
    for family in (
        Family("nnUNetTrainerCPR", cpr=True, warmup=0),
        Family("nnUNetTrainerAdamCPR", cpr=True, warmup=2000),
        Family("nnUNetTrainerSGD", cpr=False, warmup=0),
        Family("nnUNetTrainerAdamW", cpr=False, warmup=2000),
    )
}


class TrainerNameError(ValueError):
    """A name that is almost one of ours; its message, one line, says what is wrong and what is meant."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


@dataclass(frozen=True)
class TrainerName:
    """A trainer family and its settings; None means the family's own.

    ``str()`` gives the name, with the suffixes in the order of the fields.

    Raises:
        TrainerNameError: settings that contradict each other.
    """

    family: str
    kappa: Bound | None = None
    regularizer: str | None = None
    mu: float | None = None
    adaptive: bool = False
    lr: float | None = None
    weight_decay: float | None = None
    warmup: int | None = None
    epochs: int | None = None
    iterations: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise TrainerNameError(f"no trainer family is named {self.family!r}")
        self._check_values()
        given = [f.name for f in dataclasses.fields(self)[1:] if getattr(self, f.name)]
        of_cpr = [name for name in ("kappa", "regularizer", "mu", "adaptive") if name in given]
        if of_cpr and not self.defaults.cpr:
            twin = {
                "nnUNetTrainerSGD": "nnUNetTrainerCPR",
                "nnUNetTrainerAdamW": "nnUNetTrainerAdamCPR",
            }
            raise TrainerNameError(
                f"{self.family} has no CPR, so {_words(self, of_cpr)} has no meaning; "
                f"the trainer with CPR is {twin[self.family]}"
            )
        if self.weight_decay is not None and self.defaults.cpr:
            raise TrainerNameError(
                f"CPR takes the place of weight decay, so {self.family} takes no "
                f"{_words(self, ['weight_decay'])}; leave it out"
            )
        if self.warmup_steps >= self.total_steps:
            raise TrainerNameError(
                f"the learning-rate warm-up of {self.warmup_steps} steps is not shorter than the "
                f"training of {self.total_steps} steps; choose a shorter one with _warmup<N>"
            )

    def _check_values(self) -> None:
        """What the grammar cannot spell must not be printed as something else."""
        if self.regularizer is not None:
            get_regularizer(self.regularizer)
        for name in ("mu", "lr", "weight_decay"):
            value = getattr(self, name)
            is_fine = value is None or 0 < value < math.inf or (name == "weight_decay" and value == 0)
            if not is_fine:
                raise TrainerNameError(f"{name} must be positive and finite, got {value!r}")
        for name, smallest in (("warmup", 0), ("epochs", 1), ("iterations", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and not smallest <= value < 10**9:
                raise TrainerNameError(f"{name} must be at least {smallest}, got {value!r}")

    def __str__(self) -> str:
        return "_".join([self.family, *(token for _, token in _tokens(self))])

    @property
    def defaults(self) -> Family:
        return FAMILIES[self.family]

    @property
    def warmup_steps(self) -> int:
        """Steps of the learning rate's linear warm-up."""
        return self.defaults.warmup if self.warmup is None else self.warmup

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the whole training."""
        return (self.epochs or DEFAULT_EPOCHS) * (self.iterations or DEFAULT_ITERATIONS)

    @property
    def bound(self) -> Bound:
        """How kappa is found: by default 1,000 steps after the learning-rate warm-up."""
        return self.kappa or KappaWS(self.warmup_steps + STEPS_AFTER_WARMUP)


def parse(name: str) -> TrainerName | None:
    """The settings in a trainer's name, or None where it is not one of ours, nor meant to be.

    Raises:
        TrainerNameError: the name is almost one of ours.
    """
    base, *tokens = name.split("_")
    if base not in FAMILIES:
        nearest = _nearest_family(base)
        if nearest is None:
            return None
        raise TrainerNameError(
            f"no trainer is named {base!r}; did you mean {'_'.join([nearest, *tokens])}? "
            "Every suffix begins with an underscore"
        )
    values: dict[str, Any] = {}
    words: dict[str, str] = {}
    for token in tokens:
        suffix, value = _read(token, name)
        if suffix.field in words:
            first = words[suffix.field]
            raise TrainerNameError(
                f"_{first} and _{token} in {name!r} contradict each other; keep one of them"
            )
        words[suffix.field] = token
        values[suffix.field] = value
    try:
        return TrainerName(base, **values)
    except TrainerNameError as error:
        raise TrainerNameError(f"{name!r}: {error}") from None


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


# Suffixes


@dataclass(frozen=True)
class _Suffix:
    """One suffix: ``before`` + value + ``after``, which sets one field of :class:`TrainerName`."""

    field: str
    before: str
    pattern: re.Pattern[str]
    read: Callable[[str], Any]
    write: Callable[[Any], str | None]
    after: str = ""
    placeholder: str = ""

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


def _count(field: str, before: str, after: str = "", smallest: int = 1) -> _Suffix:
    return _Suffix(field, before, _COUNT, _at_least(smallest), str, after, "<N>")


def _number(field: str, before: str, read: Callable[[str], float] = _positive) -> _Suffix:
    return _Suffix(field, before, _NUMBER, read, _print_number, placeholder="<V>")


def _bound(bound: type[Bound]) -> _Suffix:
    setting = dataclasses.fields(bound)[0].name
    counted = dataclasses.fields(bound)[0].type == "int"

    def write(value: Bound) -> str | None:
        if type(value) is not bound:
            return None
        if value != bound(**{setting: getattr(value, setting)}):
            raise TrainerNameError(f"no trainer name can say {value!r}")
        number = getattr(value, setting)
        return str(number) if counted else _print_number(number)

    def read(text: str) -> Bound:
        return bound(**{setting: int(text) if counted else _parse_number(text)})

    pattern, placeholder = (_COUNT, "<N>") if counted else (_NUMBER, "<V>")
    return _Suffix("kappa", bound.keyword, pattern, read, write, placeholder=placeholder)


def _word(field: str, word: str, value: Any) -> _Suffix:
    return _Suffix(field, word, _NOTHING, lambda _: value, lambda v: "" if v == value else None)


SUFFIXES: tuple[_Suffix, ...] = (
    *(_bound(bound) for bound in BOUNDS.values()),
    *(_word("regularizer", name, name) for name in REGULARIZERS),
    _number("mu", "mu"),
    _word("adaptive", "ada", True),
    _number("lr", "lr"),
    _number("weight_decay", "wd", _not_negative),
    _count("warmup", "warmup", smallest=0),
    _count("epochs", "", "epochs"),
    _count("iterations", "", "iters"),
    _count("seed", "seed", smallest=0),
)
"""The whole grammar. A bound or measure is here once it is in its own registry."""


def _tokens(name: TrainerName) -> list[tuple[str, str]]:
    """(field, suffix without its underscore) for each setting that is given."""
    tokens = []
    for suffix in SUFFIXES:
        value = getattr(name, suffix.field)
        text = None if value is None or value is False else suffix.write(value)
        if text is not None:
            tokens.append((suffix.field, suffix.before + text + suffix.after))
    return tokens


def _words(name: TrainerName, fields: Sequence[str]) -> str:
    return " ".join(f"_{token}" for field, token in _tokens(name) if field in fields)


def _read(token: str, name: str) -> tuple[_Suffix, Any]:
    for suffix in SUFFIXES:
        text = suffix.match(token)
        if text is None:
            continue
        try:
            return suffix, suffix.read(text)
        except ValueError as error:
            raise TrainerNameError(f"_{token} in {name!r}: {error}") from None
    raise TrainerNameError(f"unknown suffix _{token} in {name!r}; {_advice(token, name)}")


# What a wrong name was meant to be


def _nearest_family(base: str) -> str | None:
    if not base.lower().startswith(COMMON_PREFIX.lower()):
        return None
    rests = {family[len(COMMON_PREFIX) :].lower(): family for family in FAMILIES}
    rest = base[len(COMMON_PREFIX) :].lower()
    if "cpr" in rest:
        return rests["adamcpr" if "adam" in rest else "cpr"]
    close = difflib.get_close_matches(rest, rests, n=1, cutoff=0.6)
    return rests[close[0]] if close else None


def _advice(token: str, name: str) -> str:
    letters, number = _split(token)
    by_letters = {suffix.before + suffix.after: suffix for suffix in SUFFIXES}
    for close in difflib.get_close_matches(letters, by_letters, n=3, cutoff=0.5):
        suffix = by_letters[close]
        guess = suffix.before + (number if suffix.placeholder else "") + suffix.after
        if _is_valid(suffix, guess):
            return f"did you mean {'_'.join(guess if t == token else t for t in name.split('_'))}?"
        if close == letters:
            return f"it is spelt {suffix.shape}, {_SPELLING}"
    return f"the suffixes are {' '.join(suffix.shape for suffix in SUFFIXES)}, {_SPELLING}"


_SPELLING = "where <N> is a whole number such as 200 and <V> a number such as 0p5 or 1en3"


def _split(token: str) -> tuple[str, str]:
    """The letters of a suffix and the number in it, the number's spelling corrected."""
    text = re.sub(r"(?<![0-9])\.", "0.", token.lower()).replace(".", "p").replace("e-", "en")
    text = re.sub(r"([0-9]+)k(?=$|[a-z])", r"\g<1>000", text)
    numbers = re.findall(r"[0-9]+(?:p[0-9]+)?(?:en?[0-9]+)?(?=$|[a-z])", text)
    return (text.replace(numbers[-1], "", 1), numbers[-1]) if numbers else (text, "")


def _is_valid(suffix: _Suffix, token: str) -> bool:
    text = suffix.match(token)
    try:
        return text is not None and suffix.read(text) is not None
    except ValueError:
        return False
