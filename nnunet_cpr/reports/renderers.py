"""Tables of text, and their renderers for a terminal, Markdown and LaTeX.

Pandas' Styler cannot put small lines below a value, so the renderers are our own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from nnunet_cpr import __version__


@dataclass(frozen=True)
class Value:
    """Number in a table, with small lines below it such as a standard deviation."""

    text: str
    below: tuple[str, ...] = ()
    best: bool = False


@dataclass(frozen=True)
class Line:
    """One line of a table; lines with the same group are below its heading."""

    title: str
    values: tuple[Value, ...]
    group: str = ""


@dataclass(frozen=True)
class Table:
    """Table of text; ``groups`` are (heading, number of columns) of neighbouring columns."""

    corner: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    groups: tuple[tuple[str, int], ...] = ()

    @property
    def headings(self) -> list[str]:
        """Heading of each column's group; empty if there is none."""
        of_groups = [heading for heading, columns in self.groups for _ in range(columns)]
        return of_groups or [""] * len(self.columns)

    @property
    def grouped(self) -> bool:
        """True if any group of columns has a heading."""
        return any(heading for heading, _ in self.groups)

    @property
    def blocks(self) -> list[tuple[str, list[Line]]]:
        """Neighbouring lines of the same group, with its heading."""
        return [(group, list(lines)) for group, lines in groupby(self.lines, key=lambda x: x.group)]


def print_table(table: Table, title: str, console: Console) -> None:
    """Print a table, in parts of as many columns as the terminal is wide enough for."""
    start = 0
    while start < len(table.columns):
        end = len(table.columns)
        rich = _rich(_columns(table, start, end), title)
        while (
            end > start + 1 and rich.__rich_measure__(console, console.options).maximum > console.width
        ):
            end -= 1
            rich = _rich(_columns(table, start, end), title)
        console.print(rich)
        start = end


def _columns(table: Table, start: int, end: int) -> Table:
    """Return some columns of a table."""
    groups = tuple((heading, len(list(same))) for heading, same in groupby(table.headings[start:end]))
    lines = tuple(Line(line.title, line.values[start:end], line.group) for line in table.lines)
    return Table(table.corner, table.columns[start:end], lines, groups if table.grouped else ())


def _rich(table: Table, title: str) -> RichTable:
    rich = RichTable(title=Text(title), title_justify="left")
    rich.add_column(table.corner, overflow="fold")
    headings = table.headings
    for position, column in enumerate(table.columns):
        heading = headings[position] + "\n" if table.grouped else ""
        rich.add_column(Text(heading + column), justify="right", overflow="fold")
    for group, lines in table.blocks:
        if group:
            rich.add_section()
            rich.add_row(Text(group, style="bold"))
        for line in lines:
            cells = []
            for value in line.values:
                text = Text(value.text, style="bold" if value.best else "")
                text.append("".join(f"\n{more}" for more in value.below), style="not bold dim")
                cells.append(text)
            rich.add_row(Text("  " * bool(group) + line.title), *cells)
    return rich


def markdown(table: Table) -> str:
    """Return a Markdown table, with the groups of columns in their names."""
    titles = [
        f"{escape_markdown(heading)}<br>{escape_markdown(column)}"
        if heading
        else escape_markdown(column)
        for heading, column in zip(table.headings, table.columns)
    ]

    def pipe_value(value: Value) -> str:
        text = f"**{value.text}**" if value.best else value.text
        return "<br>".join([text, *value.below])

    rows = [[escape_markdown(table.corner), *titles], ["---", *["---:"] * len(titles)]]
    for group, lines in table.blocks:
        if group:
            rows.append([f"*{escape_markdown(group)}*", *[""] * len(titles)])
        rows += [[escape_markdown(line.title), *map(pipe_value, line.values)] for line in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def escape_markdown(text: str) -> str:
    """Return a text in which no character has a meaning in Markdown."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)


def latex(table: Table, notes: Sequence[str]) -> str:
    r"""Return a ``tabular`` with booktabs rules; the notes are comments below it."""
    lines = [
        rf"% Made by nnunet-cpr {__version__}. Needs \usepackage{{booktabs}}.",
        r"\begin{tabular}{@{}l" + "r" * len(table.columns) + "@{}}",
        r"\toprule",
    ]
    if table.grouped:
        spans, rules, column = [], [], 2
        for heading, columns in table.groups:
            spans.append(rf"\multicolumn{{{columns}}}{{c}}{{{_tex(heading)}}}")
            if heading:
                rules.append(rf"\cmidrule(lr){{{column}-{column + columns - 1}}}")
            column += columns
        lines += [" & " + " & ".join(spans) + r" \\", " ".join(rules)]
    lines.append(" & ".join(map(_tex, [table.corner, *table.columns])) + r" \\")
    lines.append(r"\midrule")
    for number, (group, block) in enumerate(table.blocks):
        if number:
            lines.append(r"\addlinespace")
        if group:
            lines.append(rf"\multicolumn{{{len(table.columns) + 1}}}{{@{{}}l}}{{{_tex(group)}}} \\")
        for line in block:
            cells = [rf"\textbf{{{_tex(v.text)}}}" if v.best else _tex(v.text) for v in line.values]
            title = (r"\quad " if group else "") + _tex(line.title)
            lines.append(" & ".join([title, *cells]) + r" \\")
            for position in range(max((len(value.below) for value in line.values), default=0)):
                below = [v.below[position] if position < len(v.below) else "" for v in line.values]
                small = [rf"{{\scriptsize {_tex(text)}}}" if text else "" for text in below]
                lines.append(" & ".join(["", *small]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in notes)]
    return "\n".join(lines) + "\n"


_TEX = {
    **{character: "\\" + character for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "[": "{[}",  # after \\ a bracket starts an option
    "]": "{]}",
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)
