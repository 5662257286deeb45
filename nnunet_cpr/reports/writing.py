"""Files of a report and what is printed of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from nnunet_cpr.files import atomic_write
from nnunet_cpr.reports.comparison_tables import comparison_table, non_inferiority_table, over_table
from nnunet_cpr.reports.document import build_sections, render
from nnunet_cpr.reports.figures import FIGURES
from nnunet_cpr.reports.numbers import compare_with
from nnunet_cpr.reports.over_datasets import judge_family
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.reports.results import UNSEEDED
from nnunet_cpr.reports.selection import choose_compared, selection_notes
from nnunet_cpr.reports.sentences import answers, fold_notes, ratio_notes
from nnunet_cpr.reports.surface_metrics import add_surface_metrics
from nnunet_cpr.reports.tables import (
    main_table,
    main_table_notes,
    shown_main_table,
    to_latex,
    with_own_places,
)
from nnunet_cpr.studies.definition import Study


def write_report(
    study: Study,
    results: Path,
    raw: Path | None,
    preprocessed: Path | None,
    output: Path,
    console: Console,
    splits: Path | None = None,
) -> list[Path]:
    """Print the answer and the main table, and write the whole report.

    Args:
        study: the study.
        results: nnU-Net's ``nnUNet_results``.
        raw: nnU-Net's ``nnUNet_raw``; None leaves out the pictures of cases.
        preprocessed: nnU-Net's ``nnUNet_preprocessed``, for class names and ground truth.
        output: the folder to write to; created if missing.
        console: where to print.
        splits: the study's record of the splits of its data sets, if there is one.

    Returns:
        The files, the page first, and the folder of figures. Equal results give equal bytes.

    Raises:
        ReportError: the study has no data set, or no fold has finished.
        OSError: a file cannot be written.
    """
    found = add_surface_metrics(read_results(study, results, splits, preprocessed), preprocessed)
    settings = found.by_setting()
    compared = [choose_compared(each) for each in settings]
    of_trainers = compared[0].results.study
    judged = tested = judge_family(compare_with(compared, of_trainers.reference))
    if of_trainers.non_inferior_to != of_trainers.reference:
        tested = judge_family(compare_with(compared, of_trainers.non_inferior_to))
    table, answer = shown_main_table(settings), answers(settings, judged, tested)
    notes = main_table_notes(settings) + selection_notes(compared) + fold_notes(judged)
    notes += ratio_notes(compared) + found.notes
    sections = build_sections(compared, answer, table, notes, judged, raw)
    cases = found.cases.assign(seed=found.cases["seed"].replace(UNSEEDED, None))
    documents: dict[str, str | None] = {
        "report.html": render("page.html.j2", study.name, sections),
        "report.md": render("page.md.j2", study.name, sections),
        "report.tex": to_latex(table, notes),
        "table.csv": _csv(
            with_own_places(pd.concat(map(main_table, settings), ignore_index=True), study)
        ),
        "comparisons.csv": _csv(comparison_table(judged.comparisons)),
        "non_inferiority.csv": _csv(non_inferiority_table(tested.comparisons)),
        "over_datasets.csv": _csv(over_table(judged.over)) if judged.over else None,
        "cases.csv": _csv(with_own_places(cases, study)),
    }
    files = {name: text.encode() for name, text in documents.items() if text is not None}
    written = [*files, "figures"]
    for picture in (each for section in sections for each in section.pictures):
        files |= {f"figures/{picture.name}.{suffix}": data for suffix, data in picture.files.items()}
    (output / "figures").mkdir(parents=True, exist_ok=True)
    _remove_earlier(output, [*documents], files)
    for name, content in files.items():
        with atomic_write(output / name) as path:
            path.write_bytes(content)
    for line in (*answer, table.cells.to_string(), *notes):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return [output / name for name in written]


def _remove_earlier(output: Path, documents: Sequence[str], files: Mapping[str, bytes]) -> None:
    """Remove what an earlier report, of other data sets or trainers, has and this one does not."""
    for name in documents:
        if name not in files:
            (output / name).unlink(missing_ok=True)
    for kind in FIGURES:
        for path in (output / "figures").glob(f"{kind}-*"):
            if f"figures/{path.name}" not in files:
                path.unlink()


def _csv(table: pd.DataFrame) -> str:
    return str(table.to_csv(index=False, lineterminator="\n"))
