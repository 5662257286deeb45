"""Content of a report, in the order in which it is read, and its text in HTML and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from nnunet_cpr.reports.checks import find_warnings
from nnunet_cpr.reports.comparison_tables import shown_comparisons
from nnunet_cpr.reports.figures import Picture, draw_curves, draw_differences, draw_runs
from nnunet_cpr.reports.numbers import Numbers
from nnunet_cpr.reports.pictures import draw_extreme_cases
from nnunet_cpr.reports.results import ASSUMED, Results, unique
from nnunet_cpr.reports.selection import Compared
from nnunet_cpr.reports.sentences import sentence
from nnunet_cpr.reports.tables import (
    Table,
    class_table,
    escape_markdown,
    time_table,
    to_html,
    to_markdown,
)
from nnunet_cpr.reports.verdicts import Judged, Verdict

CAVEAT = (
    "A verdict is about methods and needs at least 3 seeds and 2 folds, as another training of the same "
    "method can differ by as much. A difference that is not statistically significant may still exist."
)
MAX_SENTENCES = 6
"""Maximum number of comparisons in words; the table and the CSV file have all."""
METHODS = (
    "Dice is nnU-Net's. Means are over the cases of a run for each class, then over classes, then runs. "
    "Comparisons use the difference of each case between runs of the same fold and seed, averaged over "
    "the cases of a run, then over runs. Two tests decide: the corrected repeated k-fold t-test and one "
    "with folds and seeds as random factors. p is the larger of both, the interval the wider one; a "
    "verdict needs p below 0.05 after Holm's correction for all comparisons that can have one, and "
    "that a bootstrap over cases and seeds and the main table agree. Better and worse: the mean "
    "difference is not 0. Equivalent: it is within the margin (two one-sided tests). Non-inferior: it "
    "is not worse by the margin or more (one of these)."
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


def answers(
    parts: Sequence[Results], comparisons: Sequence[Judged[Numbers]], tested: Sequence[Judged[Numbers]]
) -> list[str]:
    """Return the result in words: warnings, a sentence for each comparison, and non-inferiority.

    Args:
        parts: results of each setting of the study.
        comparisons: comparisons with the reference.
        tested: comparisons with the trainer to which others may be non-inferior.
    """
    prefix = {part.setting: f"{part.title}: " if len(parts) > 1 else "" for part in parts}
    lines = [f"Warning: {prefix[p.setting]}{line}" for p in parts for line in find_warnings(p)]
    chosen = _by_interest(comparisons)[:MAX_SENTENCES]
    sentences = [f"{prefix[each.numbers.setting]}{sentence(each)}" for each in chosen]
    if more := len(comparisons) - len(sentences):
        sentences.append(f"{more} more comparisons are in the table of differences.")
    for metric in unique([each.numbers.metric for each in tested]):
        of_metric = [each for each in tested if each.numbers.metric == metric]
        shown = [
            f"{prefix[each.numbers.setting]}{each.numbers.entry.full_title}"
            for each in of_metric
            if each.is_non_inferior
        ]
        first = of_metric[0].numbers
        sentences.append(
            f"Shown to be not worse than {first.reference.full_title} by more than "
            f"{metric.amount(first.margin, 'g')} of {metric.title}: "
            f"{'; '.join(shown) or _none_shown(of_metric)}."
        )
    return lines + sentences


def _none_shown(of_metric: Sequence[Judged[Numbers]]) -> str:
    """Say that no trainer was shown to be non-inferior, and which margin these runs could have shown."""
    smallest = min((e.smallest_margin for e in of_metric if e.evidence.is_possible), default=0.0)
    numbers = of_metric[0].numbers
    if smallest <= numbers.margin:
        return "no trainer"
    return (
        f"no trainer (equal ones could have been shown within {numbers.metric.amount(smallest)} at best)"
    )


def ratio_notes(comparisons: Sequence[Judged[Numbers]]) -> list[str]:
    """Return a note for the data sets whose splits the study has not recorded."""
    assumed = unique(
        [e.numbers.setting.dataset for e in comparisons if e.numbers.ratio.source == ASSUMED]
    )
    text = f"{', '.join(assumed)}: the study has not recorded its splits; four times as many cases for "
    return (
        [text + "training as for the test of a fold are assumed, as in five folds."] if assumed else []
    )


def _by_interest(comparisons: Sequence[Judged[Numbers]]) -> list[Judged[Numbers]]:
    """Return the comparisons with a verdict first, of many those of the largest gain."""
    if len(comparisons) <= MAX_SENTENCES:
        return list(comparisons)
    open_ones = (Verdict.UNDECIDED, Verdict.NONE)
    return sorted(comparisons, key=lambda each: (each.verdict in open_ones, -each.numbers.gain))


def build_sections(
    parts: Sequence[Compared],
    answer: list[str],
    main: Table,
    notes: list[str],
    comparisons: Sequence[Judged[Numbers]],
    raw: Path | None,
) -> list[Section]:
    """Return the sections of a report: the answer, one table and one figure, then everything else."""
    result = Section("Result", answer, [main], is_open=True)
    sections = [result, Section("Notes", [CAVEAT, *notes, METHODS], is_open=True)]
    for part in parts:
        here = [c for c in comparisons if c.numbers.setting == part.study_results.setting]
        sections += _details(part, here, raw)
    drawn = [each for each in sections if each.title.startswith("Differences") and each.pictures]
    result.pictures = [drawn[0].pictures.pop(0)] if drawn else []
    return sections


def _details(
    compared: Compared, comparisons: list[Judged[Numbers]], raw: Path | None
) -> Iterator[Section]:
    """Yield the sections of one setting."""
    part = compared.study_results
    title = part.title
    if part.cases.empty:
        yield Section(title, ["No run has finished."])
        return
    if comparisons:
        known = [each for each in comparisons if each.numbers.cases]
        metrics = unique([each.numbers.metric for each in known])
        by_metric = [[each for each in known if each.numbers.metric == m] for m in metrics]
        figures = [draw_differences(each, title) for each in by_metric]
        yield Section(f"Differences: {title}", tables=[shown_comparisons(comparisons)], pictures=figures)
    runs = [draw_runs(part, metric) for metric in part.metrics]
    classes = [class_table(part, metric) for metric in part.metrics]
    yield Section(f"Runs and classes: {title}", tables=classes, pictures=runs)
    best = _best(comparisons)
    if best is not None and raw is not None:
        pictures, notes = draw_extreme_cases(compared, best, raw)
        names = f"{best.entry.full_title} and {best.reference.full_title}"
        text = f"{names}: the slice with the most wrong voxels."
        yield Section(f"Pictures of cases: {title}", [text, *notes], pictures=pictures)
    if not part.epochs.empty:
        yield Section(f"Curves and times: {title}", [], [time_table(part)], [draw_curves(part)])


def _best(comparisons: Sequence[Judged[Numbers]]) -> Numbers | None:
    """Return the comparison with the largest gain by the study's first metric."""
    known = [each.numbers for each in comparisons if each.numbers.cases]
    first = [numbers for numbers in known if numbers.metric == known[0].metric]
    return max(first, key=lambda numbers: numbers.gain, default=None)


def render_html(study_name: str, sections: Sequence[Section]) -> str:
    """Return the self-contained page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["table"] = to_html
    return (
        environment.get_template("page.html.j2").render(study_name=study_name, sections=sections) + "\n"
    )


def render_markdown(study_name: str, sections: Sequence[Section]) -> str:
    """Return the sections as Markdown, with the alternative texts of the figures."""
    parts = [f"# Study {study_name}"]
    for section in sections:
        parts += [f"## {escape_markdown(section.title)}", *map(escape_markdown, section.text)]
        parts += [
            f"{escape_markdown(table.caption)}:\n\n{to_markdown(table).rstrip()}"
            for table in section.tables
        ]
        parts += [escape_markdown(picture.alt) for picture in section.pictures]
    return "\n\n".join(parts) + "\n"
