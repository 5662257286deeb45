"""Statistics against calculations that share no code with the package."""

import math
from statistics import variance

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from nnunet_cpr.reports.statistics import (
    corrected_t_test,
    crossed_bootstrap,
    crossed_test,
    fold_seed_test,
    holm,
    seed_test,
)
from tests.helpers.examples import examples

NAN = float("nan")
# Differences in points to two decimals: none that is nothing but rounding.
points = st.integers(-500, 500).map(lambda n: n / 100)
trainings = st.lists(points, min_size=2, max_size=15).filter(lambda values: len(set(values)) > 1)
ratios = st.sampled_from([1 / 4, 1 / 2, 1.0, 1 / 9])


def t_density(x, df, mean, scale):
    """Student's t density from its formula."""
    constant = math.gamma((df + 1) / 2) / (math.gamma(df / 2) * math.sqrt(df * math.pi) * scale)
    return constant * (1 + ((x - mean) / scale) ** 2 / df) ** (-(df + 1) / 2)


def probability(low, high, df, mean, scale):
    """Integral of the density, with the substitution x = mean + scale * tan(u)."""
    ends = [math.atan((x - mean) / scale) if math.isfinite(x) else math.copysign(math.pi / 2, x)
            for x in (low, high)]  # fmt: skip
    return integrate.quad(
        lambda u: t_density(mean + scale * math.tan(u), df, mean, scale) * scale / math.cos(u) ** 2,
        *ends,
        epsabs=1e-12,
    )[0]


def scale_by_hand(values, ratio):
    n = len(values)
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / (n - 1)
    return mean, math.sqrt(variance * (1 / n + ratio))


@examples(30, search=300)
@given(trainings, ratios)
def test_corrected_t_test_matches_integrated_density(values, ratio):
    mean, scale = scale_by_hand(values, ratio)
    test = corrected_t_test(np.array(values), ratio)
    low, high = test.interval
    df = len(values) - 1
    assert test.p == pytest.approx(2 * probability(abs(mean), math.inf, df, 0, scale), abs=1e-8)
    assert probability(low, high, df, mean, scale) == pytest.approx(0.95, abs=1e-8)
    assert low + high == pytest.approx(2 * mean, abs=1e-9)


@examples(30, search=300)
@given(trainings, ratios, st.sampled_from([0.1, 0.5, 2.0]))
def test_probabilities_and_limit_match_the_integrated_posterior(values, ratio, margin):
    mean, scale = scale_by_hand(values, ratio)
    df = len(values) - 1
    found = corrected_t_test(np.array(values), ratio)
    above, below = found.probability_above(margin), found.probability_below(-margin)
    assert above == pytest.approx(probability(margin, math.inf, df, mean, scale), abs=1e-8)
    assert below == pytest.approx(probability(-math.inf, -margin, df, mean, scale), abs=1e-8)
    limit = found.interval[0]
    assert probability(-math.inf, limit, df, mean, scale) == pytest.approx(0.025, abs=1e-8)


def test_equal_trainings_are_certain():
    same = np.zeros(6)
    assert corrected_t_test(same, 0.25).interval == (0, 0)
    assert corrected_t_test(same, 0.25).p == pytest.approx(1)
    higher = corrected_t_test(same + 0.2, 0.25)
    assert (higher.p, higher.probability_above(0.1), higher.probability_below(0.1)) == pytest.approx(
        (0, 1, 0)
    )
    assert fold_seed_test(np.full((3, 3), 0.2)).p < 1e-20


def test_one_training_has_no_test():
    one = corrected_t_test(np.array([0.5]), 0.25)
    assert one.mean == 0.5
    for value in (one.p, *one.interval, one.probability_above(0.1)):
        assert math.isnan(value)
    assert math.isnan(corrected_t_test(np.array([]), 0.25).mean)
    assert math.isnan(fold_seed_test(np.array([[0.5, 0.2]])).p)
    assert math.isnan(fold_seed_test(np.array([[0.5], [0.2]])).p)


def test_fold_seed_test_matches_calculation_by_hand():
    table = [[0.1, 0.3, 0.2], [0.5, 0.2, 0.8], [0.2, 0.4, 0.3], [0.4, 0.4, 0.2]]
    folds = [sum(row) / 3 for row in table]
    seeds = [sum(column) / 4 for column in zip(*table)]
    mean = sum(folds) / 4
    of_folds = sum((f - mean) ** 2 for f in folds) / 3 / 4
    of_seeds = sum((s - mean) ** 2 for s in seeds) / 2 / 3
    df = (of_folds + of_seeds) ** 2 / (of_folds**2 / 3 + of_seeds**2 / 2)
    t = mean / math.sqrt(of_folds + of_seeds)
    expected = 2 * probability(t, math.inf, df, 0, 1)
    assert fold_seed_test(np.array(table)).p == pytest.approx(expected)
    assert fold_seed_test(np.array([[0.3, 0.4, 0.5, 0.2], [0.3, 0.5, 0.4, 0.2]])).df == 1
    assert fold_seed_test(np.array([[0, 3, 2], [1, 2, 5], [4, 4, 4], [5, 2, 3], [2, 4, 4]])).df == 4


def crossed_by_hand(folds):
    """Mean, standard error and degrees of freedom by loops; None is a case without a value."""
    runs = [[[v for v in run if v is not None] for run in fold] for fold in folds]
    runs = [[math.fsum(run) / len(run) for run in fold] for fold in runs]
    columns = zip(*(run for fold in folds for run in fold))
    cases = [[v for v in column if v is not None] for column in columns]
    cases = [math.fsum(column) / len(column) for column in cases]
    of_cases = variance(cases) / len(cases)
    of_seeds = math.fsum(map(variance, runs)) / len(runs) / sum(map(len, runs))
    df_seeds = sum(len(fold) - 1 for fold in runs)
    df = (of_cases + of_seeds) ** 2 / (of_cases**2 / (len(cases) - 1) + of_seeds**2 / df_seeds)
    mean = math.fsum(run for fold in runs for run in fold) / sum(map(len, runs))
    return mean, math.sqrt(of_cases + of_seeds), df


@examples(30, search=300)
@given(st.data(), st.integers(1, 5), st.integers(2, 4), st.integers(2, 9))
def test_crossed_test_matches_calculation_by_hand(data, folds, seeds, cases):
    run = st.lists(points | st.none(), min_size=cases - 1, max_size=cases - 1)
    first = [[[v, *data.draw(run)] for v in (0.0, 1.0, 0.5, 0.2)[:seeds]] for _ in range(folds)]
    first[0][0] = [0.3 * number for number in range(cases)]  # each case has a value
    test = crossed_test(np.array(first, float))
    expected = crossed_by_hand(first)
    assert (test.mean, test.scale, test.df) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    low, high = test.interval
    assert probability(low, high, test.df, *expected[:2]) == pytest.approx(0.95, abs=1e-7)


def test_crossed_test_of_equal_runs_is_the_paired_t_test_over_cases():
    cases = [0.3, -0.2, 0.5, 1.1, 0.4]
    expected = stats.ttest_1samp(cases, 0)
    assert crossed_test(np.tile(cases, (3, 2, 1))).p == pytest.approx(expected.pvalue)
    of_runs = np.array([[0.2, 0.4], [0.3, 0.1], [0.5, 0.3]])
    test = crossed_test(np.repeat(of_runs[:, :, None], 7, axis=2))  # cases that are all alike
    assert (test.mean, test.df) == (pytest.approx(0.3), pytest.approx(3))
    assert test.scale == pytest.approx(math.sqrt(0.02 / 6))


def test_crossed_test_ignores_differences_between_folds():
    """The claim is about these training cases, so folds are no random factor."""
    rng = np.random.default_rng(1)
    differences = rng.normal(0.5, 1, (3, 3, 20))
    shifted = crossed_test(differences + np.array([-3, 1, 2])[:, None, None])
    test = crossed_test(differences)
    assert (shifted.mean, shifted.scale) == pytest.approx((test.mean, test.scale))


def test_crossed_test_needs_two_seeds_and_two_cases():
    for shape in ((3, 1, 20), (3, 2, 1)):
        test = crossed_test(np.full(shape, 0.5))
        assert test.mean == 0.5 and math.isnan(test.p) and math.isnan(test.interval[0])
    assert math.isnan(crossed_test(np.empty((0, 0, 0))).mean)
    assert crossed_test(np.zeros((3, 2, 5))).interval == (0, 0)
    assert crossed_test(np.full((3, 2, 5), 0.2)).p < 1e-20


@examples(30, search=300)
@given(st.data(), st.integers(1, 5), st.integers(2, 4))
def test_seed_test_matches_calculation_by_hand(data, folds, seeds):
    fold = st.lists(points, min_size=seeds, max_size=seeds, unique=True)
    table = [data.draw(fold) for _ in range(folds)]
    test = seed_test(np.array(table))
    mean = math.fsum(map(math.fsum, table)) / folds / seeds
    scale = math.sqrt(math.fsum(map(variance, table)) / folds / (folds * seeds))
    assert (test.mean, test.scale) == pytest.approx((mean, scale), rel=1e-9, abs=1e-12)
    assert probability(*test.interval, folds * (seeds - 1), mean, scale) == pytest.approx(0.95, abs=1e-7)


def test_seed_test_needs_two_seeds():
    assert seed_test(np.array([[0.5], [0.3]])).mean == pytest.approx(0.4)
    assert math.isnan(seed_test(np.array([[0.5], [0.3]])).p)
    assert math.isnan(seed_test(np.array([])).mean)
    assert seed_test(np.array([[0.5, 0.5]])).p < 1e-11


def bootstrap_by_hand(folds, resamples, seed):
    """Draw seeds and cases one by one, with the same product of weights."""
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(resamples):
        seeds = rng.integers(len(folds[0]), size=len(folds[0]))
        of_folds = []
        for fold in folds:
            cases = rng.integers(fold.shape[1], size=fold.shape[1])
            of_folds.append(np.mean([fold[s, c] for s in seeds for c in cases]))
        means.append(np.mean(of_folds))
    return np.percentile(means, [2.5, 97.5])


def test_crossed_bootstrap_matches_resampling_by_hand():
    rng = np.random.default_rng(4)
    folds = [rng.normal(0.3, 1, (3, 1)) + rng.normal(0, 1, (3, n)) for n in (8, 12)]
    width = np.diff(crossed_bootstrap(folds))[0]
    expected = bootstrap_by_hand(folds, 3000, 5)
    np.testing.assert_allclose(crossed_bootstrap(folds), expected, atol=0.05 * width)


def test_holm_matches_hand_calculation():
    # Sorted 0.01, 0.02, 0.03, 0.04: times 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.04; never falling.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
    corrected = holm([NAN, 0.02, NAN])
    assert corrected[1] == 0.02 and math.isnan(corrected[0]) and math.isnan(corrected[2])
