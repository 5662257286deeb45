"""Types of the entries of a study file: what each may be, and how it may be written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, StrictInt, StrictStr

from nnunet_cpr.yaml_files import Scalar

SURFACE_METRICS = ("hd95", "nsd")
"""Metrics of predictions and ground truth, for which MONAI is needed."""
METRIC_NAMES = ("dice", *SURFACE_METRICS)
"""Names of :data:`nnunet_cpr.reports.metrics.METRICS`."""
_T = TypeVar("_T")


def _check(is_valid: Callable[[Any], Any], expected: str) -> AfterValidator:
    """Return a validator that refuses values with an error such as "expected printable text"."""

    def validate(value: _T) -> _T:
        if not is_valid(value):
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(validate)


def as_text(value: Any) -> Any:
    """Return text and numbers as one line of text, an empty entry as "", and anything else as it is."""
    if value is None:
        return ""
    is_scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
    return " ".join(str(value).split()) if is_scalar else value


def _as_number(value: Any) -> Any:
    """Return text such as 1e-1, which is no number in YAML 1.1, as a number."""
    is_number = isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?e[-+]?\d+", value, re.IGNORECASE)
    return float(value) if is_number else value


def as_margins(value: Any) -> Any:
    """Return a number as the margin of each metric."""
    return value if isinstance(value, dict) else dict.fromkeys(METRIC_NAMES, value)


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple, an empty entry as an empty one, and a value as a tuple of one."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


NOT_EMPTY = _check(len, "at least one value")
Unique = Annotated[
    tuple[_T, ...],
    BeforeValidator(as_tuple, json_schema_input_type=Scalar | list[Scalar] | None),
    _check(lambda values: len(set(values)) == len(values), "each value once"),
]
Text = Annotated[
    StrictStr,
    BeforeValidator(as_text, json_schema_input_type=Scalar | None),
    _check(str.isprintable, "printable text"),
]
ClassName = Annotated[StrictStr, _check(str.isidentifier, "the class name of a trainer")]
# A name that starts with a dash would be an option of nnU-Net's commands.
FolderName = Annotated[
    StrictStr,
    _check(
        re.compile(r"\w[\w .+-]*").fullmatch, "a name of letters, digits, blanks and '_', '-', '.', '+'"
    ),
]
StudyName = Annotated[
    Text,
    _check(
        re.compile(r"(?!-)(?!\.*$)[\w.-]+").fullmatch,
        "a name of letters, digits, '_', '-' and '.', not '-' first",
    ),
]
Fold = Annotated[StrictInt, Field(ge=0, lt=10**6)]
Seed = Annotated[StrictInt, Field(ge=0, lt=10**9)]
Number = Annotated[float, BeforeValidator(_as_number, json_schema_input_type=float), Field(strict=True)]
Percent = Annotated[Number, Field(ge=0, le=100)]
Metric = Annotated[StrictStr, _check(METRIC_NAMES.__contains__, f"one of {', '.join(METRIC_NAMES)}")]
Distance = Annotated[Number, Field(gt=0, le=1000)]
Margin = Annotated[Number, Field(gt=0, le=100)]
