"""Content of a report, in the order in which it is read, and its text in HTML and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from nnunet_cpr.reports.comparison_tables import shown_comparisons
from nnunet_cpr.reports.figures import (
    Picture,
    draw_curves,
    draw_differences,
    draw_over_datasets,
    draw_runs,
)
from nnunet_cpr.reports.numbers import Numbers
from nnunet_cpr.reports.over_datasets import Family
from nnunet_cpr.reports.pictures import draw_extreme_cases
from nnunet_cpr.reports.selection import Compared
from nnunet_cpr.reports.tables import (
    Table,
    class_table,
    escape_markdown,
    time_table,
    to_html,
    to_markdown,
)
from nnunet_cpr.reports.verdicts import Judged

CAVEAT = (
    "A verdict is about methods and needs at least 3 seeds and 2 folds, or 3 data sets, as another "
    "training of the same method can differ by as much. A difference that is not statistically "
    "significant may still exist."
)
METHODS = (
    "Dice is nnU-Net's. Means are over the cases of a run for each class, then over classes, then runs. "
    "Comparisons use the difference of each case between runs of the same fold and seed, averaged over "
    "the cases of a run, then over runs. Two tests decide: the corrected repeated k-fold t-test and one "
    "with folds and seeds as random factors. p is the larger of both, the interval the wider one; a "
    "verdict needs p below 0.05 after Holm's correction for all comparisons that can have one, and "
    "that a bootstrap over cases and seeds and the main table agree. Better and worse: the mean "
    "difference is not 0. Equivalent: it is within the margin (two one-sided tests). Non-inferior: it "
    "is not worse by the margin or more (one of these). Over data sets, a t-test over their mean "
    "differences decides, in which each data set counts once."
)


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
        result.tables, result.pictures = [], [draw_over_datasets(first)]
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
        figures = [draw_differences(each, title) for each in by_metric if each]
        yield Section(f"Differences: {title}", tables=[shown_comparisons(comparisons)], pictures=figures)
    runs = [draw_runs(results, metric) for metric in results.metrics]
    classes = [class_table(results, metric) for metric in results.metrics]
    yield Section(f"Runs and classes: {title}", tables=classes, pictures=runs)
    if known and raw is not None:
        first = [each.numbers for each in known if each.numbers.metric == known[0].numbers.metric]
        best = max(first, key=lambda numbers: numbers.gain)
        pictures, notes = draw_extreme_cases(compared, best, raw)
        names = f"{best.entry.full_title} and {best.reference.full_title}"
        text = f"{names}: the slice with the most wrong voxels."
        yield Section(f"Pictures of cases: {title}", [text, *notes], pictures=pictures)
    if not results.epochs.empty:
        yield Section(
            f"Curves and times: {title}", tables=[time_table(results)], pictures=[draw_curves(results)]
        )


def render(template: str, study_name: str, sections: Sequence[Section]) -> str:
    """Return the sections by one of the templates of this folder, as HTML or as Markdown."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "table": to_html,
        "markdown_table": to_markdown,
        "escape_markdown": escape_markdown,
    }
    return environment.get_template(template).render(study_name=study_name, sections=sections)
