"""Work of one job."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnunet_cpr.studies import worker
from nnunet_cpr.studies.state import StudyPaths
from nnunet_cpr.studies.study import Run


@pytest.mark.parametrize(
    ("cores", "given", "processes"), [(2, None, "1"), (6, None, "3"), (2, "5", "5"), (8, None, None)]
)
def test_few_cores_get_few_processes_for_the_validation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, given: str | None, processes: str | None
) -> None:
    """nnU-Net starts eight processes, each of which imports it, unless the variable is set."""
    monkeypatch.setattr(worker, "available_cores", lambda: cores)
    monkeypatch.delenv("nnUNet_def_n_proc", raising=False)
    if given is not None:
        monkeypatch.setenv("nnUNet_def_n_proc", given)
    found: list[dict[str, str]] = []
    monkeypatch.setattr(worker.commands, "run", lambda *given, **_: found.append(given[2]))
    run = Run("Dataset001_A", "3d_fullres", "nnUNetPlans", 0, "nnUNetTrainerCPR")
    run.folder(tmp_path).mkdir(parents=True)
    worker.Worker(run, StudyPaths(tmp_path, tmp_path / "study"), "cpu")._run_nnunet(None, "--c")
    assert found[0].get("nnUNet_def_n_proc") == processes
