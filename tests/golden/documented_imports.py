"""Names that the documentation imports."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_REFERENCE = re.compile(r"^::: (nnunet_cpr[\w.]*)", re.MULTILINE)
_STATEMENT = re.compile(
    r"\b(?:from nnunet_cpr[\w.]* import (?:\([^)]*\)|\w+(?:, \w+)*)|import nnunet_cpr[\w.]*)"
)
_MODULE = re.compile(r"python -m (nnunet_cpr[\w.]*)")


def documented_imports() -> list[str]:
    """Return the dotted names of this package that pages, recipes and tutorials import or describe."""
    found = {name for path in _pages() for name in _names(path)}
    return sorted(name for name in found if not any(part.startswith("_") for part in name.split(".")))


def resolve(name: str) -> object:
    """Return the object of a dotted name, importing its modules.

    Raises:
        AttributeError, ModuleNotFoundError: it does not exist.
    """
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for k, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:k]))
        found = getattr(found, part)
    return found


def _pages() -> list[Path]:
    kinds = ("*.md", "*.py", "*.ipynb")
    pages = [path for kind in kinds for path in (ROOT / "docs").rglob(kind)]
    return [ROOT / "README.md", *(path for path in pages if "scripts" not in path.parts)]


def _names(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    yield from _REFERENCE.findall(text)
    yield from _MODULE.findall(text)
    for statement in _STATEMENT.findall(text):
        yield from _imported(statement)


def _imported(statement: str) -> Iterator[str]:
    (node,) = ast.parse(statement).body
    if isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
