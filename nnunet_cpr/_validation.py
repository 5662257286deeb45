"""Validation of settings."""

from __future__ import annotations

import math
import numbers
from typing import Any


def positive_number(name: str, value: Any, *, allow_zero: bool = False) -> float:
    """Return ``value`` as a float.

    Args:
        name: the setting, for the error message.
        value: a positive finite number.
        allow_zero: accept 0 as well.

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
    if not is_number or not (0 < value < math.inf or (allow_zero and value == 0)):
        expected = "a finite number, 0 or above" if allow_zero else "a positive finite number"
        raise ValueError(f"{name}: expected {expected}, got {' '.join(repr(value).split())[:100]}")
    return float(value)
