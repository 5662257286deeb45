"""The tables, and how they are written for a terminal, Markdown and LaTeX.

The main table is a tidy data frame (:func:`main_table`, ``table.csv``); the others are text in cells.
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
    fold_means,
    full_title,
    in_order,
)

OWN, COMMON, PUBLISHED = "own folds", "common folds", "published"


@dataclass(frozen=True)
class Value:
    """What stands in a table's cell: a number and, below it, smaller, what belongs to it."""

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
    """A table of text; ``groups`` are headings over neighbouring columns, as (heading, columns)."""

    corner: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    groups: tuple[tuple[str, int], ...] = ()

    @property
    def headings(self) -> list[str]:
        """The heading over each column; empty where there is none."""
        of_groups = [heading for heading, columns in self.groups for _ in range(columns)]
        return of_groups or [""] * len(self.columns)

    @property
    def grouped(self) -> bool:
        """Whether any heading has words."""
        return any(heading for heading, _ in self.groups)


def main_table(results: Results) -> pd.DataFrame:
    """``table.csv``: the mean foreground Dice of every trainer in every setting.

    Returns:
        One row for each setting, kind and trainer. ``kind`` is "own folds" (all that the trainer has
        finished), "common folds" (where trainers differ in them: those that all have which have
        any), or "published" (of the data set; configuration and plans are empty). ``dice_percent`` is
        the mean over folds and ``deviation_points`` the standard deviation over folds (n - 1);
        ``best`` marks the highest of a line whose numbers are of the same folds.
    """
    study = results.study
    means = fold_means(results.cases)
    rows: list[dict[str, object]] = []

    def add(setting: Setting, kind: str, folds: dict[str, list[int]]) -> None:
        of_setting = results.of(means, setting)
        for row in study.rows:
            wanted = folds[row.trainer]
            mine = of_setting[(of_setting["trainer"] == row.trainer) & of_setting["fold"].isin(wanted)]
            rows.append(
                {
                    **setting._asdict(),
                    "kind": kind,
                    "group": row.group,
                    "label": row.title,
                    "trainer": row.trainer,
                    "dice_percent": 100 * mine["dice"].mean(),
                    "deviation_points": 100 * mine["dice"].std(ddof=1),
                    "folds": " ".join(map(str, wanted)),
                    "folds_planned": len(study.folds),
                }
            )

    for dataset, settings in groupby(results.settings, key=lambda s: s.dataset):
        for setting in settings:
            folds = {row.trainer: results.finished(setting, row.trainer) for row in study.rows}
            add(setting, OWN, folds)
            common = common_folds(folds)
            if common and any(f and f != common for f in folds.values()):
                add(setting, COMMON, {t: common if f else [] for t, f in folds.items()})
        published = {row.trainer: row.published.get(dataset, math.nan) for row in study.rows}
        if any(not math.isnan(value) for value in published.values()):
            for row in study.rows:
                rows.append(
                    {
                        **Setting(dataset, "", "")._asdict(),
                        "kind": PUBLISHED,
                        "group": row.group,
                        "label": row.title,
                        "trainer": row.trainer,
                        "dice_percent": published[row.trainer],
                        "deviation_points": math.nan,
                        "folds": "",
                        "folds_planned": "",
                    }
                )
    table = pd.DataFrame(rows)
    # What is shown decides: equal to two decimals is equally good.
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
    """The folds that every trainer has which has any."""
    some = [f for f in folds.values() if f]
    return [fold for fold in some[0] if all(fold in f for f in some)] if some else []


def layout(results: Results, table: pd.DataFrame) -> Table:
    """The main table in the paper's layout: data sets down, trainers across under their groups."""
    study = results.study
    lines = []
    for (*parts, kind), of_line in table.groupby([*SETTING, "kind"], sort=False):
        setting = Setting(*parts)
        titles = {
            OWN: results.title(setting),
            COMMON: f"on the folds that all have ({of_line['folds'].max()})",
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
    rows = study.rows
    groups = tuple((heading, len(list(g))) for heading, g in groupby(row.group for row in rows))
    return Table("data set", tuple(row.title for row in rows), tuple(lines), groups)


def layout_notes(results: Results) -> list[str]:
    """What a reader of the main table must know."""
    folds = len(results.study.folds)
    notes = [
        "Mean foreground Dice in percent: the mean over folds of each fold's mean"
        + (", ± the standard deviation over folds (n - 1). " if folds > 1 else ". ")
        + "The best of a line is bold."
    ]
    if any(d in row.published for row in results.study.rows for d in results.study.datasets):
        notes.append(f"Published numbers: {results.study.source or 'the study names no source'}.")
    unfinished = [
        setting
        for setting in results.settings
        if any(len(results.finished(setting, row.trainer)) < folds for row in results.study.rows)
    ]
    if unfinished:
        notes.append(
            "Not all folds have finished: a mean over fewer folds says so below it. Numbers of "
            "different folds cannot be compared, so only lines of the same folds have a best one."
        )
    return notes


def class_table(results: Results, setting: Setting) -> Table | None:
    """Classes down, trainers across: percent of Dice, mean over the trainer's finished folds."""
    means = results.of(class_means(results.cases), setting)
    if means.empty:
        return None
    over_folds = means.groupby(["class", "trainer"], sort=False)["dice"].mean() * 100
    lines = [(name, over_folds.get(name)) for name in in_order(means["class"])]
    return _by_trainer(results, setting, "class", lines)


def case_table(results: Results, setting: Setting) -> Table | None:
    """Cases down, trainers across: each case's mean foreground Dice in percent."""
    means = results.of(case_means(results.cases), setting)
    if means.empty:
        return None
    by_case = 100 * means.sort_values(["fold", "case"]).set_index(["fold", "case", "trainer"])["dice"]
    cases = in_order(by_case.index.droplevel("trainer"))
    lines = [(f"{case} (fold {fold})", by_case.get((fold, case))) for fold, case in cases]
    return _by_trainer(results, setting, "case", lines)


def _by_trainer(
    results: Results, setting: Setting, corner: str, lines: Sequence[tuple[str, pd.Series]]
) -> Table:
    rows = [row for row in results.study.rows if results.finished(setting, row.trainer)]
    return Table(
        corner,
        tuple(full_title(row) for row in rows),
        tuple(
            Line(title, tuple(Value(percent(values.get(row.trainer, math.nan))) for row in rows))
            for title, values in lines
        ),
    )


def time_table(results: Results, setting: Setting) -> Table:
    """Trainers down: seconds an epoch, hours of training, what was measured from outside."""
    epochs = results.of(results.epochs, setting)
    resources = results.of(results.resources, setting)
    lines = []
    for row in results.study.rows:
        finished = results.finished(setting, row.trainer)
        mine = epochs[epochs["trainer"] == row.trainer]
        whole = mine[mine["fold"].isin(finished)].groupby("fold")["seconds"].sum(min_count=1)
        measured = resources[resources["trainer"] == row.trainer]
        lines.append(
            Line(
                full_title(row),
                (
                    Value(_recorded(mine["seconds"].median(), "{:.1f} s")),
                    Value(_duration(whole.mean())),
                    Value(_duration(measured["seconds"].mean())),
                    Value(_recorded(measured["peak_memory_bytes"].max() / 2**30, "{:.1f} GiB")),
                    Value(_recorded(measured["peak_gpu_memory_bytes"].max() / 2**30, "{:.1f} GiB")),
                ),
            )
        )
    columns = ("an epoch (median)", "training of a fold", "with validation", "memory", "GPU memory")
    return Table("trainer", columns, tuple(lines))


def percent(value: float) -> str:
    """Two decimals; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.2f}"


def _recorded(value: float, form: str) -> str:
    return "not recorded" if math.isnan(value) else form.format(value)


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "not recorded"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


# Renderers


def print_table(table: Table, title: str, console: Console) -> None:
    """To a terminal; one that is too narrow for the paper's layout gets the trainers as lines."""
    rich = _rich(table, title)
    if rich.__rich_measure__(console, console.options).maximum > console.width:
        rich = _rich(_turned(table), title)
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


def _turned(table: Table) -> Table:
    """Lines as columns and columns as lines."""
    lines = tuple(
        Line(f"{heading} {column}".strip(), tuple(line.values[position] for line in table.lines))
        for position, (heading, column) in enumerate(zip(table.headings, table.columns))
    )
    return Table("trainer", tuple(line.title for line in table.lines), lines)


def markdown(table: Table) -> str:
    """A pipe table; Markdown has no headings over columns, so the groups stand in the columns' names."""
    titles = [
        f"{_md(heading)}<br>{_md(column)}" if heading else _md(column)
        for heading, column in zip(table.headings, table.columns)
    ]

    def cell(value: Value) -> str:
        text = f"**{value.text}**" if value.best else value.text
        return "<br>".join([text, *value.below])

    rows = [[_md(table.corner), *titles], ["---", *["---:"] * len(titles)]]
    rows += [[_md(line.title), *map(cell, line.values)] for line in table.lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _md(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)


def latex(table: Table, notes: Sequence[str]) -> str:
    r"""A booktabs table that compiles by itself and by ``\input`` (with booktabs in the preamble)."""
    lines = [
        r"% Compile it, or \input it into a document that has \usepackage{booktabs}.",
        r"\makeatletter",
        r"\let\cprreportend\relax",
        # LaTeX makes \@nodocument harmless at \begin{document}; before, there is no document yet.
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
        # As wide as the table, and one box with it, so that it can be scaled.
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
    "[": "{[}",  # after \\ a bracket would be an option
    "]": "{]}",
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)
