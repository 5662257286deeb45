"""Names that carry the settings of an optimizer and its regularizer: ``AdamCPR_ws2000_mu0p5_lr1en3``.

A trainer of nnU-Net is chosen by its name and by nothing else, and a result folder is named after it;
so is every run of :mod:`nnunet_cpr.vision`. Numbers are spelt as in nnU-Net's own trainer names: 1e-3 is
``1en3``, 0.5 is ``0p5``. Suffixes may come in any order.

The grammar of what all names share is here, and the machinery that a kind of names extends: a subclass
of :class:`MethodName` with its families and with the suffixes for its further fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, TypeVar

from nnunet_cpr.baselines import BASELINES, Baseline, Entry, Training
from nnunet_cpr.bounds import BOUNDS, Bound, KappaWS
from nnunet_cpr.regularizers import REGULARIZERS, get_regularizer
from nnunet_cpr.selection import Params

Name = TypeVar("Name", bound="MethodName")


@dataclass(frozen=True)
class Family:
    """What a name stands for before its suffixes change it."""

    name: str
    optimizer: str
    """``sgd``, ``adam`` or ``amos``."""
    cpr: bool = False
    warmup: int = 0
    lr: float = 1e-2


@dataclass(frozen=True)
class BaselineChoice:
    """One of :data:`~nnunet_cpr.baselines.BASELINES`, with its number where it has one."""

    keyword: str
    value: float | None = None


class WrongName(ValueError):
    """A name that is almost a right one; its message, one line, says what is wrong and what is meant."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


@dataclass(frozen=True)
class MethodName:
    """An optimizer's family and settings; None means the family's own.

    ``str()`` gives the name, with the suffixes in the order of :attr:`suffixes`.

    Raises:
        WrongName: settings that contradict each other.
    """

    families: ClassVar[dict[str, Family]]
    suffixes: ClassVar[tuple[Suffix, ...]]
    prefix: ClassVar[str] = ""
    """What the names of all families begin with."""

    family: str
    kappa: Bound | None = None
    regularizer: str | None = None
    mu: float | None = None
    adaptive: bool = False
    baseline: BaselineChoice | None = None
    lr: float | None = None
    weight_decay: float | None = None
    warmup: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.family not in self.families:
            raise WrongName(f"no family is named {self.family!r}; there are {', '.join(self.families)}")
        self._check_values()
        self._check_regularizers()
        if self.warmup_steps >= self.total_steps:
            raise WrongName(
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
                raise WrongName(f"{name} must be positive and finite, got {value!r}")
        for suffix in self.suffixes:
            value = getattr(self, suffix.field)
            if suffix.smallest is None or value is None:
                continue
            if not suffix.smallest <= value < 10**9:
                raise WrongName(f"{suffix.field} must be at least {suffix.smallest}, got {value!r}")
        if self.baseline is not None:
            entry = BASELINES.get(self.baseline.keyword)
            value = self.baseline.value
            if entry is None or (entry.setting is None) != (value is None):
                raise WrongName(f"no name can say {self.baseline!r}")
            if value is not None and not 0 < value < math.inf:
                raise WrongName(f"{entry.keyword} must be positive and finite, got {value!r}")

    def _check_regularizers(self) -> None:
        given = [f.name for f in dataclasses.fields(self)[1:] if getattr(self, f.name)]
        of_cpr = [name for name in ("kappa", "regularizer", "mu", "adaptive") if name in given]
        if of_cpr and not self.defaults.cpr:
            twin = [
                f.name
                for f in self.families.values()
                if f.cpr and f.optimizer == self.defaults.optimizer
            ]
            advice = f"; the one with CPR is {twin[0]}" if twin else ""
            raise WrongName(f"{self.family} has no CPR, so {self._words(of_cpr)} has no meaning{advice}")
        others = [field for field in ("weight_decay", "baseline") if getattr(self, field) is not None]
        if others and self.defaults.cpr:
            raise WrongName(
                f"CPR takes the place of weight decay, so {self.family} takes no "
                f"{self._words(others)}; leave it out"
            )
        if self.baseline is None:
            return
        if self.defaults.optimizer == "amos":
            raise WrongName(
                f"{self.family} has a decay of its own, so it takes no {self._words(['baseline'])}; "
                "leave it out"
            )
        if self.weight_decay is not None and not BASELINES[self.baseline.keyword].decays:
            raise WrongName(
                f"{self._words(['baseline'])} takes the place of weight decay; leave out "
                f"{self._words(['weight_decay'])}"
            )

    def __str__(self) -> str:
        return "_".join([self.family, *(token for _, token in self._tokens())])

    @property
    def defaults(self) -> Family:
        return self.families[self.family]

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the whole training."""
        raise NotImplementedError

    @property
    def default_warm_start(self) -> int:
        """Steps after which kappa is taken where the name gives no bound."""
        raise NotImplementedError

    @property
    def warmup_steps(self) -> int:
        """Steps of the learning rate's linear warm-up."""
        return self.defaults.warmup if self.warmup is None else self.warmup

    @property
    def bound(self) -> Bound:
        """How kappa is found."""
        return self.kappa or KappaWS(self.default_warm_start)

    @property
    def cpr_settings(self) -> dict[str, Any]:
        """The keyword arguments for :class:`SGDCPR` and :class:`AdamCPR` that the name says."""
        return {
            "kappa": self.bound,
            "regularizer": self.regularizer or "l2",
            "mu": self.mu or 1.0,
            "adaptive": self.adaptive,
        }

    def build_baseline(self, params: Params, weight_decay: float) -> Baseline | None:
        """The baseline that the name says, not attached yet; None if it says none."""
        if self.baseline is None:
            return None
        training = Training(params, weight_decay, self.total_steps)
        return BASELINES[self.baseline.keyword].build(training, self.baseline.value or 0.0)

    def _tokens(self) -> list[tuple[str, str]]:
        """(field, suffix without its underscore) for each setting that is given."""
        tokens = []
        for suffix in self.suffixes:
            value = getattr(self, suffix.field)
            text = None if value is None or value is False else suffix.write(value)
            if text is not None:
                tokens.append((suffix.field, suffix.before + text + suffix.after))
        return tokens

    def _words(self, fields: Sequence[str]) -> str:
        return " ".join(f"_{token}" for field, token in self._tokens() if field in fields)


def parse(kind: type[Name], name: str) -> Name | None:
    """The settings in a name of that kind, or None where it is not one, nor meant to be.

    Raises:
        WrongName: the name is almost right.
    """
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


def read_bound(text: str) -> Bound:
    """The bound that a word such as ``ws1000``, ``ip50``, ``k0p005`` or ``ki0x2`` says.

    Raises:
        WrongName: it says none.
    """
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
