from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nnunet_cpr.studies.state import StudyPaths
from nnunet_cpr.studies.study import Run
from tests.helpers.workspace import Workspace
from tests.studies.study_run import StudyRun


@pytest.fixture
def study(workspace: Workspace) -> Callable[..., StudyRun]:
    return lambda *arguments: StudyRun(workspace, *arguments)


@pytest.fixture
def run() -> Run:
    return Run("Dataset001_A", "3d_fullres", "nnUNetPlans", 0, "nnUNetTrainerCPR_10epochs")


@pytest.fixture
def paths(tmp_path: Path) -> StudyPaths:
    return StudyPaths(tmp_path / "results", tmp_path / "results" / "studies" / "s")


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a shell script nnU-Net's command."""

    def install(script: str) -> None:
        program = tmp_path / "bin" / "nnUNetv2_train"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "bin"))
    return install
