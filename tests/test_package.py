"""Imports and version of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nnunet_cpr
from tests.helpers import ROOT


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_core_imports_only_torch_numpy_and_lazy_loader() -> None:
    code = (
        "import sys, torch, numpy; before = {m.split('.')[0] for m in sys.modules}; "
        "import nnunet_cpr as n; assert all(hasattr(n, name) for name in n.__all__); "
        "print(*{m.split('.')[0] for m in sys.modules} - before - sys.stdlib_module_names)"
    )
    assert set(run(code).split()) == {"nnunet_cpr", "lazy_loader"}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help"], "demo"),
        (["trainers"], "nnUNetTrainerMuonCPR"),
        (["study", "status", "hippocampus", "--once"], "0/5"),
    ],
)
def test_command_does_not_import_torch(
    words: list[str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.setenv(variable, str(tmp_path))
    code = f"""
import sys
from nnunet_cpr import cli
sys.argv = ["nnunet-cpr", *{words!r}]
try:
    cli.main()
finally:
    assert "torch" not in sys.modules
"""
    assert shown in run(code)


def test_citation_has_the_version() -> None:
    assert f"\nversion: {nnunet_cpr.__version__}\n" in (ROOT / "CITATION.cff").read_text()
