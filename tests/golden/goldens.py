"""Golden files, and the command in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

DATA = Path(__file__).parent / "data"


def read_golden(name: str) -> Any:
    """Return the content of a JSON file in ``data/``."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def write_golden(name: str, content: Any) -> None:
    """Write a JSON file in ``data/``, one short entry a line."""
    path = DATA / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(_lines(content)) + "\n"
    assert json.loads(text) == json.loads(json.dumps(content))
    path.write_text(text, encoding="utf-8")


def _lines(content: Any, indent: str = "", key: str = "", end: str = "") -> Iterator[str]:
    """Yield the lines of a JSON document, in which what fits in a line is on one."""
    line = f"{indent}{key}{json.dumps(content, ensure_ascii=False, allow_nan=False)}{end}"
    if len(line) <= 120 or not isinstance(content, list | dict) or not content:
        yield line
        return
    is_dict = isinstance(content, dict)
    items = (
        [(f"{json.dumps(k)}: ", v) for k, v in content.items()]
        if is_dict
        else [("", v) for v in content]
    )
    yield f"{indent}{key}{'{' if is_dict else '['}"
    for i, (own_key, value) in enumerate(items):
        yield from _lines(value, indent + " ", own_key, "," if i + 1 < len(items) else "")
    yield f"{indent}{'}' if is_dict else ']'}{end}"


class Outcome(NamedTuple):
    """Result of a command."""

    status: int
    output: str
    errors: str


def run_command(
    *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Outcome:
    """Run ``nnunet-cpr`` in this process, as the installed program starts it.

    Args:
        arguments: arguments of the command.
        environment: variables to set.
        folder: working directory.

    Raises:
        Exception: the command ended with a traceback.
    """
    (program,) = entry_points(group="console_scripts", name="nnunet-cpr")
    main = program.load()
    output, errors = io.StringIO(), io.StringIO()
    before, status = Path.cwd(), 0
    os.chdir(folder or before)
    try:
        with (
            warnings.catch_warnings(),
            mock.patch.dict(os.environ, {"COLUMNS": "250", **(environment or {})}),
            mock.patch.object(sys, "argv", ["nnunet-cpr", *arguments]),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
        ):
            try:
                main()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        os.chdir(before)
    return Outcome(status, output.getvalue(), errors.getvalue())
