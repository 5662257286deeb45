"""Content of a report, in the order in which it is read, and its text in HTML and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from nnunet_cpr.reports.checks import find_warnings
from nnunet_cpr.reports.comparison_tables import shown_comparisons
from nnunet_cpr.reports.figures import (
    Picture,
    draw_curves,
    draw_differences,
    draw_over_datasets,
    draw_runs,
)
from nnunet_cpr.reports.numbers import Numbers
from nnunet_cpr.reports.over_datasets import OverDatasets
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

Family = tuple[list[Judged[OverDatasets]], list[Judged[Numbers]]]
"""Comparisons with one reference, over data sets and in each setting."""
CAVEAT = (
    "A verdict is about methods and needs at least 3 seeds and 2 folds, or 3 data sets, as another "
    "training of the same method can differ by as much. A difference that is not statistically "
    "significant may still exist."
)
_VERDICTS = set(Verdict) - {Verdict.UNDECIDED, Verdict.NONE}
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


def answers(parts: Sequence[Results], judged: Family, tested: Family) -> list[str]:
    """Return the result in words: warnings, a sentence for each comparison, and non-inferiority.

    Args:
        parts: results of each setting of the study.
        judged: comparisons with the reference, over data sets and in each setting.
        tested: those with the trainer to which others may be non-inferior.
    """
    prefix = {part.setting: f"{part.title}: " if len(parts) > 1 else "" for part in parts}
    lines = [f"Warning: {prefix[p.setting]}{line}" for p in parts for line in find_warnings(p)]
    over, comparisons = judged
    lines += map(_over_sentence, over)
    chosen = _by_interest([each for each in comparisons if not over or each.verdict in _VERDICTS])
    chosen = chosen[:MAX_SENTENCES]
    lines += [f"{prefix[each.numbers.setting]}{sentence(each)}" for each in chosen]
    if more := len(comparisons) - len(chosen):
        lines.append(f"{more} {'' if over else 'more '}comparisons are in the tables of differences.")
    over, comparisons = tested
    for metric in unique([each.numbers.metric for each in comparisons]):
        titles: list[tuple[str, Judged[Any]]] = [(f"{_over_title(each)}: ", each) for each in over]
        titles += [(prefix[each.numbers.setting], each) for each in comparisons]
        of_metric = [(title, each) for title, each in titles if each.numbers.metric == metric]
        shown = [f"{t}{each.numbers.entry.full_title}" for t, each in of_metric if each.is_non_inferior]
        first = of_metric[0][1].numbers
        lines.append(
            f"Shown to be not worse than {first.reference.full_title} by more than "
            f"{metric.amount(first.margin, 'g')} of {metric.title}: "
            f"{'; '.join(shown) or _none_shown([each for _, each in of_metric])}."
        )
    return lines


def _over_title(judged: Judged[OverDatasets]) -> str:
    return f"over {len(judged.numbers.datasets)} data sets"


def _over_sentence(judged: Judged[OverDatasets]) -> str:
    """Return the result over data sets in words, and which data sets do not count."""
    n, title = judged.numbers, _over_title(judged)
    text = (
        f"{title[0].upper()}{title[1:]}: {sentence(judged).removesuffix('.')}; better on {n.better_on}"
    )
    if left_out := [each.setting.dataset for each in n.left_out]:
        text += f"; without {', '.join(left_out)}, where values are missing"
    return f"{text}."


def _none_shown(of_metric: Sequence[Judged[Any]]) -> str:
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
    ratios = {each.numbers.setting.dataset: each.numbers.ratio for each in comparisons}
    assumed = [dataset for dataset, ratio in ratios.items() if ratio.source == ASSUMED]
    if not assumed:
        return []
    which = "all data sets" if len(assumed) == len(ratios) else ", ".join(assumed)
    return [
        f"The study has not recorded the splits of {which}; four times as many cases for training as "
        "for the test of a fold are assumed, as in five folds."
    ]


def _by_interest(comparisons: Sequence[Judged[Numbers]]) -> list[Judged[Numbers]]:
    """Return the comparisons with a verdict first, of many those of the largest gain."""
    if len(comparisons) <= MAX_SENTENCES:
        return list(comparisons)
    return sorted(comparisons, key=lambda each: (each.verdict not in _VERDICTS, -each.numbers.gain))


def build_sections(
    parts: Sequence[Compared],
    answer: list[str],
    main: Table,
    notes: list[str],
    judged: Family,
    raw: Path | None,
) -> list[Section]:
    """Return the sections of a report: the answer, one table and one figure, then everything else."""
    over, comparisons = judged
    result = Section("Result", answer, [main], is_open=True)
    sections = [result, Section("Notes", [CAVEAT, *notes, METHODS], is_open=True)]
    if over:
        first = [each for each in over if each.numbers.metric == over[0].numbers.metric]
        picture = draw_over_datasets(first)
        means = Section("Means of the data sets", [], [main], is_open=True)
        sections[:1] = [Section("Result", answer, pictures=[picture], is_open=True), means]
    for part in parts:
        here = [c for c in comparisons if c.numbers.setting == part.study_results.setting]
        details = list(_details(part, here, raw))
        sections += [_merge(details, part.study_results.title)] if len(parts) > 1 else details
    drawn = [each for each in sections if each.title.startswith("Differences") and each.pictures]
    result.pictures = [drawn[0].pictures.pop(0)] if drawn else []
    return sections


def _merge(sections: Sequence[Section], title: str) -> Section:
    """Return one section with the content of several."""
    merged = Section(title)
    for each in sections:
        merged.text += each.text
        merged.tables += each.tables
        merged.pictures += each.pictures
    return merged


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
    return _render("page.html.j2", study_name, sections)


def render_markdown(study_name: str, sections: Sequence[Section]) -> str:
    """Return the sections as Markdown, with the alternative texts of the figures."""
    return _render("page.md.j2", study_name, sections)


def _render(template: str, study_name: str, sections: Sequence[Section]) -> str:
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
