"""Command lines of arbitrary options and values give a result or a clear error, no traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from tests.helpers.examples import examples
from tests.helpers.report_folds import both, write_fold

TRAINS = {"demo", "doctor", "vision run", "vision sweep"}
"""Commands that take minutes if the command line is valid; only invalid ones are tested, below."""


def commands(group: Any, name: str = "") -> dict[str, Any]:
    """Return every command by its name, such as "study run"."""
    found = {}
    for word, command in group.commands.items():
        path = f"{name} {word}".strip()
        found |= commands(command, path) if hasattr(command, "commands") else {path: command}
    return found


COMMANDS = commands(typer.main.get_command(app))
OPTIONS = {
    name: sorted(
        {option for parameter in command.params for option in parameter.opts if option[0] == "-"}
    )
    for name, command in COMMANDS.items()
}
VALUES = st.sampled_from(
    ["", " ", "-", "--", "-1", "0", "1", "999", "9" * 5000, "1e9", "nan", "²", "x" * 5000, "x" * 300]
    + [
        "two\nlines",
        "[/bold]",
        "[red]",
        "..",
        ".",
        "/",
        "/dev/null",
        "/dev/full",
        "/proc/self/mem",
        "\x1b[2J",
        "ß",
    ]
    + [
        "toy.yaml",
        "other.yaml",
        "folder",
        "image.png",
        "file",
        "file/below",
        "A",
        "B",
        "0,1",
        "0,,1",
        "cpu",
        "cuda:9",
    ]
    + [
        "KEY=VALUE",
        "=",
        "quick",
        "btcv",
        "hippocampus",
        "digits",
        "cifar100-lr",
        "AdamCPR_ws10",
        "AdamCPR_wx",
    ]
    + ["Dataset001_Toy", "1", "../x", "2-0", "1:2:3:4", "--help"]
) | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=10)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished study, a study without data, and obstructing files."""
    folder = tmp_path_factory.mktemp("commands")
    for trainer in ("A", "B"):
        dice = {f"c{n}": both(0.1 * n) for n in range(1, 8)}
        write_fold(folder / "nnUNet_results", trainer, 0, dice)
    for name in ("nnUNet_raw", "nnUNet_preprocessed", "folder"):
        (folder / name).mkdir()
    (folder / "toy.yaml").write_text("datasets: Dataset001_Toy\ntrainers: [A, B]\nfolds: [0]\n")
    (folder / "other.yaml").write_text("datasets: Dataset999_Gone\ntrainers: [nnUNetTrainer]\n")
    (folder / "file").write_text(json.dumps({}))
    return folder


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(sorted(set(COMMANDS) - TRAINS)))
    options = st.tuples(st.sampled_from([*OPTIONS[name], "--help", "--nonsense"]), VALUES | st.none())
    given = [word for pair in draw(st.lists(options, max_size=3)) for word in pair if word is not None]
    words = draw(st.lists(VALUES, max_size=3))
    return [*name.split(), *(given + words if draw(st.booleans()) else words + given)]


def run(arguments: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Return exit status and stderr of a command that ends by itself."""
    for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.setenv(name, str(place / name))
    monkeypatch.chdir(place)
    before = os.listdir(place)
    result = CliRunner().invoke(app, arguments)
    for made in set(os.listdir(place)) - set(before):
        assert not made.startswith("."), "a temporary file remains"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(arguments) from result.exception
    assert "Traceback" not in result.output
    if result.exit_code == 1:
        assert result.stderr.splitlines()[-1].startswith("nnunet-cpr: "), result.stderr
    elif result.exit_code:
        assert result.exit_code == 2, result.stderr
        assert "Error" in result.stderr or "Usage" in result.stderr, result.stderr  # Typer's messages
    return result.exit_code, result.stderr


@pytest.mark.slow
@examples(10, search=150)
@given(arguments=command_lines())
def test_any_command_line_ends_without_traceback(
    arguments: list[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(arguments, place, monkeypatch)


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--folder", "file"],
        ["demo", "--folder", "file/below"],
        ["vision", "run", "digits", "AdamCPR", "--results", "file"],
        ["vision", "run", "digits", "AdamCPR", "--device", "x\ny"],
        ["vision", "run", "[/red]", "AdamCPR"],
        ["vision", "sweep", "two\nlines"],
        ["study", "run", "other.yaml", "--time", "9" * 5000],
        ["study", "run", "other.yaml", "--name", ".."],
        ["study", "run", "other.yaml", "-d", "²"],
        ["study", "status", "other.yaml", "-d", "../../x"],
        ["study", "report", "toy.yaml", "-o", "file"],
        ["study", "new", "quick", "x" * 300],
    ],
)  # fmt: skip
def test_invalid_command_is_refused_in_one_line(
    arguments: list[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, told = run(arguments, place, monkeypatch)
    assert status == 1 and len(told.splitlines()) == 1, told


def test_report_folder_may_contain_brackets(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich would interpret brackets as markup."""
    assert run(["study", "report", "toy.yaml", "-o", "[/bold]"], place, monkeypatch)[0] == 0
    assert run(["study", "new", "quick", "[/red].yaml"], place, monkeypatch)[0] == 0
