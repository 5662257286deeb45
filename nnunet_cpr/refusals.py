"""Refusals: the one exception that commands print, checks of settings, and values in messages."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from typing import Any


class Refusal(ValueError):
    """Something that cannot be done; commands print the message, one line, and end with status 1.

    Args:
        problem: the object, and what is wrong with it: ``<object>: expected X, got Y``.
        remedy: what to do, if the problem does not say it.
        command: shell command that shows or solves the problem, for ``nnunet-cpr doctor``.

    Example:
        >>> raise Refusal("fold 7: data set 4 has folds 0 to 4 only", "choose one of them")
        Traceback (most recent call last):
        nnunet_cpr.refusals.Refusal: fold 7: data set 4 has folds 0 to 4 only; choose one of them
    """

    def __init__(self, problem: str, remedy: str = "", *, command: str = "") -> None:
        message = f"{problem}; {remedy}" if remedy else problem
        super().__init__(" ".join(message.splitlines()))
        self.command = command


class RefusedItem(Refusal):
    """Refusal of one of several files or runs, after which the others can be used."""


_FLOAT32_TINY = 2.0**-126
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


def positive_number(name: str, value: Any, *, allow_zero: bool = False, float32: bool = False) -> float:
    """Return ``value`` as a float.

    Args:
        name: the setting, for the error message.
        value: a positive finite number.
        allow_zero: accept 0 as well.
        float32: require a normal number of float32, for values that are stored as such.

    Raises:
        ValueError: it is none.

    Example:
        >>> positive_number("mu", 2)
        2.0
        >>> positive_number("mu", 0)
        Traceback (most recent call last):
        ...
        ValueError: mu: expected a positive finite number, got 0
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not (0 < value <= sys.float_info.max or (allow_zero and value == 0)):
        expected = "a finite number, 0 or above" if allow_zero else "a positive finite number"
        raise ValueError(f"{name}: expected {expected}, got {short_repr(value)}")
    if float32 and not _FLOAT32_TINY <= value <= _FLOAT32_MAX:
        raise ValueError(
            f"{name}: expected a positive number in the range of float32, got {short_repr(value)}"
        )
    return float(value)


def positive_integer(name: str, value: Any, *, allow_zero: bool = False) -> int:
    """Return ``value`` as an int.

    Args:
        name: the setting, for the error message.
        value: a whole number above 0 that an int64 tensor can hold.
        allow_zero: accept 0 as well.

    Raises:
        ValueError: it is none.

    Example:
        >>> positive_integer("steps", 0)
        Traceback (most recent call last):
        ...
        ValueError: steps: expected a positive whole number, got 0
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not (value > 0 or (allow_zero and value == 0)):
        expected = "a whole number, 0 or above" if allow_zero else "a positive whole number"
        raise ValueError(f"{name}: expected {expected}, got {short_repr(value)}")
    if value >= 2**62:
        raise ValueError(f"{name}: expected a whole number below 2**62, got {short_repr(value)}")
    return int(value)


def short_repr(value: Any) -> str:
    """Return ``repr(value)`` on one line of at most 100 characters.

    Example:
        >>> short_repr("a" * 200)[-5:]
        'aa...'
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def list_names(names: Sequence[Any]) -> str:
    """Return the first three names, quoted, and the number of the others.

    Example:
        >>> list_names(["a", "b", "c", "d", "e"])
        "'a', 'b', 'c' and 2 more"
    """
    shown = ", ".join(short_repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the plural unless it is 1.

    Example:
        >>> counted(1, "case"), counted(2500, "step"), counted(0, "matrix", "matrices")
        ('1 case', '2,500 steps', '0 matrices')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def one_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
