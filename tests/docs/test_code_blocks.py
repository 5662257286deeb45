"""Code blocks and commands of the documentation."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer.main

from nnunet_cpr.cli import app
from nnunet_cpr.cpr.bounds import BOUNDS
from nnunet_cpr.names.families import FAMILIES
from nnunet_cpr.names.trainer_name import parse_trainer_name
from tests.helpers import ROOT
from tests.helpers.pages import PAGES, Block, blocks, without_blocks

BLOCKS = [block for page in PAGES for block in blocks(page)]
LANGUAGES = {"bash", "diff", "python", "yaml", "text", "bibtex"}
SEPARATORS = {"&&", "||", "|", ";", "&", "(", ")"}


def test_blocks_are_fenced_and_have_a_language() -> None:
    assert {str(block): block.language for block in BLOCKS if block.language not in LANGUAGES} == {}
    for page in PAGES:
        text = without_blocks(page.read_text())
        indented = re.search(r"^\n {4}(?![-*\d ])\S.*", text, re.MULTILINE)
        # An option block of mkdocstrings is indented below its directive.
        assert indented is None or "options:" in indented[0], f"{page}: {indented}"


def test_code_lines_fit_on_the_page() -> None:
    """A block of the site has room for 80 characters in a window of 1280 pixels."""
    one_line = "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && "  # .ci/run takes it so
    too_long = [
        f"{block}: {line}"
        for block in BLOCKS
        for line in block.code.splitlines()
        if len(line) > 80 and not line.startswith(one_line)
    ]
    assert not too_long


def test_marks_name_a_test_file_or_a_reason() -> None:
    for block in BLOCKS:
        assert not block.tested_by or (ROOT / block.tested_by).is_file(), f"{block}: {block.tested_by}"
        assert not block.reason or len(block.reason.split()) >= 3, f"{block}: {block.reason}"


def command_lines(block: Block) -> list[list[str]]:
    """Return the words of each command of a shell block, without redirections."""
    code = re.sub(r"<<'(\w+)'\n.*?\n\1\n", "\n", block.code, flags=re.DOTALL).replace("\\\n", " ")
    commands: list[list[str]] = []
    for line in code.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;()<>")
        lexer.whitespace_split = True
        commands.append([])
        for word in lexer:
            if word in SEPARATORS:
                commands.append([])
            else:
                commands[-1].append(word)
    return [command for command in commands if command]


def parse(arguments: list[str]) -> None:
    """Parse the arguments of ``nnunet-cpr`` without running it."""
    command: Any = typer.main.get_command(app)
    words = [word for word in arguments if word not in {"<", ">"}]
    if words[0].startswith("--"):  # an option of nnunet-cpr itself
        return
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=str)
def test_commands_of_the_package_parse(block: Block) -> None:
    for words in command_lines(block):
        while words and re.fullmatch(r"\w+=.*", words[0]):  # variables of the environment
            words = words[1:]
        if words and words[0].endswith("nnunet-cpr"):
            end = words.index(">") if ">" in words else len(words)
            parse(words[1:end])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_trainer_names_are_valid(page: Path) -> None:
    families = "|".join(sorted(FAMILIES, key=len, reverse=True))
    for name in set(re.findall(rf"\b(?:{families})(?:_\w+)?\b(?![<\w])", page.read_text())):
        base = name.partition("__")[0]  # the folder of a model
        if not base.endswith("_") and base not in FAMILIES:
            assert parse_trainer_name(base) is not None


def python_pages() -> list[Path]:
    return [p for p in PAGES if any(b.language == "python" and b.is_run for b in blocks(p))]


@pytest.mark.parametrize("page", python_pages(), ids=lambda page: str(page.relative_to(ROOT)))
@mock.patch.dict(BOUNDS)  # a page extends it
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python" and block.is_run:
            for code in (block.setup, block.code):
                exec(compile(code, str(block), "exec", dont_inherit=True), names)


@pytest.mark.slow  # 5 seconds a page
@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash" and b.is_run], ids=str)
def test_shell_blocks_run(block: Block, tmp_path: Path) -> None:
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), environment["PATH"]])
    for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        (tmp_path / name).mkdir()
        environment[name] = str(tmp_path / name)
    code = re.sub(r"\bpython\b", shlex.quote(sys.executable), block.code)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_study_and_sweep_files_are_valid(tmp_path: Path) -> None:
    from nnunet_cpr.studies.study_file import load
    from nnunet_cpr.vision.sweep import load_sweep

    found = [block for block in BLOCKS if block.language == "yaml" and block.is_run]
    assert found
    for block in found:
        (tmp_path / "file.yaml").write_text(block.code)
        if block.code.startswith("task:"):
            load_sweep(tmp_path / "file.yaml").runs()
        else:
            load(str(tmp_path / "file.yaml"))
