"""Upper bounds kappa on the measure of each parameter matrix (the paper's section 4.3).

A bound is a frozen description. What it must remember between steps it keeps in ``memory``, tensors
that CPR stores and saves for it; what it decides goes into ``kappa``, +inf until it is set.
Everything is computed for all J matrices at once, on their device and without reading from it.

To add a bound: write a subclass of :class:`Bound` and list it in :data:`BOUNDS`.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import numbers
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nnunet_cpr._spelling import (
    COUNT,
    EXPLANATION,
    NUMBER,
    WrongName,
    parse_number,
    print_number,
    refuse_too_long,
    split_word,
)


@dataclass(frozen=True)
class Bound(ABC):
    """How the bounds kappa are found.

    The word for a bound is its ``keyword`` and the value of its first field, such as ``ws1000``.
    ``str()`` returns the word, or ``repr()`` for a bound that no word can say.

    Example:
        >>> str(KappaWS(1000)), str(KappaIP(50, ema=0.9)), str(KappaK(0.005))
        ('ws1000', 'KappaIP(interval=50, ema=0.9)', 'k5en3')
    """

    keyword: ClassVar[str]

    def __str__(self) -> str:
        kind = type(self)
        if BOUNDS.get(getattr(kind, "keyword", "")) is not kind:
            return repr(self)
        number = getattr(self, dataclasses.fields(self)[0].name)
        if self != kind(number):  # type: ignore[call-arg]
            return repr(self)
        return kind.keyword + (str(number) if _has_count(kind) else print_number(number))

    @property
    def earliest(self) -> int:
        """The first step at which the bound can be set."""
        return 0

    def memory(self, like: Tensor) -> dict[str, Tensor]:
        """What the bound has to remember at the start, as tensors shaped like ``like`` (``[J]``)."""
        return {}

    @abstractmethod
    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict[str, Tensor]) -> None:
        """Set ``kappa`` (``[J]``, in place) where this step decides it.

        Args:
            kappa: the bounds, +inf where not set yet.
            step: number of optimizer steps taken before this one, an int64 scalar tensor.
            measure: R(theta_step), float32 ``[J]``.
            memory: holds, among others, what :meth:`memory` gave; updated in place.
        """


def _set_(kappa: Tensor, where: Tensor, value: Tensor) -> None:
    """Set the bounds that are not set yet, where the condition holds and the value is finite."""
    torch.where(where & kappa.isinf() & value.isfinite(), value, kappa, out=kappa)


@dataclass(frozen=True)
class KappaK(Bound):
    """Kappa-K: the same bound ``value`` for every matrix, on the measure per element."""

    value: float
    keyword: ClassVar[str] = "k"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _positive(self, "value", self.value))

    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict[str, Tensor]) -> None:
        _set_(kappa, step >= 0, torch.full_like(kappa, self.value))


@dataclass(frozen=True)
class KappaKI0(Bound):
    """Kappa-kI0: ``factor`` times the measure of the initial parameters."""

    factor: float
    keyword: ClassVar[str] = "ki0x"

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", _positive(self, "factor", self.factor))

    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict[str, Tensor]) -> None:
        _set_(kappa, step >= 0, self.factor * measure)


@dataclass(frozen=True)
class KappaWS(Bound):
    """Kappa-WS: the measure after exactly ``steps`` optimizer steps, the warm start.

    A matrix whose measure is not finite just then takes the next one that is.
    """

    steps: int
    keyword: ClassVar[str] = "ws"

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _count(self, "steps", self.steps))

    @property
    def earliest(self) -> int:
        return self.steps

    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict[str, Tensor]) -> None:
        _set_(kappa, step >= self.steps, measure)


@dataclass(frozen=True)
class KappaIP(Bound):
    """Kappa-IP: the measure at the first inflection point of its growth, for each matrix by itself.

    The measure is sampled at steps 0, ``interval``, 2 ``interval``, ...; the bound is set at the first
    sample at which the second difference of the last three samples is negative.

    Args:
        interval: optimizer steps between samples; the paper takes a tenth of the learning-rate
            warm-up.
        ema: weight of the past in an exponential moving average over the samples, in [0, 1). The
            paper has none (0). The bound is the measure itself, smoothed or not.
    """

    interval: int
    ema: float = 0.0
    keyword: ClassVar[str] = "ip"

    def __post_init__(self) -> None:
        object.__setattr__(self, "interval", _count(self, "interval", self.interval))
        if not 0 <= self.ema < 1:
            raise ValueError(f"KappaIP: ema must be in [0, 1), got {self.ema!r}")
        object.__setattr__(self, "ema", float(self.ema))

    @property
    def earliest(self) -> int:
        return 2 * self.interval

    def memory(self, like: Tensor) -> dict[str, Tensor]:
        return {
            "last_sample": torch.full_like(like, math.nan),
            "last_difference": torch.full_like(like, math.nan),
        }

    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict[str, Tensor]) -> None:
        last, last_difference = memory["last_sample"], memory["last_difference"]
        sampled = (step % self.interval == 0) & measure.isfinite()
        smoothed = torch.where(last.isnan(), measure, self.ema * last + (1 - self.ema) * measure)
        difference = smoothed - last
        # Until there are three samples one of the two differences is NaN, and this is False.
        _set_(kappa, sampled & (difference - last_difference < 0), measure)
        last.copy_(torch.where(sampled, smoothed, last))
        last_difference.copy_(torch.where(sampled, difference, last_difference))


BOUNDS: dict[str, type[Bound]] = {b.keyword: b for b in (KappaK, KappaKI0, KappaWS, KappaIP)}
"""The bounds by the keyword that their words begin with."""


def as_bound(kappa: Bound | str) -> Bound:
    """Return ``kappa`` as a bound; it may be one, its word, or what ``str()`` returned for it.

    Raises:
        TypeError: ``kappa`` is neither a bound nor a string.
        WrongName: the word says no bound.

    Example:
        >>> as_bound("ws1000"), as_bound("k0p005"), as_bound(KappaIP(50))
        (KappaWS(steps=1000), KappaK(value=0.005), KappaIP(interval=50, ema=0.0))
    """
    if isinstance(kappa, Bound):
        return kappa
    if not isinstance(kappa, str):
        raise TypeError(
            f"kappa must be a bound such as KappaWS(1000), or a word such as 'ws1000', got "
            f"{' '.join(repr(kappa).split())[:100]}"
        )
    return read_bound(kappa)


def read_bound(text: str) -> Bound:
    """Return the bound that a word such as ``ws1000``, ``ip50``, ``k0p005`` or ``ki0x2`` says.

    Raises:
        WrongName: it says none.
    """
    refuse_too_long(text)
    try:
        bound = _match_word(text) or _match_repr(text)
    except ValueError as error:
        raise WrongName(f"the bound {text!r}: {error}") from None
    if bound is not None:
        return bound
    guess = "".join(split_word(text))
    shapes = " ".join(k + ("<N>" if _has_count(b) else "<V>") for k, b in BOUNDS.items())
    try:
        is_meant = _match_word(guess) is not None
    except ValueError:
        is_meant = False
    advice = f"did you mean {guess}?" if is_meant else f"the bounds are {shapes}, {EXPLANATION}"
    raise WrongName(f"no bound is written {text!r}; {advice}")


def _has_count(kind: type[Bound]) -> bool:
    """Return True if the first field is a whole number."""
    return dataclasses.fields(kind)[0].type == "int"


def _match_word(text: str) -> Bound | None:
    for keyword, kind in BOUNDS.items():
        number = text.removeprefix(keyword)
        pattern = COUNT if _has_count(kind) else NUMBER
        if text.startswith(keyword) and pattern.fullmatch(number):
            return kind(int(number) if _has_count(kind) else parse_number(number))  # type: ignore[call-arg]
    return None


def _match_repr(text: str) -> Bound | None:
    kinds = {kind.__name__: kind for kind in BOUNDS.values()}
    name, parenthesis, rest = text.partition("(")
    if name not in kinds or not parenthesis or not rest.endswith(")"):
        return None
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        fields = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        return kinds[name](**fields)
    except (SyntaxError, AssertionError, TypeError):
        return None


def _positive(bound: Bound, what: str, value: float) -> float:
    name = type(bound).__name__
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}: {what} must be a number, got {value!r}")
    # Bounds are float32: 1e-50 would be no bound but 0.
    if not 0 < float(torch.tensor(float(value), dtype=torch.float32)) < math.inf:
        raise ValueError(f"{name}: {what} must be positive and finite in float32, got {value!r}")
    return float(value)


def _count(bound: Bound, what: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value <= 0:
        raise ValueError(f"{type(bound).__name__}: {what} must be a whole number above 0, got {value!r}")
    return int(value)
