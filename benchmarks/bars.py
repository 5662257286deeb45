"""What must not get slower, and the check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Bar:
    """A number that must not be passed."""

    what: str
    limit: float
    aim: float | None = None
    number: Callable[[float], str] = "{:.3f}".format


def check(bars: Sequence[tuple[Bar, float]], console: Console) -> bool:
    """Print each bar beside what was measured; whether all are kept."""
    table = Table(title="Bars")
    for heading in ("", "measured", "bar", "aim", ""):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for bar, measured in bars:
        kept = measured <= bar.limit
        aim = "" if bar.aim is None else bar.number(bar.aim)
        verdict = "[green]kept" if kept else "[red]missed"
        table.add_row(bar.what, bar.number(measured), f"<= {bar.number(bar.limit)}", aim, verdict)
    console.print(table)
    return all(measured <= bar.limit for bar, measured in bars)
