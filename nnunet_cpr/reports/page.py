"""Page of a report: its content in the order in which it is read, its text and its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console

from nnunet_cpr.files import atomic_write
from nnunet_cpr.reports import comparison_tables, figures, structures, tables, words
from nnunet_cpr.reports.comparison import Comparison
from nnunet_cpr.reports.figures import Picture
from nnunet_cpr.reports.over_datasets import judge_scopes
from nnunet_cpr.reports.pairing import compare_with
from nnunet_cpr.reports.pictures import draw_cases
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.reports.results import UNSEEDED, StudyResults
from nnunet_cpr.reports.selection import Compared, choose_compared, selection_notes
from nnunet_cpr.reports.surface_metrics import add_surface_metrics
from nnunet_cpr.reports.tables import Table
from nnunet_cpr.studies.study import Study

CAVEAT, METHODS = (Path(__file__).parent / "methods.txt").read_text(encoding="utf-8").splitlines()
"""Paragraphs of the notes that are the same in all reports."""


@dataclass
class Section:
    """Part of a report.

    Attributes:
        title: heading.
        text: paragraphs.
        tables, pictures: shown below the text.
        is_open: False if the page shows it on a click only.
    """

    title: str
    text: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    is_open: bool = False


@dataclass(frozen=True)
class Report:
    """Content of a report.

    Attributes:
        answer: the result in words.
        main: the main table.
        notes: its notes.
        sections: content of the page in its order.
        documents: text of each file by name; None for one that this study does not have.
    """

    answer: list[str]
    main: Table
    notes: list[str]
    sections: list[Section]
    documents: dict[str, str | None]


def build_report(found: StudyResults, raw: Path | None = None) -> Report:
    """Return the report of a study's results.

    Args:
        found: results of the study.
        raw: nnU-Net's ``nnUNet_raw``; None leaves out the pictures of cases.
    """
    conditions, study = found.by_condition(), found.study
    compared = [choose_compared(each) for each in conditions]
    of_trainers = compared[0].results.study
    judged = tested = judge_scopes(compare_with(compared, of_trainers.reference))
    if of_trainers.non_inferior_to != of_trainers.reference:
        tested = judge_scopes(compare_with(compared, of_trainers.non_inferior_to))
    main = tables.shown_main_table(conditions, judged)
    answer = words.answers(conditions, judged, tested)
    notes = tables.main_table_notes(conditions, judged) + selection_notes(compared)
    notes += words.fold_notes(judged) + words.ratio_notes(compared) + found.notes
    sections = _build_sections(compared, answer, main, notes, judged, raw)
    numbers = [tables.main_table(each, judged) for each in conditions]
    cases = found.cases.assign(seed=found.cases["seed"].replace(UNSEEDED, None))
    is_over = any(each.datasets for each in judged)
    documents = {
        "report.html": render("page.html.j2", study.name, sections),
        "report.md": render("page.md.j2", study.name, sections),
        "report.tex": tables.to_latex(main, notes),
        "table.csv": _csv(tables.with_own_places(pd.concat(numbers, ignore_index=True), study)),
        "comparisons.csv": _csv(comparison_tables.comparison_table(judged)),
        "non_inferiority.csv": _csv(comparison_tables.non_inferiority_table(tested)),
        "over_datasets.csv": _csv(comparison_tables.over_table(judged)) if is_over else None,
        "cases.csv": _csv(tables.with_own_places(cases, study)),
    }
    return Report(answer, main, notes, sections, documents)


def _build_sections(
    conditions: Sequence[Compared],
    answer: list[str],
    main: Table,
    notes: list[str],
    comparisons: Sequence[Comparison],
    raw: Path | None,
) -> list[Section]:
    """Return the sections of a report: the answer, one table and one figure, then everything else."""
    result = Section("Result", answer, [main], is_open=True)
    sections = [result, Section("Notes", [CAVEAT, *notes, METHODS], is_open=True)]
    if over := [each for each in comparisons if each.datasets]:
        first = [each for each in over if each.metric == over[0].metric]
        result.tables, result.pictures = [], [figures.draw_over_datasets(first)]
        sections.insert(1, Section("Means of the data sets", tables=[main], is_open=True))
    for compared in conditions:
        condition = compared.of_study.condition
        here = [each for each in comparisons if each.condition == condition]
        details = list(_details(compared, here, raw))
        if len(conditions) > 1:
            details = [_merge(details, compared.of_study.title)]
        elif here:
            result.pictures, details[0].pictures = details[0].pictures[:1], details[0].pictures[1:]
        sections += details
    return sections


def _merge(sections: Sequence[Section], title: str) -> Section:
    """Return one section with the content of several."""
    return Section(
        title,
        [paragraph for section in sections for paragraph in section.text],
        [table for section in sections for table in section.tables],
        [picture for section in sections for picture in section.pictures],
    )


def _details(compared: Compared, judged: list[Comparison], raw: Path | None) -> Iterator[Section]:
    """Yield the sections of one condition."""
    results, title = compared.of_study, compared.of_study.title
    if results.cases.empty:
        yield Section(title, ["No run has finished."])
        return
    known = [each for each in judged if each.cases]
    if judged:
        by_metric = [[each for each in known if each.metric == m] for m in results.metrics]
        drawn = [figures.draw_differences(each, title) for each in by_metric if each]
        shown = comparison_tables.shown_comparisons(judged)
        yield Section(f"Differences: {title}", [], [shown], drawn)
    runs = [figures.draw_runs(results, metric) for metric in results.metrics]
    sizes = structures.voxel_sizes(results)
    shown_tables = [
        *(tables.class_table(results, metric) for metric in results.metrics),
        *(structures.interval_table(compared, metric) for metric in compared.results.metrics if judged),
        structures.failed_table(results),
        structures.volume_table(results, sizes),
    ]
    known_tables = [table for table in shown_tables if table is not None]
    yield Section(f"Runs and structures: {title}", [], known_tables, runs)
    if known:
        first = [each for each in known if each.metric == known[0].metric]
        best = max(first, key=lambda each: each.gain)
        names = f"{best.entry.full_title} instead of {best.reference.full_title}"
        pictures, notes = draw_cases(compared, first, raw) if raw is not None else ([], [])
        by_size = structures.case_sizes(results, sizes)
        text = []
        if by_size:
            text.append(f"{names}: gain of {best.metric.title} in each case.")
        if pictures:
            text.append(
                "The case of the lowest Dice of each trainer. A picture shows the slice in which the "
                "two trainers differ most."
            )
        pictures = [figures.draw_sizes(best, *by_size), *pictures] if by_size else pictures
        if pictures or notes:
            yield Section(f"Cases: {title}", [*text, *notes], [], pictures)
    if not results.epochs.empty:
        curves, times = figures.draw_curves(results), tables.time_table(results)
        yield Section(f"Curves and times: {title}", [], [times], [curves])


def render(template: str, study_name: str, sections: Sequence[Section]) -> str:
    """Return the sections by one of the templates of this folder, as HTML or as Markdown."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=template.endswith("html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    markdown = {"escape_markdown": tables.escape_markdown, "markdown_table": tables.to_markdown}
    environment.filters.update(table=tables.to_html, **markdown)
    return environment.get_template(template).render(study_name=study_name, sections=sections)


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
        Refusal: the study has no data set, or no fold has finished.
        OSError: a file cannot be written.
    """
    found = add_surface_metrics(read_results(study, results, splits, preprocessed), preprocessed)
    report = build_report(found, raw)
    files = {name: text.encode() for name, text in report.documents.items() if text is not None}
    written = [*files, "figures"]
    for picture in (each for section in report.sections for each in section.pictures):
        files |= {f"figures/{picture.name}.{suffix}": data for suffix, data in picture.files.items()}
    (output / "figures").mkdir(parents=True, exist_ok=True)
    _remove_earlier(output, [*report.documents], files)
    for name, content in files.items():
        with atomic_write(output / name) as path:
            path.write_bytes(content)
    for line in (*report.answer, report.main.cells.to_string(), *report.notes):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return [output / name for name in written]


def _remove_earlier(output: Path, documents: Sequence[str], files: Mapping[str, bytes]) -> None:
    """Remove what an earlier report, of other data sets or trainers, has and this one does not."""
    for name in documents:
        if name not in files:
            (output / name).unlink(missing_ok=True)
    for kind in figures.FIGURES:
        for path in (output / "figures").glob(f"{kind}-*"):
            if f"figures/{path.name}" not in files:
                path.unlink()


def _csv(table: pd.DataFrame) -> str:
    return str(table.to_csv(index=False, lineterminator="\n"))
