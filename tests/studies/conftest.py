from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nnunet_cpr.studies.definition import Run
from nnunet_cpr.studies.run_state import StudyPaths
from tests.helpers.study_run import StudyRun, wait_for
from tests.helpers.workspace import Workspace


@pytest.fixture
def study(workspace: Workspace) -> Callable[..., StudyRun]:
    return lambda *arguments: StudyRun(workspace, *arguments)


@pytest.fixture
def waiting() -> Callable[..., None]:
    return wait_for


@pytest.fixture
def run() -> Run:
    return Run("Dataset001_A", "3d_fullres", "nnUNetPlans", 0, "nnUNetTrainerCPR_10epochs")


@pytest.fixture
def paths(tmp_path: Path) -> StudyPaths:
    return StudyPaths(tmp_path / "results", tmp_path / "results" / "studies" / "s")
