"""Folds of version 0.3.0 continue, validate and are predicted with as then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.goldens import DATA, read_golden
from tests.golden.whole_folds import FOLDS, continue_fold, load_fold

RECORDED: dict[str, Any] = read_golden("checkpoints/0.3.0")


@pytest.mark.parametrize("name", FOLDS)
def test_fold_of_0_3_0_continues_as_recorded(name: str) -> None:
    found = continue_fold(name, DATA / "checkpoints" / "0.3.0" / f"{name}.pth")
    assert_equal(found, RECORDED[name]["continued"])


@pytest.mark.parametrize("name", FOLDS)
def test_fold_of_0_3_0_is_validated_as_recorded(name: str) -> None:
    found = load_fold(name, DATA / "checkpoints" / "0.3.0" / f"{name}.pth")
    assert_equal(found, RECORDED[name]["loaded"])


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare numbers to rounding in float32."""
    ours, theirs = (dict(numbers_in(json.loads(json.dumps(each)))) for each in (found, expected))
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def numbers_in(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        if isinstance(each, dict | list):
            yield from numbers_in(each, f"{place}/{key}")
        else:
            yield f"{place}/{key}", each
