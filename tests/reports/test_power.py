"""Differences that a study could find."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from benchmarks.study_statistics import SCENARIOS, compare, simulate, verdicts
from nnunet_cpr.reports.power import (
    ASSUMED,
    OF_DATASETS,
    Deviations,
    Size,
    describe,
    deviations_of,
    smallest_effect,
    smallest_effect_over,
)


@pytest.mark.slow
@pytest.mark.parametrize("deviations", [ASSUMED[0], SCENARIOS[1]], ids=lambda each: each.title)
def test_reports_find_the_effect_in_80_percent_of_studies(deviations: Deviations) -> None:
    """Within the errors of both simulations, in the way from the cases' Dice to the verdict."""
    effect, studies = smallest_effect(Size(3, 3), deviations), 200
    found = verdicts(simulate(deviations, 3, 3, effect, studies))["difference"] / studies
    assert abs(found - 0.8) < 3 * math.sqrt(0.8 * 0.2 * (1 / studies + 1 / 300))


def test_larger_studies_find_smaller_effects_and_more_comparisons_larger_ones() -> None:
    sizes = [Size(3, 3, comparisons=4), Size(3, 3), Size(5, 3), Size(5, 5)]
    effects = [smallest_effect(size, ASSUMED[0]) for size in sizes]
    assert effects == sorted(effects, reverse=True) and effects[-1] > 0
    assert effects[1] == smallest_effect.__wrapped__(sizes[1], ASSUMED[0]), "depends on earlier calls"


@pytest.mark.slow
def test_studies_of_five_data_sets_find_the_mean_effect_in_80_percent() -> None:
    """Simulated data sets with one seed, whose differences vary by the published deviation, too."""
    effect, studies = smallest_effect_over(Size(3, 1, datasets=5), ASSUMED[1]), 80
    gains = [compare(each)[0].gain for each in simulate(ASSUMED[1], 3, 1, 0.0, 5 * studies)]
    varied = np.random.default_rng(0).normal(effect, math.sqrt(2) * OF_DATASETS, (studies, 5))
    tests = [ttest_1samp(each, 0) for each in np.reshape(gains, (studies, 5)) + varied]
    found = np.mean([test.pvalue < 0.05 and test.statistic > 0 for test in tests])
    assert abs(found - 0.8) < 3 * math.sqrt(0.8 * 0.2 / studies)


def test_a_study_too_small_for_a_verdict_is_told_a_size_that_has_one() -> None:
    said = describe(Size(1, 2), ASSUMED[0])
    assert said.startswith(
        "with 1 fold and 2 seeds there is no verdict on a data set (2 and 3 are needed); "
    )
    assert said.endswith(describe(Size(5, 3), ASSUMED[0]))


def test_deviations_of_simulated_runs_are_those_of_the_simulation() -> None:
    true = Deviations("true", case=1.5, training=0.4, fold=0.6, seed=0.5, residual=2)
    variances = [
        np.square(astuple(deviations_of(results))[1:]) for results in simulate(true, 5, 10, 1.0, 40)
    ]
    estimates = np.sqrt(np.mean(variances, axis=0))
    np.testing.assert_allclose(estimates, astuple(true)[1:], rtol=0.12)
