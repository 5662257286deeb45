from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cpr.distributed.crew import Crew


@pytest.fixture(autouse=True)
def hide_distributed_checkpoint() -> None:
    """Keep the module for these tests."""


@pytest.fixture(scope="session")
def two() -> Iterator[Crew]:
    members = Crew(2)
    yield members
    members.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Crew]:
    members = Crew(4)
    yield members
    members.close()
