"""Shell completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import atexit, sys
slow = ("torch", "numpy", "yaml", "pandas", "nnunetv2")
atexit.register(lambda: print([name for name in slow if name in sys.modules], file=sys.stderr))
sys.argv = ["nnunet-cpr"]
from nnunet_cpr.cli import main
main()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a working directory with a study file, and with studies that have been run and not."""
    (tmp_path / "mine.yaml").touch()
    for name in ("finished", "not-run"):
        (tmp_path / "results" / "studies" / name).mkdir(parents=True)
    (tmp_path / "results" / "studies" / "finished" / "study.yaml").touch()
    return tmp_path


def complete(place: Path, line: str, **environment: str | None) -> list[str]:
    """Return the completions of the last word of a line."""
    words = line.split(" ")
    variables: dict[str, str | None] = {
        **os.environ,
        "_NNUNET_CPR_COMPLETE": "complete_fish",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "nnUNet_results": str(place / "results"),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=place, capture_output=True, text=True,
        env={name: value for name, value in variables.items() if value is not None},
    )  # fmt: skip
    assert done.stderr == "[]\n", "slow modules are imported, or errors are printed"
    return [each.split("\t")[0] for each in done.stdout.splitlines()]


def test_commands_and_options_are_completed(place: Path) -> None:
    assert complete(place, "nnunet-cpr st") == ["study"]
    assert complete(place, "nnunet-cpr study rep") == ["report"]
    assert complete(place, "nnunet-cpr study run quick --dry") == ["--dry-run"]


def test_studies_and_presets_are_completed(place: Path) -> None:
    found = complete(place, "nnunet-cpr study status ")
    assert {"finished", "heart"} <= set(found) and "not-run" not in found
    assert complete(place, "nnunet-cpr study report fi") == ["finished"]
    assert complete(place, "nnunet-cpr study run mi") in ([], [""]), "files are the shell's"


def test_missing_results_are_no_error(place: Path) -> None:
    found = complete(place, "nnunet-cpr study status ", nnUNet_results=None)
    assert "heart" in found and "finished" not in found
