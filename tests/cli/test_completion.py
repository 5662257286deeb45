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
    """Return a working directory with study files, folders and studies that have been run."""
    for name in ("mine.yaml", "folder/other.yml", "notes.txt", "$(touch hacked).yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("finished", "not-run"):
        (tmp_path / "results" / "studies" / name).mkdir(parents=True)
    (tmp_path / "results" / "studies" / "finished" / "study.yaml").touch()
    (tmp_path / "raw" / "Dataset501_Mine").mkdir(parents=True)
    return tmp_path


def complete(place: Path, line: str, shell: str = "fish", **environment: str | None) -> list[str]:
    """Return the completions of the last word of a line."""
    words = line.split(" ")
    variables: dict[str, str | None] = {
        **os.environ,
        "_NNUNET_CPR_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "nnUNet_results": str(place / "results"),
        "nnUNet_raw": str(place / "raw"),
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
    assert complete(place, "nnunet-cpr study re") == ["report"]
    assert complete(place, "nnunet-cpr study run quick --dry") == ["--dry-run"]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_files_studies_and_presets_are_completed(place: Path, shell: str) -> None:
    found = complete(place, "nnunet-cpr study status ", shell)
    assert {"mine.yaml", "finished", "heart"} <= set(found)
    assert not {"notes.txt", "not-run"} & set(found) and not any("$" in name for name in found)
    assert ("folder/" in found) == (shell == "fish"), "bash completes folders by itself"
    assert complete(place, "nnunet-cpr study report fi", shell) == ["finished"]
    assert complete(place, "nnunet-cpr study cancel folder/o", shell) == ["folder/other.yml"]


def test_zsh_completes_study_names(place: Path) -> None:
    assert complete(place, "nnunet-cpr study run fini", "zsh") == ["""_arguments '*: :(("finished"))'"""]


def test_values_of_options_are_completed(place: Path) -> None:
    assert complete(place, "nnunet-cpr study run quick --dataset ") == ["Dataset501_Mine"]
    assert complete(place, "nnunet-cpr study status quick --name ") == ["finished"]
    assert complete(place, "nnunet-cpr study new he") == ["heart"]


@pytest.mark.parametrize("results", [None, "", "/nowhere", "mine.yaml"])
def test_missing_folders_are_no_errors(place: Path, results: str | None) -> None:
    found = complete(place, "nnunet-cpr study status ", nnUNet_results=results, nnUNet_raw=results)
    assert "heart" in found and "finished" not in found
    assert complete(place, "nnunet-cpr study run /nowhere/x") == [""]  # an empty line


def test_bash_uses_the_completion_script(place: Path) -> None:
    bin_folder = place / "bin"
    bin_folder.mkdir()
    program = bin_folder / "nnunet-cpr"
    program.write_text(f"#!{sys.executable}\nfrom nnunet_cpr.cli import main\nmain()\n")
    program.chmod(0o755)
    script = """
        eval "$(_NNUNET_CPR_COMPLETE=source_bash nnunet-cpr)"
        COMP_WORDS=(nnunet-cpr study status fi); COMP_CWORD=3
        _nnunet_cpr_completion nnunet-cpr
        echo "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "nnUNet_results": str(place / "results")}
    environment["PATH"] = f"{bin_folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=place, env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("finished\n", "")
