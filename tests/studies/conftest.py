from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.study_run import StudyRun, wait_for
from tests.helpers.workspace import Workspace


@pytest.fixture
def study(workspace: Workspace) -> Callable[..., StudyRun]:
    return lambda *arguments: StudyRun(workspace, *arguments)


@pytest.fixture
def waiting() -> Callable[..., None]:
    return wait_for
