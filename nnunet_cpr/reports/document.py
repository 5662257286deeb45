"""Content of a report, in the order in which it is read, and its text in HTML and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from nnunet_cpr.reports.checks import find_warnings
from nnunet_cpr.reports.comparison import Comparison
from nnunet_cpr.reports.figures import Picture, draw_curves, draw_differences, draw_runs
from nnunet_cpr.reports.pictures import draw_extreme_cases
from nnunet_cpr.reports.results import Results, unique
from nnunet_cpr.reports.selection import Compared
from nnunet_cpr.reports.tables import (
    Table,
    class_table,
    comparison_numbers,
    escape_markdown,
    time_table,
    to_html,
    to_markdown,
)

CAVEAT = (
    "A verdict is about methods and needs at least 3 seeds and 2 folds, as another training of the same "
    "method can differ by as much. A difference that is not statistically significant may still exist."
)
MAX_SENTENCES = 6
"""Maximum number of comparisons in words; the table and the CSV file have all."""
METHODS = (
    "Dice is nnU-Net's. Means are over the cases of a run for each class, then over classes, then runs. "
    "Comparisons use the difference of each case between runs of the same fold and seed, averaged over "
    "the cases of a run, then over runs. p is the larger one of the corrected repeated k-fold t-test "
    "and a test with folds and seeds as random factors, after Holm's correction; the interval is that "
    "of the former. Better and worse: p is below 0.05 and a bootstrap over cases and seeds agrees. "
    "Equivalent: the difference is within the margin with a probability of at least 0.95, and the "
    "bootstrap agrees."
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
    parts: Sequence[Results], comparisons: Sequence[Comparison], tested: Sequence[Comparison]
) -> list[str]:
    """Return the result in words: warnings, a sentence for each comparison, and non-inferiority.

    Args:
        parts: results of each setting of the study.
        comparisons: comparisons with the reference.
        tested: comparisons with the trainer to which others may be non-inferior.
    """
    prefix = {part.setting: f"{part.title}: " if len(parts) > 1 else "" for part in parts}
    lines = [f"Warning: {prefix[p.setting]}{line}" for p in parts for line in find_warnings(p)]
    sentences = [f"{prefix[c.setting]}{c.sentence}" for c in _by_interest(comparisons)[:MAX_SENTENCES]]
    if more := len(comparisons) - len(sentences):
        sentences.append(f"{more} more comparisons are in the table of differences.")
    for metric in unique([c.metric for c in tested]):
        of_metric = [c for c in tested if c.metric == metric]
        shown = [f"{prefix[c.setting]}{c.entry.full_title}" for c in of_metric if c.is_non_inferior]
        first = of_metric[0]
        sentences.append(
            f"Shown to be not worse than {first.reference.full_title} by more than "
            f"{metric.amount(first.margin, 'g')} of {metric.title}: {'; '.join(shown) or 'no trainer'}."
        )
    return lines + sentences


def _by_interest(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with a verdict first, of many those of the largest gain."""
    if len(comparisons) <= MAX_SENTENCES:
        return list(comparisons)
    return sorted(comparisons, key=lambda c: (c.verdict == "undecided", -c.gain))


def build_sections(
    parts: Sequence[Compared],
    answer: list[str],
    main: Table,
    notes: list[str],
    comparisons: Sequence[Comparison],
    raw: Path | None,
) -> list[Section]:
    """Return the sections of a report: the answer, one table and one figure, then everything else."""
    result = Section("Result", answer, [main], is_open=True)
    sections = [result, Section("Notes", [CAVEAT, *notes, METHODS], is_open=True)]
    for part in parts:
        here = [c for c in comparisons if c.setting == part.study_results.setting]
        sections += _details(part, here, raw)
    drawn = [each for each in sections if each.title.startswith("Differences") and each.pictures]
    result.pictures = [drawn[0].pictures.pop(0)] if drawn else []
    return sections


def _details(compared: Compared, comparisons: list[Comparison], raw: Path | None) -> Iterator[Section]:
    """Yield the sections of one setting."""
    part = compared.study_results
    title = part.title
    if part.cases.empty:
        yield Section(title, ["No run has finished."])
        return
    if comparisons:
        known = [c for c in comparisons if c.cases]
        by_metric = [[c for c in known if c.metric == m] for m in unique([c.metric for c in known])]
        figures = [draw_differences(each, title) for each in by_metric]
        yield Section(
            f"Differences: {title}", tables=[comparison_numbers(comparisons)], pictures=figures
        )
    runs = [draw_runs(part, metric) for metric in part.metrics]
    classes = [class_table(part, metric) for metric in part.metrics]
    yield Section(f"Runs and classes: {title}", tables=classes, pictures=runs)
    best = max((c for c in comparisons if c.cases), key=lambda c: c.gain, default=None)
    if best is not None and raw is not None:
        pictures, notes = draw_extreme_cases(compared, best, raw)
        names = f"{best.entry.full_title} and {best.reference.full_title}"
        text = f"{names}: the slice with the most wrong voxels."
        yield Section(f"Pictures of cases: {title}", [text, *notes], pictures=pictures)
    if not part.epochs.empty:
        yield Section(f"Curves and times: {title}", [], [time_table(part)], [draw_curves(part)])


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
        parts += [f"{table.caption}:\n\n{to_markdown(table).rstrip()}" for table in section.tables]
        parts += [escape_markdown(picture.alt) for picture in section.pictures]
    return "\n\n".join(parts) + "\n"
