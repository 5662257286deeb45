"""Limits on measured numbers, and their check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

CheckOption = Annotated[bool, typer.Option("--check", help="Exit with 1 if a limit is exceeded.")]
"""Option of every benchmark with limits."""


@dataclass(frozen=True)
class Limit:
    """Largest accepted value of a measured number.

    Attributes:
        name: the number that is measured.
        maximum: the largest accepted value.
        aim: the desired value.
        text: function that formats a value.
    """

    name: str
    maximum: float
    aim: float | None = None
    text: Callable[[float], str] = "{:.3f}".format


def check_limits(limits: Sequence[tuple[Limit, float]], console: Console) -> bool:
    """Print each limit with its measured value, and return True if all values are within limits.

    Example:
        >>> check_limits([(Limit("ours / theirs", 1.05), 1.2)], Console(quiet=True))
        False
    """
    table = Table(title="Limits")
    for heading in ("", "measured", "limit", "aim", ""):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for limit, value in limits:
        aim = "" if limit.aim is None else limit.text(limit.aim)
        verdict = "[green]passed" if value <= limit.maximum else "[red]failed"
        table.add_row(limit.name, limit.text(value), f"<= {limit.text(limit.maximum)}", aim, verdict)
    console.print(table)
    return all(value <= limit.maximum for limit, value in limits)
