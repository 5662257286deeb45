"""Studies on real data: their archives, tables and figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from tests.helpers import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.real_data import archive, differences


def test_results_that_come_with_the_source_give_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/golden/test_reports.py has the numbers of all studies."""
    folder = ROOT / "benchmarks" / "real_data"
    archive.unpack([folder / "results" / "best_adam.tar.xz"], tmp_path)
    for name in ("nnUNet_raw", "nnUNet_preprocessed"):
        monkeypatch.delenv(name, raising=False)  # a report needs no data
    monkeypatch.setenv("nnUNet_results", str(tmp_path))
    file = str(folder / "studies" / "best_adam.yaml")
    done = CliRunner().invoke(app, ["study", "report", file])
    assert done.exit_code == 0, done.output
    report = (tmp_path / "studies" / "best_adam" / "report" / "report.md").read_text()
    assert "| 84.30 ± 0.43 ± 0.16 |" in report and "-0.69 to -0.20" in report
    rows = differences.read(file, tmp_path)
    assert any(f"{row.low:+.2f} to {row.high:+.2f}" == "-0.69 to -0.20" for row in rows)
