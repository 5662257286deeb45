"""Every run of the tests has the same inputs, whichever tests ran before."""

from __future__ import annotations

import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from tests.helpers import examples


@pytest.mark.parametrize("turn", [1, 2])
def test_global_generators_are_seeded_before_each_test(turn: int) -> None:
    assert random.random() == random.Random(0).random()
    assert np.random.rand() == np.random.RandomState(0).rand()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def drawn() -> torch.Tensor:
    return torch.rand(3)


@pytest.mark.parametrize("turn", [1, 2])
def test_fixtures_do_not_advance_the_generators(drawn: torch.Tensor, turn: int) -> None:
    assert torch.equal(torch.rand(3), drawn)


def test_default_run_draws_no_random_examples() -> None:
    assert settings.default.derandomize != examples.is_search()
    assert settings.default.deadline is None
    assert settings.get_profile(examples.DEFAULT).database is None
    assert settings.get_profile(examples.SEARCH).derandomize is False
    assert examples.examples(3, search=7).max_examples == (7 if examples.is_search() else 3)


def found() -> list[tuple[int, float]]:
    """Return the examples that hypothesis runs, and a number that torch draws for each."""
    seen = []

    @settings(settings.get_profile(examples.DEFAULT), max_examples=200)
    @given(number=st.integers())
    def draw(number: int) -> None:
        seen.append((number, torch.rand(()).item()))

    draw()
    return seen


def test_examples_do_not_depend_on_imported_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = found()
    assert len({number for number, _ in before}) > 100
    assert len({number for _, number in before}) == 1  # hypothesis seeds torch before each example
    file = tmp_path / "imported_later.py"
    file.write_text(f"NUMBERS = {list(range(123_000, 124_000))}")
    module = types.ModuleType("imported_later")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "imported_later", module)
    monkeypatch.setattr(providers, "is_local_module_file", lambda path: True, raising=False)
    assert found() == before
