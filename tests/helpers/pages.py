"""Code blocks of the documentation and their marks.

A comment before a block says why it is not run as it stands::

    <!-- tested by: tests/nnunet/test_trainer.py -->      that test runs it, or the same with small data
    <!-- not run: needs a Slurm cluster -->               the reason

``<!-- all blocks tested by: FILE -->`` marks a whole page. ``<!-- setup`` and lines of Python before
``-->`` are run before the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import ROOT

DOCS = ROOT / "docs"
GENERATED = DOCS / "evidence"
"""Folder of pages that ``docs/scripts/evidence.py`` writes."""
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in DOCS.rglob("*.md") if GENERATED not in path.parents),
]

_PAGE = re.compile(r"<!-- all blocks tested by: (\S+) -->")
_FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_COMMENTS = re.compile(r"<!--\s*(tested by|not run|setup):?\s*((?:(?!-->).)*?)\s*-->\s*$", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        page: path below the root of the repository.
        line: number of its first line.
        language: word after the fence.
        code: text without the fences.
        tested_by: test file named by the mark, or empty.
        reason: reason of the mark why it is not run, or empty.
        setup: Python code to run before it.
    """

    page: str
    line: int
    language: str
    code: str
    tested_by: str = ""
    reason: str = ""
    setup: str = ""

    @property
    def is_run(self) -> bool:
        return not self.tested_by and not self.reason

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Return the code blocks of a page."""
    text = page.read_text()
    name = str(page.relative_to(ROOT))
    whole = _PAGE.search(text)
    for match in _FENCE.finditer(text):
        before, marks = text[: match.start()].rstrip(), {}
        while (comment := _COMMENTS.search(before)) is not None:
            marks[comment[1]] = comment[2]
            before = before[: comment.start()].rstrip()
        indent = len(match[1])
        code = "".join(line[indent:] if line.strip() else line for line in match[3].splitlines(True))
        yield Block(
            name,
            text.count("\n", 0, match.start()) + 1,
            match[2],
            code,
            marks.get("tested by", whole[1] if whole else ""),
            marks.get("not run", ""),
            marks.get("setup", ""),
        )


def without_blocks(text: str) -> str:
    """Return a page without its code blocks and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.DOTALL)
