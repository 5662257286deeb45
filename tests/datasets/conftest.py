from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of nnUNet_raw; nnU-Net's other folders are not set."""
    folder = tmp_path / "nnUNet_raw"
    folder.mkdir()
    monkeypatch.setenv("nnUNet_raw", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for the log that a stopped command leaves
    for name in ("nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.delenv(name, raising=False)
    return folder
