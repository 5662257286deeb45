"""Report of a cross-validation study: tables, statistics, figures and an HTML page."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.console import Console

from nnunet_cpr._files import atomic_write
from nnunet_cpr.reports import page
from nnunet_cpr.reports.checks import find_warnings
from nnunet_cpr.reports.comparisons import Comparison, class_differences, comparison_table
from nnunet_cpr.reports.figures import write_figures
from nnunet_cpr.reports.metrics import METRICS
from nnunet_cpr.reports.non_inferiority import (
    NonInferiority,
    in_words,
    non_inferiorities,
    non_inferiority_table,
)
from nnunet_cpr.reports.renderers import Table, escape_markdown, latex, markdown, print_table
from nnunet_cpr.reports.results import UNSEEDED, ReportError, Results, Setting, read_results
from nnunet_cpr.reports.surface_metrics import add_surface_metrics
from nnunet_cpr.reports.tables import class_table, layout, layout_notes, main_table, time_table
from nnunet_cpr.reports.verdicts import CAVEAT, compare_all
from nnunet_cpr.studies.definition import Study

__all__ = ["ReportError", "write_report"]


def write_report(
    study: Study,
    results: Path,
    raw: Path | None,
    preprocessed: Path | None,
    output: Path,
    console: Console,
) -> list[Path]:
    """Print the main table and the comparisons, and write the whole report.

    Args:
        study: the study.
        results: nnU-Net's ``nnUNet_results``.
        raw: nnU-Net's ``nnUNet_raw``; None leaves out the pictures of cases.
        preprocessed: nnU-Net's ``nnUNet_preprocessed``, for class names and ground truth.
        output: the folder to write to; created if missing.
        console: where to print.

    Returns:
        The files, the page first, and the folder of figures. Equal results give equal bytes.

    Raises:
        ReportError: the study has no data set, or no fold has finished.
        OSError: a file cannot be written.
    """
    found = read_results(study, results, raw, preprocessed)
    found = add_surface_metrics(found, raw, preprocessed)
    numbers = main_table(found)
    table = layout(found, numbers)
    comparisons = compare_all(found)
    non_inferior = non_inferiorities(found)
    notes = layout_notes(found)
    html, drawings = page.render(found, table, comparisons, non_inferior, raw, preprocessed)
    documents = {
        "report.html": html,
        "report.md": _markdown(found, table, comparisons, non_inferior),
        "report.tex": latex(table, notes),
        "table.csv": _csv(numbers),
        "comparisons.csv": _csv(comparison_table(comparisons)),
        "classes.csv": _csv(class_differences(found, comparisons)),
        "non_inferiority.csv": _csv(non_inferiority_table(non_inferior)),
        "cases.csv": _csv(found.cases.assign(seed=found.cases["seed"].replace(UNSEEDED, None))),
    }
    output.mkdir(parents=True, exist_ok=True)
    for name, text in documents.items():
        with atomic_write(output / name) as path:
            path.write_text(text, encoding="utf-8", newline="\n")
    write_figures(output / "figures", drawings)
    print_table(table, f"Study {study.name}", console)
    several = len(found.settings) > 1

    def place(setting: Setting) -> str:
        return f"{found.title(setting)}: " if several else ""

    sentences = [
        f"Warning: {place(setting)}{line}"
        for setting in found.settings
        for line in find_warnings(found, setting)
    ]
    if comparisons:
        sentences += ["", *(place(c.setting) + c.sentence for c in comparisons), CAVEAT, ""]
        for setting in found.settings:
            sentences += [place(setting) + line for line in in_words(non_inferior, setting)]
    for line in [*notes, *sentences, *found.notes]:
        console.print(line, markup=False, highlight=False)
    return [output / name for name in (*documents, "figures")]


def _csv(table: pd.DataFrame) -> str:
    return str(table.to_csv(index=False, lineterminator="\n"))


def _markdown(
    results: Results, main: Table, comparisons: list[Comparison], non_inferior: list[NonInferiority]
) -> str:
    study = results.study
    parts = [f"# Study {study.name}\n", "## Result\n", markdown(main)]
    parts += [f"{note}\n" for note in [*layout_notes(results), *results.notes]]
    parts.append(
        "\n".join(
            f"- {escape_markdown(entry.full_title)}: `{entry.trainer}`" for entry in study.trainers
        )
        + "\n"
    )
    parts += ["## Comparisons\n", f"{CAVEAT}\n"]
    for setting in results.settings:
        here = [c for c in comparisons if c.setting == setting]
        parts.append(f"### {results.title(setting)}\n")
        parts += [f"**Warning:** {escape_markdown(line)}\n" for line in find_warnings(results, setting)]
        parts.append(
            "\n".join(f"- {escape_markdown(c.sentence)}" for c in here) + "\n"
            if here
            else "One trainer only.\n"
        )
        if compared := [c for c in here if c.difference.cases]:
            parts.append(markdown(page.comparison_numbers(compared)))
        named = [escape_markdown(sentence) for sentence in in_words(non_inferior, setting)]
        parts.append("\n".join(f"- {sentence}" for sentence in named) + "\n")
    parts.append("## Classes\n")
    parts.append("Mean of each class over the runs that a trainer has finished.\n")
    for setting in results.settings:
        parts.append(f"### {results.title(setting)}\n")
        tables = [
            (METRICS[name], class_table(results, setting, METRICS[name])) for name in study.metrics
        ]
        for metric, classes in tables:
            if classes is not None:
                parts += [f"{metric.heading}\n", markdown(classes)]
        if all(classes is None for _, classes in tables):
            parts.append("No fold has finished.\n")
    parts.append("## Time and memory\n")
    for setting in results.settings:
        parts += [f"### {results.title(setting)}\n", markdown(time_table(results, setting))]
    parts.append(
        "Every case and class is in `cases.csv`; the figures are in `report.html` and `figures/`.\n"
    )
    return "\n".join(parts)
