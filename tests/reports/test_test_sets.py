"""Results on test sets: how often the test of their verdicts is wrong."""

from __future__ import annotations

import pytest

from benchmarks.test_sets import GAIN, KINDS, RARE_FAILURES, SIZES, Kind, claims

by_title = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.title)


@by_title
def test_simulated_claims_on_test_sets_are_rarely_false(kind: Kind) -> None:
    """More than 34 of 400 studies have a probability of 0.2 % where 5 % are false."""
    assert claims(kind, folds=3, seeds=2, cases=20, studies=400) <= 8.5


@pytest.mark.release
@by_title
@pytest.mark.parametrize(("folds", "seeds"), SIZES)
@pytest.mark.parametrize("cases", [20, 40, 60])
def test_false_claims_on_test_sets_are_at_most_six_percent(
    kind: Kind, folds: int, seeds: int, cases: int
) -> None:
    assert claims(kind, folds, seeds, cases, studies=20_000) <= 6


@pytest.mark.release
@pytest.mark.parametrize("seeds", [2, 3])
def test_a_gain_on_a_test_set_is_found(seeds: int) -> None:
    assert claims(KINDS[0], folds=3, seeds=seeds, cases=60, studies=1000, gain=GAIN) >= 60


@pytest.mark.release
def test_rare_failures_deceive_the_test() -> None:
    """They are why failed cases stand beside these verdicts."""
    assert claims(RARE_FAILURES, folds=3, seeds=3, cases=40, studies=1000) >= 30
