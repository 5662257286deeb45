"""Statistics against calculations by hand that share no code with the package."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nnunet_cpr.reports.statistics import (
    MIN_CASES,
    Paired,
    compare,
    holm,
    mean_interval,
    p_number,
    rank_correlation,
    signed_rank,
    verdict,
)
from tests.helpers.examples import examples

NAN = float("nan")
# Dice in percent to two decimals: no differences that are nothing but rounding.
dice = st.integers(0, 10000).map(lambda n: n / 100)
values = arrays(np.float64, st.shared(st.integers(6, 24), key="n"), elements=dice)


def exact_signed_rank(differences):
    """All 2^n signs of the ranks."""
    ranks = np.argsort(np.argsort(np.abs(differences))) + 1
    observed = sum(r for r, d in zip(ranks, differences) if d > 0)
    expected = ranks.sum() / 2
    sums = [
        sum(r for r, s in zip(ranks, signs) if s)
        for signs in itertools.product([0, 1], repeat=len(ranks))
    ]
    return np.mean([abs(s - expected) >= abs(observed - expected) - 1e-9 for s in sums])


@pytest.mark.parametrize(
    "differences",
    [[1.0, 2, 3, 4, 5, 6], [1.0, -2, 3, 4, -5, 6, 7], [0.5, -0.25, 0.125, 3, 9, -10, 11, 12]],
)
def test_signed_rank_is_the_exact_distribution_of_all_signs(differences):
    assert signed_rank(np.array(differences)) == pytest.approx(exact_signed_rank(differences))


def test_six_wins_are_the_fewest_that_can_be_significant():
    assert signed_rank(np.arange(1.0, 6.0)) == pytest.approx(2 / 2**5) and 2 / 2**5 > 0.05
    assert signed_rank(np.arange(1.0, 7.0)) == pytest.approx(2 / 2**6) and 2 / 2**6 < 0.05
    assert MIN_CASES == 6


def test_signed_rank_ignores_zeros():
    assert signed_rank(np.array([0.0, 0, 1, 2, 3, 4, 5, 6])) == pytest.approx(2 / 2**6)
    same = compare(np.full(8, 0.5), np.full(8, 0.5))
    assert same == Paired(8, 0.0, 0.0, 0.0, 1.0, 0.0, 0, 8, 0)


def test_rank_correlation_matches_hand_calculation():
    # |d| ranked: 1 -> 1, 2 -> 2, 4 -> 3; for: 1 + 3, against: 2, of 6.
    assert rank_correlation(np.array([1.0, -2.0, 4.0])) == pytest.approx((4 - 2) / 6)


def test_holm_matches_hand_calculation():
    # Sorted 0.01, 0.02, 0.03, 0.04: times 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.04; never falling.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
    corrected = holm([NAN, 0.02, NAN])
    assert corrected[1] == 0.02 and math.isnan(corrected[0]) and math.isnan(corrected[2])


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_keeps_order_and_never_lowers_p(p):
    corrected = holm(p)
    assert all(raw <= c <= 1 for raw, c in zip(p, corrected))
    by_raw = [c for _, c in sorted(zip(p, corrected))]
    assert by_raw == sorted(by_raw)
    # Not larger than Bonferroni's.
    assert all(c <= min(1, len(p) * raw) + 1e-15 for raw, c in zip(p, corrected))


@examples(25, search=200)
@given(values, values)
def test_swapping_the_trainers_negates_the_result(a, b):
    one, other = compare(a, b), compare(b, a)
    assert other.difference == pytest.approx(-one.difference, abs=1e-9)
    assert (other.low, other.high) == pytest.approx((-one.high, -one.low), abs=1e-9)
    assert other.p == pytest.approx(one.p)
    assert other.rank_correlation == pytest.approx(-one.rank_correlation)
    assert (other.wins, other.ties, other.losses) == (one.losses, one.ties, one.wins)
    assert one.wins + one.ties + one.losses == one.cases == len(a)


@examples(25, search=200)
@given(values, values, st.integers(-50, 50))
def test_common_constant_changes_nothing(a, b, constant):
    one, other = compare(a, b), compare(a + constant, b + constant)
    assert (other.difference, other.low, other.high, other.p) == pytest.approx(
        (one.difference, one.low, one.high, one.p), abs=1e-9
    )
    assert (other.wins, other.ties, other.losses) == (one.wins, one.ties, one.losses)


def test_constant_added_to_one_shifts_the_interval():
    rng = np.random.default_rng(1)
    a, b = rng.normal(80, 5, 40), rng.normal(80, 5, 40)
    one, other = compare(a, b), compare(a, b + 3)
    assert other.difference == pytest.approx(one.difference + 3)
    assert (other.low, other.high) == pytest.approx((one.low + 3, one.high + 3), abs=1e-6)


def test_interval_of_normal_differences_is_normal():
    differences = np.random.default_rng(2).normal(0.3, 2, 400)
    low, high = mean_interval(differences)
    error = differences.std(ddof=1) / math.sqrt(400)
    assert low == pytest.approx(differences.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(differences.mean() + 1.96 * error, abs=0.15 * error)
    assert mean_interval(differences) == (low, high)


def test_interval_of_skewed_differences_has_nominal_coverage():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(60):
        low, high = mean_interval(rng.exponential(1.0, 40))
        covered += low <= 1.0 <= high
    assert covered >= 51  # of 57 expected; fewer has a probability of about 1 in 100 with 95 %


def test_pairs_with_nan_are_ignored():
    result = compare(np.array([1.0, NAN, 3, 4]), np.array([2.0, 5, NAN, 3]))
    assert (result.cases, result.difference, result.wins, result.losses) == (2, 0.0, 1, 1)
    assert math.isnan(result.p) and math.isnan(result.low)
    nothing = compare(np.array([]), np.array([]))
    assert nothing.cases == 0 and math.isnan(nothing.difference)


def paired(difference, low, high, rank=0.5, cases=260):
    return Paired(cases, difference, low, high, 0.01, rank, 150, 0, 110)


@pytest.mark.parametrize(
    ("result", "p", "sentence"),
    [
        (
            paired(0.03, -0.1, 0.17),
            0.61,
            "No statistically significant difference between CPR and weight decay was found: "
            "+0.03 points of Dice (95 % interval -0.10 to +0.17), p = 0.61 after Holm's correction, "
            "260 cases.",
        ),
        (
            paired(0.5, 0.2, 0.8),
            0.00001,
            "A statistically significant difference between CPR and weight decay was found; CPR is "
            "better: +0.50 points of Dice (95 % interval +0.20 to +0.80), p < 0.0001 after Holm's "
            "correction, 260 cases.",
        ),
        (paired(-0.5, -0.8, -0.2, -0.5), 0.01, "weight decay is better: -0.50"),
        (
            paired(0.5, -0.1, 0.8),
            0.01,
            "of CPR and weight decay is inconclusive; the test is significant, but",
        ),
        (
            paired(0.5, 0.1, 0.8),
            0.2,
            "of CPR and weight decay is inconclusive; the interval of the mean excludes 0, but",
        ),
        (paired(0.5, 0.1, 0.8, -0.2), 0.01, "most cases and the mean have opposite signs"),
        (
            compare(np.zeros(5), np.ones(5)),
            NAN,
            "CPR and weight decay were not tested: expected at least 6 cases, got 5 (+1.00 points of",
        ),
        (compare(np.zeros(1), np.ones(1)), NAN, "expected at least 6 cases, got 1 ("),
        (compare(np.zeros(0), np.ones(0)), NAN, "cannot be compared: no case of a fold that both"),
    ],
)
def test_verdict_sentences(result, p, sentence):
    assert sentence in verdict(result, p, "CPR", "weight decay")


def test_p_number_has_two_digits():
    assert [p_number(p) for p in (1.0, 0.6149, 0.04, 0.00123, 9e-5)] == [
        "1", "0.61", "0.04", "0.0012", "< 0.0001",
    ]  # fmt: skip
