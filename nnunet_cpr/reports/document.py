"""Content of a report, in the order in which it is read, and its text in HTML and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from nnunet_cpr.reports import figures, tables
from nnunet_cpr.reports.comparison_tables import shown_comparisons
from nnunet_cpr.reports.figures import Picture
from nnunet_cpr.reports.numbers import Numbers
from nnunet_cpr.reports.over_datasets import Family
from nnunet_cpr.reports.pictures import draw_extreme_cases
from nnunet_cpr.reports.selection import Compared
from nnunet_cpr.reports.tables import Table
from nnunet_cpr.reports.verdicts import Judged

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


def build_sections(
    settings: Sequence[Compared],
    answer: list[str],
    main: Table,
    notes: list[str],
    family: Family,
    raw: Path | None,
) -> list[Section]:
    """Return the sections of a report: the answer, one table and one figure, then everything else."""
    result = Section("Result", answer, [main], is_open=True)
    sections = [result, Section("Notes", [CAVEAT, *notes, METHODS], is_open=True)]
    if family.over:
        metric = family.over[0].numbers.metric
        first = [each for each in family.over if each.numbers.metric == metric]
        result.tables, result.pictures = [], [figures.draw_over_datasets(first)]
        sections.insert(1, Section("Means of the data sets", tables=[main], is_open=True))
    for compared in settings:
        setting = compared.of_study.setting
        here = [each for each in family.comparisons if each.numbers.setting == setting]
        details = list(_details(compared, here, raw))
        if len(settings) > 1:
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


def _details(
    compared: Compared, comparisons: list[Judged[Numbers]], raw: Path | None
) -> Iterator[Section]:
    """Yield the sections of one setting."""
    results, title = compared.of_study, compared.of_study.title
    if results.cases.empty:
        yield Section(title, ["No run has finished."])
        return
    known = [each for each in comparisons if each.numbers.cases]
    if comparisons:
        by_metric = [[each for each in known if each.numbers.metric == m] for m in results.metrics]
        drawn = [figures.draw_differences(each, title) for each in by_metric if each]
        yield Section(f"Differences: {title}", [], [shown_comparisons(comparisons)], drawn)
    runs = [figures.draw_runs(results, metric) for metric in results.metrics]
    classes = [tables.class_table(results, metric) for metric in results.metrics]
    yield Section(f"Runs and classes: {title}", [], classes, runs)
    if known and raw is not None:
        first = [each.numbers for each in known if each.numbers.metric == known[0].numbers.metric]
        best = max(first, key=lambda numbers: numbers.gain)
        pictures, notes = draw_extreme_cases(compared, best, raw)
        names = f"{best.entry.full_title} instead of {best.reference.full_title}"
        text = f"{names}: points gained in a case, and the slice with the most wrong voxels."
        yield Section(f"Pictures of cases: {title}", [text, *notes], [], pictures)
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
