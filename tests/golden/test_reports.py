from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden.goldens import read_golden
from tests.golden.report_numbers import ARCHIVES, report_numbers, unpack, write_report

STUDIES = sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz"))
FIRST = ["methods", "best_sgd", "best_adam", "best_muon", "default_sgd", "acdc_best_sgd", "tuned_sgd"]
"""Studies of the default stage: those that answer the questions of the results page."""
KINDS = {"trainers": 235, "comparisons": 143, "non_inferiority": 143, "selected": 20}


@pytest.mark.parametrize(
    "study", [*FIRST, *(pytest.param(s, marks=pytest.mark.slow) for s in STUDIES if s not in FIRST)]
)
def test_report_of_archived_trainings_is_unchanged(study: str, tmp_path: Path) -> None:
    unpack(study, tmp_path / "results")
    found = report_numbers(write_report(study, tmp_path / "results", tmp_path / "report"))
    expected = read_golden(f"reports/{study}")
    assert found.keys() == expected.keys()
    for kind, entries in expected.items():
        assert found[kind].keys() == entries.keys()
    different = [
        f"{kind}: {entry}: {key}: expected {number}, got {found[kind][entry].get(key)}"
        for kind, entries in expected.items()
        for entry, numbers in entries.items()
        for key, number in numbers.items()
        if not is_same(found[kind][entry].get(key), number)
    ]
    assert not different, "\n".join(different)


def is_same(found: Any, expected: Any) -> bool:
    """Return True for equal words, and numbers that differ by less than any printed digit."""
    if isinstance(expected, float) and isinstance(found, float | int):
        return found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    return bool(found == expected)


def test_golden_reports_are_complete() -> None:
    golden = {study: read_golden(f"reports/{study}") for study in STUDIES}
    assert {kind: sum(len(g[kind]) for g in golden.values()) for kind in KINDS} == KINDS
    assert golden["methods"]["comparisons"].keys() == golden["methods"]["non_inferiority"].keys()
    numbers = next(iter(golden["best_adam"]["comparisons"].values()))
    # From docs/reference/results.md
    assert (round(numbers["difference"], 2), round(numbers["p_holm"], 3)) == (-0.45, 0.004)
    assert (round(numbers["low"], 2), round(numbers["high"], 2)) == (-0.69, -0.20)
    assert numbers["verdict"] == "worse"
