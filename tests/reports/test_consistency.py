"""Sentences, rows, figures and files of simulated reports say the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.unlike_normal import KINDS, false_claims
from tests.reports.consistency import contradictions, simulated_report


@pytest.fixture(scope="module")
def undecided():
    return simulated_report(7)


@pytest.mark.parametrize("number", [4, 47])
def test_report_does_not_contradict_itself(number: int) -> None:
    """A worse trainer, and data sets with a better one."""
    report, drawn = simulated_report(number)
    assert not [*contradictions(report, drawn)]


@pytest.mark.slow
def test_reports_do_not_contradict_themselves() -> None:
    found = [line for number in range(220) for line in contradictions(*simulated_report(number))]
    assert not found


@pytest.mark.parametrize(
    ("name", "said", "instead"),
    [
        ("comparisons.csv", ",undecided,", ",equivalent,"),
        ("comparisons.csv", "not statistically significant", "equivalent within 1 point"),
        ("table.csv", "False", "True"),
        ("report.html", "<td>undecided</td>", "<td>better</td>"),
        ("report.md", "| 8", "| **8"),
        ("report.tex", "& 8", "& \\textbf{8"),
        ("non_inferiority.csv", "not shown", "shown"),
    ],
)
def test_search_finds_a_contradiction(undecided, name: str, said: str, instead: str) -> None:
    report, drawn = undecided
    text = report.documents[name]
    assert text is not None and said in text
    changed = replace(report, documents={**report.documents, name: text.replace(said, instead, 1)})
    assert [*contradictions(changed, drawn)] and not [*contradictions(report, drawn)]


def test_search_finds_another_figure(undecided) -> None:
    (report, drawn), (_, other) = undecided, simulated_report(8)
    assert [*contradictions(report, other)] and not [*contradictions(report, drawn)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.title)
def test_claims_of_unusual_results_are_rarely_false(kind) -> None:
    """More than 6 of 40 studies have a probability of 0.3 % where 5 % are false."""
    counts = false_claims(kind, 40)
    assert counts["difference"] <= 6
    # Rare failures hide a loss from every test of means, as docs/concepts/study-statistics.md says.
    assert counts["hidden loss"] <= (40 if kind.worse_by_failing else 6)
