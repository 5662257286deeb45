"""YAML files of users, read into dataclasses, and the wording of their errors."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml
from pydantic import BeforeValidator

from nnunet_cpr.spelling import nearest_first, parse_numbers

Scalar = str | int | float
_T = TypeVar("_T")


def read_yaml(path: Path, kind: type[_T], *inner: type, **defaults: Any) -> _T:
    """Return the content of a YAML file.

    Args:
        path: the file.
        kind: pydantic's dataclass of the content.
        inner: that of the mappings in it, if there are any.
        defaults: values of entries that the file may leave out.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is invalid; the message is one line.
    """
    content = path.read_bytes()
    try:
        document = yaml.load(content, _UniqueKeyLoader)
    except Exception as error:  # PyYAML raises errors of any kind for a value that its tag does not fit
        text = " ".join(str(error).split())
        raise ValueError(f"{path}: expected YAML, got: {_shorten(text, 1000)}") from error
    if not isinstance(document, dict):
        entries = ", ".join(_names(kind)[:3])
        raise ValueError(f"{path}: expected a mapping with entries such as {entries}")
    try:
        return pydantic.TypeAdapter(kind).validate_python({**defaults, **document})
    except pydantic.ValidationError as error:
        raise ValueError(first_error(error, str(path), kind, *inner)) from None


def number_ranges(kind: str) -> BeforeValidator:
    """Return a validator that takes text such as "1-3" for folds and seeds."""

    def validate(value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return parse_numbers(kind, str(value)) if is_number or isinstance(value, str) else value

    return BeforeValidator(validate, json_schema_input_type=Scalar | list[int] | None)


def first_error(error: pydantic.ValidationError, where: str, kind: type, *inner: type) -> str:
    """Return the first error as ``<file>: <entry>: expected X, got Y``; the types as above."""
    errors = error.errors(include_url=False)
    # A misspelt entry explains a missing one.
    first = min(errors, key=lambda each: each["type"] != "unexpected_keyword_argument")
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    place = _shorten(place.removeprefix("."))
    if first["type"] == "unexpected_keyword_argument":
        names = _names(kind if len(first["loc"]) == 1 else (kind, *inner)[-1])
        return f"{where}: unknown entry {place!r}; choose from {', '.join(nearest_first(place, names))}"
    if first["type"] == "missing":
        return f"{where}: {place}: expected this entry, got none"
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    message = re.sub("expected (greater|less)", r"expected a number \1", message)
    if not place:  # the message of a __post_init__ names the entry
        return f"{where}: {message}"
    return f"{where}: {place}: {message}, got {shown(first['input'])}"


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def shown(value: Any) -> str:
    """Return a value for an error message, shortened."""
    return _shorten(repr(value) if isinstance(value, str) else reprlib.repr(value))


def _shorten(text: str, longest: int = 80) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        counts = Counter(key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode))
        for key, count in counts.items():
            if count > 1:
                message = f"duplicate key {shown(key)}"
                raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        """Return 17 for 017, the number in Dataset017_BTCV, which is octal in YAML 1.1."""
        text = self.construct_scalar(node)
        return int(text) if re.fullmatch("0[0-9]{1,8}", text) else super().construct_yaml_int(node)


_UniqueKeyLoader.add_constructor("tag:yaml.org,2002:int", _UniqueKeyLoader.construct_yaml_int)
