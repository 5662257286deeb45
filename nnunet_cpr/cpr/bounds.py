"""Upper bounds kappa on the regularization function of each parameter matrix (the paper's section 4.3).

A bound is a frozen description. Its state between steps is in ``memory``, tensors that CPR stores and
saves; its result is in ``kappa``, which is +inf until it is set. All J matrices are handled at once on
their device, without synchronizing with it. Only methods of tensors are used: names of trainers contain
bounds, and are read without importing torch.

To add a bound: write a subclass of :class:`Bound` and list it in :data:`BOUNDS`. Names, state dicts and
the nnU-Net trainers then know it; export it in ``nnunet_cpr/__init__.pyi``.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nnunet_cpr.refusals import positive_integer, positive_number, short_repr
from nnunet_cpr.spelling import COUNT, NUMBER, NUMBER_HELP, WrongName, parse_number, print_number

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class Bound(ABC):
    """Rule by which the bounds kappa are set.

    In names, a bound is a word: its ``keyword`` and the value of its first field, such as ``ws1000``.
    ``str()`` returns this word, or ``repr()`` if the other fields do not have their defaults.

    Example:
        >>> str(KappaWS(1000)), str(KappaIP(50, ema=0.9)), str(KappaK(0.005))
        ('ws1000', 'KappaIP(interval=50, ema=0.9)', 'k5en3')
    """

    keyword: ClassVar[str]
    title: ClassVar[str]
    """The bound in a few words."""
    is_set_once: ClassVar[bool] = False
    """True: updates before :attr:`earliest` and after all bounds have been set change nothing.

    A class that derives from a bound and updates in another way sets it again."""

    def __str__(self) -> str:
        kind = type(self)
        if BOUNDS.get(getattr(kind, "keyword", "")) is not kind:
            return repr(self)
        number = getattr(self, dataclasses.fields(self)[0].name)
        if self != kind(number):  # type: ignore[call-arg]
            return repr(self)
        return kind.keyword + (str(number) if has_count(kind) else print_number(number))

    @property
    def earliest(self) -> int:
        """First step at which the bound can be set."""
        return 0

    def memory(self, like: Tensor) -> dict[str, Tensor]:
        """Return the initial state of the bound, tensors shaped like ``like``, ``[J]``."""
        return {}

    def is_due(self, step: int, kappa: np.ndarray) -> bool:
        """Return True if :meth:`update_` can change something after ``step`` steps, so that it needs R.

        Args:
            step: number of optimizer steps so far.
            kappa: the bounds, +inf where not set yet.
        """
        return not self.is_set_once or (not bool((kappa < math.inf).all()) and step >= self.earliest)

    @abstractmethod
    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict[str, Tensor]) -> None:
        """Set the bounds in place where this step determines them.

        Args:
            kappa: the bounds, float32 ``[J]``, +inf where not set yet.
            step: number of optimizer steps taken before this one, an int64 scalar tensor.
            measure: R(theta_step), float32 ``[J]``; NaN in a step that ``GradScaler`` skips, which must
                not change anything.
            memory: contains the tensors of :meth:`memory`, to be updated in place, under names of their
                own.
        """


def _set_(kappa: Tensor, where: Tensor, value: Tensor) -> None:
    """Set bounds that are not set yet, where ``where`` is True and the value is finite.

    Comparisons are one operation each on a GPU; ``isfinite`` takes four.
    """
    is_set = where & (kappa == math.inf) & (value.abs() < math.inf)
    kappa.copy_(value.where(is_set, kappa))


@dataclass(frozen=True)
class KappaK(Bound):
    """Kappa-K: the same bound ``value`` for every parameter matrix.

    Example:
        >>> KappaK(0.01)
        KappaK(value=0.01)
    """

    value: float
    keyword: ClassVar[str] = "k"
    title = "the same value for every parameter matrix"
    is_set_once = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", positive_number("KappaK.value", self.value, float32=True))

    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict[str, Tensor]) -> None:
        _set_(kappa, measure.isfinite(), kappa.new_full(kappa.shape, self.value))


@dataclass(frozen=True)
class KappaKI0(Bound):
    """Kappa-kI0: ``factor`` times R of the initial parameters.

    Example:
        >>> KappaKI0(2)
        KappaKI0(factor=2.0)
    """

    factor: float
    keyword: ClassVar[str] = "ki0x"
    title = "a multiple of the initial R"
    is_set_once = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", positive_number("KappaKI0.factor", self.factor, float32=True))

    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict[str, Tensor]) -> None:
        _set_(kappa, step >= 0, self.factor * measure)


@dataclass(frozen=True)
class KappaWS(Bound):
    """Kappa-WS: R after exactly ``steps`` optimizer steps (warm start).

    A matrix for which R is not finite at that step takes the next finite value.

    Example:
        >>> KappaWS(1000)
        KappaWS(steps=1000)
    """

    steps: int
    keyword: ClassVar[str] = "ws"
    title = "R after a number of steps (warm start)"
    is_set_once = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", positive_integer("KappaWS.steps", self.steps))

    @property
    def earliest(self) -> int:
        return self.steps

    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict[str, Tensor]) -> None:
        _set_(kappa, step >= self.steps, measure)


@dataclass(frozen=True)
class KappaIP(Bound):
    """Kappa-IP: R at its first inflection point, separately for each parameter matrix.

    R is sampled at steps 0, ``interval``, 2 ``interval``, ...; the bound is set at the first sample at
    which the second difference of the last three samples is negative.

    Args:
        interval: optimizer steps between samples; the paper uses a tenth of the learning-rate
            warm-up.
        ema: decay of an exponential moving average over the samples, in [0, 1); 0, as in the paper,
            does not smooth. The bound itself is always the unsmoothed value.

    Example:
        >>> KappaIP(interval=50)
        KappaIP(interval=50, ema=0.0)
    """

    interval: int
    ema: float = 0.0
    keyword: ClassVar[str] = "ip"
    title = "R at its first inflection point, sampled every N steps"

    def __post_init__(self) -> None:
        object.__setattr__(self, "interval", positive_integer("KappaIP.interval", self.interval))
        if not 0 <= self.ema < 1:
            raise ValueError(f"KappaIP.ema: expected a number in [0, 1), got {short_repr(self.ema)}")
        object.__setattr__(self, "ema", float(self.ema))

    @property
    def earliest(self) -> int:
        return 2 * self.interval

    def is_due(self, step: int, kappa: np.ndarray) -> bool:
        return step % self.interval == 0

    def memory(self, like: Tensor) -> dict[str, Tensor]:
        return {
            "last_sample": like.new_full(like.shape, math.nan),
            "last_difference": like.new_full(like.shape, math.nan),
        }

    def update_(self, kappa: Tensor, step: Tensor, measure: Tensor, memory: dict[str, Tensor]) -> None:
        last, last_difference = memory["last_sample"], memory["last_difference"]
        sampled = (step % self.interval == 0) & measure.isfinite()
        smoothed = measure.where(last.isnan(), self.ema * last + (1 - self.ema) * measure)
        difference = smoothed - last
        # With fewer than three samples a difference is NaN, and the comparison False.
        _set_(kappa, sampled & (difference - last_difference < 0), measure)
        last.copy_(smoothed.where(sampled, last))
        last_difference.copy_(difference.where(sampled, last_difference))


BOUNDS: dict[str, type[Bound]] = {b.keyword: b for b in (KappaK, KappaKI0, KappaWS, KappaIP)}
"""Bounds by keyword."""


def as_bound(kappa: Bound | str | float) -> Bound:
    """Return a bound from a bound, its word, its ``repr()``, or the value of :class:`KappaK`.

    Raises:
        TypeError: ``kappa`` is something else.
        ValueError: the number of the bound is out of range.
        WrongName: the string is not a bound.

    Example:
        >>> as_bound("ws1000"), as_bound("k0.005"), as_bound(0.005)
        (KappaWS(steps=1000), KappaK(value=0.005), KappaK(value=0.005))
    """
    if isinstance(kappa, Bound):
        return kappa
    if isinstance(kappa, int | float):
        return KappaK(kappa)
    if not isinstance(kappa, str):
        raise TypeError(
            "kappa: expected a bound such as KappaWS(1000) or a word such as 'ws1000', got "
            f"{short_repr(kappa)}"
        )
    if bound := _match_word(kappa.replace(".", "p").replace("e-", "en")) or _match_repr(kappa):
        return bound
    if re.fullmatch("ws[0-9.]+p", kappa):
        raise WrongName(f"bound {kappa!r}: only names know the training's length", "write ws<N>")
    shapes = " ".join(k + ("<N>" if has_count(b) else "<V>") for k, b in BOUNDS.items())
    raise WrongName(f"unknown bound {kappa!r}", f"choose from {shapes}, {NUMBER_HELP}")


def has_count(kind: type[Bound]) -> bool:
    """Return True if the first field is an integer."""
    return dataclasses.fields(kind)[0].type in (int, "int")


def _match_word(text: str) -> Bound | None:
    for keyword, kind in BOUNDS.items():
        number = text.removeprefix(keyword)
        pattern = COUNT if has_count(kind) else NUMBER
        if text.startswith(keyword) and pattern.fullmatch(number):
            return kind(int(number) if has_count(kind) else parse_number(number))  # type: ignore[call-arg]
    return None


def _match_repr(text: str) -> Bound | None:
    kinds = {kind.__name__: kind for kind in BOUNDS.values()}
    name, _, arguments = text.removesuffix(")").partition("(")
    pairs = [argument.partition("=") for argument in arguments.split(", ")]
    try:
        values = {field: ast.literal_eval(value) for field, _, value in pairs}
    except (SyntaxError, ValueError):
        return None
    try:
        return kinds[name](**values)
    except (KeyError, TypeError):  # no bound of this name, or other fields
        return None
