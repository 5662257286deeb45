"""Tables of the report, and their renderers for a terminal, Markdown and LaTeX.

:func:`main_table` is a tidy data frame (``table.csv``); a :class:`Table` is text for a renderer.
Pandas' Styler cannot put small lines below a value, so the renderers are our own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import pandas as pd
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from nnunet_cpr.reports.results import (
    SETTING,
    Results,
    Setting,
    case_means,
    class_means,
    full_title,
    in_order,
    run_means,
)

OWN, COMMON, PUBLISHED = "own folds", "common folds", "published"


@dataclass(frozen=True)
class Value:
    """Number in a table, with small lines below it such as a standard deviation."""

    text: str
    below: tuple[str, ...] = ()
    best: bool = False


@dataclass(frozen=True)
class Line:
    """One line of a table."""

    title: str
    values: tuple[Value, ...]


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
        """True if any group has a heading."""
        return any(heading for heading, _ in self.groups)


def main_table(results: Results) -> pd.DataFrame:
    """Return ``table.csv``: the mean foreground Dice of every trainer in every setting.

    Returns:
        One row for each setting, kind and trainer. ``kind`` is "own folds" (all that the trainer has
        finished), "common folds" (finished by all trainers with any results; only if trainers differ
        in their folds), or "published" (of the data set; configuration and plans are empty).
        ``dice_percent`` is the mean and ``deviation_points`` the standard deviation (n - 1) over folds;
        ``best`` marks the highest value of a line with the same folds.
    """
    study = results.study
    means = run_means(results.cases)
    rows: list[dict[str, object]] = []

    def add(setting: Setting, kind: str, folds: dict[str, list[int]]) -> None:
        of_setting = results.of(means, setting)
        for entry in study.trainers:
            wanted = folds[entry.trainer]
            mine = of_setting[(of_setting["trainer"] == entry.trainer) & of_setting["fold"].isin(wanted)]
            rows.append(
                {
                    **setting._asdict(),
                    "kind": kind,
                    "group": entry.group,
                    "label": entry.title,
                    "trainer": entry.trainer,
                    "dice_percent": 100 * mine["dice"].mean(),
                    "deviation_points": 100 * mine["dice"].std(ddof=1),
                    "folds": " ".join(map(str, wanted)),
                    "folds_planned": len(study.folds),
                }
            )

    for dataset, settings in groupby(results.settings, key=lambda s: s.dataset):
        for setting in settings:
            folds = {entry.trainer: results.finished(setting, entry.trainer) for entry in study.trainers}
            add(setting, OWN, folds)
            common = common_folds(folds)
            if common and any(f and f != common for f in folds.values()):
                add(setting, COMMON, {t: common if f else [] for t, f in folds.items()})
        published = {entry.trainer: entry.published.get(dataset, math.nan) for entry in study.trainers}
        if any(not math.isnan(value) for value in published.values()):
            for entry in study.trainers:
                rows.append(
                    {
                        **Setting(dataset, "", "")._asdict(),
                        "kind": PUBLISHED,
                        "group": entry.group,
                        "label": entry.title,
                        "trainer": entry.trainer,
                        "dice_percent": published[entry.trainer],
                        "deviation_points": math.nan,
                        "folds": "",
                        "folds_planned": "",
                    }
                )
    table = pd.DataFrame(rows)
    # Values that are equal in the table's two decimals are equally good.
    shown = table["dice_percent"].round(2)
    line = [*SETTING, "kind"]
    same_folds = (
        table.assign(folds=table["folds"].where(table["folds"] != ""))
        .groupby(line, sort=False)["folds"]
        .transform("nunique")
        <= 1
    )
    several = table.groupby(line, sort=False)["dice_percent"].transform("count") > 1
    highest = shown.groupby([table[column] for column in line], sort=False).transform("max")
    table["best"] = same_folds & several & (shown == highest)
    return table


def common_folds(folds: dict[str, list[int]]) -> list[int]:
    """Return the folds that all trainers with any folds have finished."""
    some = [f for f in folds.values() if f]
    return [fold for fold in some[0] if all(fold in f for f in some)] if some else []


def layout(results: Results, table: pd.DataFrame) -> Table:
    """Return the main table in the paper's layout: data sets down, trainers across in their groups."""
    study = results.study
    lines = []
    for (*parts, kind), of_line in table.groupby([*SETTING, "kind"], sort=False):
        setting = Setting(*parts)
        titles = {
            OWN: results.title(setting),
            COMMON: f"common folds ({of_line['folds'].max()})",
            PUBLISHED: "published",
        }
        values = []
        for _, row in of_line.iterrows():
            finished, planned = len(str(row["folds"]).split()), row["folds_planned"]
            below = []
            if not math.isnan(row["deviation_points"]):
                below.append(f"± {row['deviation_points']:.2f}")
            if kind == OWN and finished < planned:
                below.append(f"{finished} of {planned} folds")
            values.append(Value(percent(row["dice_percent"]), tuple(below), bool(row["best"])))
        lines.append(Line(titles[kind], tuple(values)))
    rows = study.trainers
    groups = tuple((heading, len(list(g))) for heading, g in groupby(entry.group for entry in rows))
    return Table("data set", tuple(entry.title for entry in rows), tuple(lines), groups)


def layout_notes(results: Results) -> list[str]:
    """Return the notes of the main table."""
    folds = len(results.study.folds)
    notes = [
        "Mean foreground Dice in percent over folds"
        + (" ± standard deviation over folds (n - 1). " if folds > 1 else ". ")
        + "The best value of a line is bold."
    ]
    if any(d in entry.published for entry in results.study.trainers for d in results.study.datasets):
        notes.append(f"Published numbers: {results.study.source or 'source not given'}.")
    unfinished = [
        setting
        for setting in results.settings
        if any(len(results.finished(setting, entry.trainer)) < folds for entry in results.study.trainers)
    ]
    if unfinished:
        notes.append(
            "Not all folds have finished; the number of folds is below the mean. Means over different "
            "folds cannot be compared, so only lines with the same folds have a best value."
        )
    return notes


def class_table(results: Results, setting: Setting) -> Table | None:
    """Return the Dice of each class in percent, mean over the trainer's finished folds."""
    means = results.of(class_means(results.cases), setting)
    if means.empty:
        return None
    over_folds = means.groupby(["class", "trainer"], sort=False)["dice"].mean() * 100
    lines = [(name, over_folds.get(name)) for name in in_order(means["class"])]
    return _by_trainer(results, setting, "class", lines)


def case_table(results: Results, setting: Setting) -> Table | None:
    """Return the mean foreground Dice of each case in percent."""
    means = results.of(case_means(results.cases), setting)
    if means.empty:
        return None
    by_case = 100 * means.groupby(["fold", "case", "trainer"])["dice"].mean()
    cases = in_order(by_case.index.droplevel("trainer"))
    lines = [(f"{case} (fold {fold})", by_case.get((fold, case))) for fold, case in cases]
    return _by_trainer(results, setting, "case", lines)


def _by_trainer(
    results: Results, setting: Setting, corner: str, lines: Sequence[tuple[str, pd.Series]]
) -> Table:
    rows = [entry for entry in results.study.trainers if results.finished(setting, entry.trainer)]
    return Table(
        corner,
        tuple(full_title(entry) for entry in rows),
        tuple(
            Line(title, tuple(Value(percent(values.get(entry.trainer, math.nan))) for entry in rows))
            for title, values in lines
        ),
    )


def time_table(results: Results, setting: Setting) -> Table:
    """Return the times of epochs and runs, and the peak memory, of each trainer."""
    epochs = results.of(results.epochs, setting)
    resources = results.of(results.resources, setting)
    lines = []
    for entry in results.study.trainers:
        finished = results.finished(setting, entry.trainer)
        mine = epochs[epochs["trainer"] == entry.trainer]
        whole = mine[mine["fold"].isin(finished)].groupby(["fold", "seed"])["seconds"].sum(min_count=1)
        measured = resources[resources["trainer"] == entry.trainer]
        lines.append(
            Line(
                full_title(entry),
                (
                    Value(_recorded(mine["seconds"].median(), "{:.1f} s")),
                    Value(_duration(whole.mean())),
                    Value(_duration(measured["seconds"].mean())),
                    Value(_recorded(measured["peak_memory_bytes"].max() / 2**30, "{:.1f} GiB")),
                    Value(_recorded(measured["peak_gpu_memory_bytes"].max() / 2**30, "{:.1f} GiB")),
                ),
            )
        )
    columns = ("epoch (median)", "training of a fold", "with validation", "memory", "GPU memory")
    return Table("trainer", columns, tuple(lines))


def percent(value: float) -> str:
    """Return a number with two decimals, or a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.2f}"


def _recorded(value: float, form: str) -> str:
    return "not recorded" if math.isnan(value) else form.format(value)


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "not recorded"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


# Renderers


def print_table(table: Table, title: str, console: Console) -> None:
    """Print a table, transposed if the terminal is too narrow for the trainers side by side."""
    rich = _rich(table, title)
    if rich.__rich_measure__(console, console.options).maximum > console.width:
        rich = _rich(_transposed(table), title)
    console.print(rich)


def _rich(table: Table, title: str) -> RichTable:
    rich = RichTable(title=Text(title), title_justify="left")
    rich.add_column(table.corner, overflow="fold")
    headings = table.headings
    for position, column in enumerate(table.columns):
        heading = headings[position] + "\n" if table.grouped else ""
        rich.add_column(Text(heading + column), justify="right", overflow="fold")
    for line in table.lines:
        cells = []
        for value in line.values:
            text = Text(value.text, style="bold" if value.best else "")
            text.append("".join(f"\n{more}" for more in value.below), style="not bold dim")
            cells.append(text)
        rich.add_row(Text(line.title), *cells)
    return rich


def _transposed(table: Table) -> Table:
    """Return the table with lines and columns exchanged."""
    lines = tuple(
        Line(f"{heading} {column}".strip(), tuple(line.values[position] for line in table.lines))
        for position, (heading, column) in enumerate(zip(table.headings, table.columns))
    )
    return Table("trainer", tuple(line.title for line in table.lines), lines)


def markdown(table: Table) -> str:
    """Return a Markdown table, with the groups in the names of the columns."""
    titles = [
        f"{_md(heading)}<br>{_md(column)}" if heading else _md(column)
        for heading, column in zip(table.headings, table.columns)
    ]

    def pipe_value(value: Value) -> str:
        text = f"**{value.text}**" if value.best else value.text
        return "<br>".join([text, *value.below])

    rows = [[_md(table.corner), *titles], ["---", *["---:"] * len(titles)]]
    rows += [[_md(line.title), *map(pipe_value, line.values)] for line in table.lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _md(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)


def latex(table: Table, notes: Sequence[str]) -> str:
    r"""Return a booktabs table that compiles by itself and with ``\input`` (with booktabs loaded)."""
    lines = [
        r"% Compile it, or \input it into a document that has \usepackage{booktabs}.",
        r"\makeatletter",
        r"\let\cprreportend\relax",
        # Before \begin{document}, \@nodocument is an error: then this file is the document.
        r"\ifx\@nodocument\relax\else",
        r"  \def\cprreportend{\end{document}}",
        r"  \documentclass{article}",
        r"  \usepackage[a4paper,landscape,margin=1.5cm]{geometry}",
        r"  \usepackage{booktabs}",
        r"  \begin{document}",
        r"\fi",
        r"\makeatother",
        r"\sbox0{\begin{tabular}{@{}l" + "r" * len(table.columns) + "@{}}",
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
    lines += [" & ".join(map(_tex, [table.corner, *table.columns])) + r" \\", r"\midrule"]
    for number, line in enumerate(table.lines):
        if number:
            lines.append(r"\addlinespace")
        cells = [rf"\textbf{{{_tex(v.text)}}}" if v.best else _tex(v.text) for v in line.values]
        lines.append(" & ".join([_tex(line.title), *cells]) + r" \\")
        for position in range(max(len(value.below) for value in line.values)):
            below = [v.below[position] if position < len(v.below) else "" for v in line.values]
            small = [rf"{{\scriptsize {_tex(text)}}}" if text else "" for text in below]
            lines.append(" & ".join(["", *small]) + r" \\")
    lines += [
        r"\bottomrule",
        r"\end{tabular}}%",
        # The notes have the table's width and share a box with it, so that both can be scaled.
        r"\edef\cprreportwidth{\the\wd0}%",
        r"\parbox{\cprreportwidth}{\usebox0\par\smallskip\raggedright\footnotesize",
        *(_tex(note) + r"\par" for note in notes),
        "}",
        r"\cprreportend",
    ]
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
