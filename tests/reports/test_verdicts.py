"""The rule table of verdicts, cell by cell, and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, ttest_1samp

from benchmarks.study_statistics import (
    SCENARIOS,
    claims_over_datasets,
    compare,
    contradicts_itself,
    false_claims,
    simulate,
)
from nnunet_cpr.reports.comparison import Comparison, Failures, Verdict, judge
from nnunet_cpr.reports.metrics import METRICS
from nnunet_cpr.reports.over_datasets import judge_scopes
from nnunet_cpr.reports.results import Condition, SplitRatio
from nnunet_cpr.reports.statistics import MeanDifference
from nnunet_cpr.reports.words import over_sentence, sentence
from nnunet_cpr.studies.study import TrainerEntry


def numbers(gain: float, scale: float = 0.1, df: float = 8, **changes) -> Comparison:
    """Return numbers with a mean gain and its standard error, in points; the bootstrap agrees."""
    made = Comparison(
        condition=Condition("Dataset001_Toy", "3d_fullres", "nnUNetPlans"),
        metric=METRICS["dice"],
        entry=TrainerEntry("Other"),
        reference=TrainerEntry("Base"),
        folds=[0, 1, 2],
        seeds=[1, 2, 3],
        gains_of_cases=pd.Series([gain] * 9),
        cases_left_out=0,
        cases_marked=0,
        without_marked=None,
        margin=1.0,
        ratio=SplitRatio(0.25, "assumed"),
        tests=(MeanDifference(gain, scale, df), MeanDifference(gain, scale / 2, df)),
        bootstrap=(gain - scale, gain + scale),
        table_gain=gain,
        failures=Failures(0, 1, 60, 80.0),
        doubt="",
        obstacle="",
    )
    return replace(made, **changes)


def judged(*given: Comparison) -> list[Comparison]:
    return judge(list(given))


def expected_verdict(one: Comparison) -> Verdict:
    """Return the first row of the table in the statistics page that holds."""
    n, p, (low, high) = one, one.p_holm, one.interval
    if -n.margin < low and high < n.margin and p.equivalence <= 0.025 and abs(n.table_gain) <= n.margin:
        return Verdict.EQUIVALENT
    if p.difference <= 0.05 and low > 0 and n.table_gain >= 0:
        return Verdict.BETTER
    if p.difference <= 0.05 and high < 0 and n.table_gain <= 0:
        return Verdict.WORSE
    if low > -n.margin and p.non_inferiority <= 0.025 and n.table_gain > -n.margin:
        return Verdict.NON_INFERIOR
    return Verdict.UNDECIDED


def test_verdict_never_says_more_than_the_printed_interval() -> None:
    """For gains, errors, bootstraps and means of the table, alone and beside many other comparisons."""
    found = set()
    for gain, scale, reach, table in product(
        [-2.0, -0.9, -0.3, 0.0, 0.3, 0.9, 2.0], [0.01, 0.1, 0.4], [0.0, 0.5, 3.0], [-2.0, 0.0, 2.0]
    ):
        given = numbers(gain, scale, bootstrap=(gain - reach, gain + reach), table_gain=table)
        for judged_one in (judged(given)[0], judged(given, *[numbers(0.5, 1.0)] * 9)[0]):
            low, high = given.interval
            verdict = judged_one.verdict
            found.add(verdict)
            assert verdict is expected_verdict(judged_one)
            none = judged(replace(given, obstacle="no verdict with 1 seed"))[0]
            assert none.verdict is Verdict.NONE and not none.is_non_inferior
            if verdict in (Verdict.EQUIVALENT, Verdict.BETTER, Verdict.NON_INFERIOR):
                assert judged_one.is_non_inferior
            assert not contradicts_itself(judged_one)
            if verdict is Verdict.EQUIVALENT:
                assert low > -1 and high < 1 and abs(table) <= 1
            elif verdict in (Verdict.BETTER, Verdict.WORSE):
                assert (low > 0) == (verdict is Verdict.BETTER) and low * high > 0
                assert table * gain >= 0
            elif verdict is Verdict.NON_INFERIOR:
                assert low > -1 and table > -1
            if judged_one.is_non_inferior:
                assert low > -1
    assert found == set(Verdict) - {Verdict.NONE}


FAILURES = (
    "0 against 1 of 60; so many cannot exclude that up to 5.0 % fail, which would cost 4.00 points."
)


@pytest.mark.parametrize(
    ("given", "verdict", "words"),
    [
        (numbers(2), "better", "2.00 points better, 95 % interval 1.77 to 2.23 (p < 0.0001)."),
        (numbers(-2), "worse", "2.00 points worse, 95 % interval 1.77 to 2.23 (p < 0.0001)."),
        (numbers(0.1), "equivalent", "interval 0.13 worse to 0.33 better; equivalent within 1 point."),
        (
            numbers(0.9),
            "better",
            "0.90 points better, 95 % interval 0.67 to 1.13 (p < 0.0001).",
        ),
        (
            numbers(0.5, 0.4),
            "non-inferior",
            "; not worse by 1 point or more; not statistically significant (p = 0.25).",
        ),
        (numbers(0.5, 1.0), "undecided", "; not statistically significant (p = 0.63)."),
        (
            numbers(2, bootstrap=(-1.5, 5.0)),
            "undecided",
            "; undecided, as the bootstrap over cases and seeds does not confirm it.",
        ),
        (
            numbers(2, table_gain=-1.5),
            "undecided",
            "the means of the main table, over classes, are 1.50 points worse.",
        ),
        (
            numbers(-0.0, 1e-4),
            "equivalent",
            ": 0.00 points, 95 % interval 0.00 to 0.00; equivalent within 1 point.",
        ),
        (numbers(2, obstacle="no verdict with 1 seed"), "no verdict", "2.23; no verdict with 1 seed."),
    ],
)
def test_numbers_have_a_verdict_and_words(given: Comparison, verdict: str, words: str) -> None:
    (found,) = judged(given)
    said, _, failures = sentence(found).partition(" Cases with a Dice below 10 %: ")
    assert found.verdict == verdict and said.endswith(words)
    assert failures == ("" if verdict not in ("equivalent", "non-inferior") else FAILURES)
    assert not contradicts_itself(found)


def test_holm_counts_only_comparisons_that_can_have_a_verdict() -> None:
    """Eight unfinished trainers must not hide a difference."""
    shown = numbers(0.28)
    unfinished = [replace(shown, obstacle="no verdict with 1 seed and 1 fold")] * 8
    alone, *_ = judged(shown)
    beside, *others = judged(shown, *unfinished)
    assert beside.p_holm == alone.p_holm and beside.verdict == alone.verdict == "equivalent"
    assert all(np.isnan(each.p_holm.difference) for each in others)


def test_shown_interval_and_probabilities_are_those_of_the_deciding_test() -> None:
    crossed = MeanDifference(1.2, 0.6, 2)
    given = numbers(1.2, tests=(MeanDifference(1.2, 0.1, 8), crossed))
    assert given.tests[0].p < 0.05 < given.p.difference == crossed.p
    assert given.interval == crossed.interval and given.interval[0] < 0
    assert "worse to" in sentence(judged(given)[0])


def test_equivalence_needs_both_one_sided_tests_after_correction() -> None:
    """A true difference of the margin must not be called equivalent more often by many comparisons."""
    close = numbers(0.75)
    assert close.p.equivalence == pytest.approx(close.tests[0].probability_above(1.0))
    assert judged(close)[0].verdict is Verdict.EQUIVALENT
    beside = judged(close, *[numbers(5.0)] * 9)[0]
    assert beside.verdict is Verdict.BETTER and beside.p_holm.equivalence > 0.025


def test_smallest_margin_is_that_at_which_equal_trainers_are_equivalent() -> None:
    equal = numbers(0.0)
    smallest = judged(equal)[0].smallest_margin
    for factor, verdict in ((1.01, "equivalent"), (0.99, "undecided")):
        assert judged(replace(equal, margin=factor * smallest))[0].verdict == verdict


@pytest.mark.slow
@pytest.mark.parametrize("trainers", [2, 11])
@pytest.mark.parametrize("effect", [0.0, 1.0, -1.0])
def test_simulated_claims_are_rarely_false_and_never_contradict(effect: float, trainers: int) -> None:
    studies = 60
    simulated = simulate(SCENARIOS[5], 3, 3, effect, studies, trainers, margin=1.0)
    counts = false_claims(simulated, effect)
    assert counts["contradictions"] == 0
    assert counts["difference"] <= 8 and counts["equivalent or non-inferior"] <= 8  # of more 0.6 %


def test_simulated_equal_trainers_are_equivalent_and_non_inferior() -> None:
    """The report of twelve equal trainers said "equivalent" nine times, and "not worse: no trainer"."""
    (results,) = simulate(SCENARIOS[0], 5, 5, 0.0, 1, trainers=13, margin=2.0)
    found = compare(results)
    assert sum(each.verdict is Verdict.EQUIVALENT for each in found) >= 9
    assert all(each.is_non_inferior for each in found if each.verdict is Verdict.EQUIVALENT)


# Over data sets


def of_datasets(*gains: float, **changes) -> list[Comparison]:
    """Return comparisons of data sets with one seed each, which have no verdict of their own."""
    return [
        numbers(
            gain,
            obstacle="no verdict with 1 seed",
            condition=Condition(f"Dataset{i}", "3d", "p"),
            **changes,
        )
        for i, gain in enumerate(gains)
    ]


def test_data_sets_with_one_seed_have_a_verdict_over_all_of_them() -> None:
    gains = (1.0, 2.0, 1.5, 0.5, 2.5)
    over, *comparisons = judge_scopes(of_datasets(*gains))
    expected = ttest_1samp(gains, 0)
    low, high = expected.confidence_interval()
    assert over.p.difference == pytest.approx(expected.pvalue) and over.verdict == "better"
    assert over.interval == (pytest.approx(low), pytest.approx(high))
    assert over.higher_on == 5 and {each.verdict for each in comparisons} == {"no verdict"}
    assert not any(each.datasets for each in judge_scopes(of_datasets(*gains[:2])))


def test_there_is_no_verdict_without_all_data_sets() -> None:
    """A trainer must not become better by the data sets on which it has no results."""
    doubtful = replace(of_datasets(9.0)[0], doubt="no verdict, as 9 cases are left out")
    over, *_ = judge_scopes(of_datasets(0.1, 0.2, -0.1, 0.0, margin=2.0))
    assert over.verdict == "equivalent" and over.is_non_inferior
    over, *_ = judge_scopes([*of_datasets(0.1, 0.2, -0.1, 0.0, margin=2.0), doubtful])
    assert over.verdict == "no verdict" and not over.is_non_inferior
    assert over.left_out == [doubtful] and over.gain == pytest.approx(0.05)
    assert sentence(over).endswith("as data sets are left out (Dataset0: 9 cases are left out).")
    assert not any(each.datasets for each in judge_scopes([*of_datasets(1.0, 1.1), doubtful]))
    over, *_ = judge_scopes(of_datasets(0.0, 0.0, 0.0))
    assert over.verdict == "no verdict" and "exactly the same" in sentence(over)


def test_distances_are_better_where_they_are_lower() -> None:
    over, *_ = judge_scopes(of_datasets(1.0, 1.2, 1.1, metric=METRICS["hd95"]))
    assert over.verdict == "better" and over.difference == pytest.approx(-1.1)


@pytest.mark.slow
def test_simulated_claims_over_data_sets_are_rarely_false() -> None:
    assert claims_over_datasets(5, 1, 0.5, 0.0, 100) <= 11
    assert claims_over_datasets(10, 1, 0.5, 1.0, 20) >= 15


def test_sign_test_and_means_without_one_stand_beside_the_mean() -> None:
    over, *_ = judge_scopes(of_datasets(1.0, 2.0, 1.5, -0.5))
    assert over.p_sign == pytest.approx(binomtest(3, 4).pvalue)
    assert over.without_one == (pytest.approx(2 / 3), pytest.approx(1.5))
    distances = of_datasets(1.0, 2.0, -0.5, metric=METRICS["hd95"])
    for given, words in (
        (of_datasets(1.0, 2.0, -0.5), "Higher on 2 of 3 ("),
        (distances, "Lower on 2 o"),
    ):
        assert words in over_sentence(judge_scopes(given)[0])


def test_absent_structures_of_data_sets_may_not_decide_over_them() -> None:
    """Each data set has them, and without them the other trainer is better."""
    gains = (1.0, 1.2, 1.1, 0.9)
    for factor, verdict in ((1, "better"), (-1, "undecided")):
        sets = [
            replace(own, cases_marked=3, without_marked=alone)
            for own, alone in zip(of_datasets(*gains), of_datasets(*[factor * g for g in gains]))
        ]
        over, *_ = judge_scopes(sets)
        assert over.verdict_with_marked == "better" and over.verdict == verdict
        assert over.cases_marked == 12 and "12 cases" in sentence(over)
