from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.crew import Crew, crew


@pytest.fixture(autouse=True)
def hide_distributed_checkpoint() -> None:
    """Keep the module for these tests."""


@pytest.fixture(scope="session")
def two() -> Iterator[Crew]:
    with crew(2) as members:
        yield members


@pytest.fixture(scope="session")
def four() -> Iterator[Crew]:
    with crew(4) as members:
        yield members
