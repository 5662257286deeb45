"""Statistics against calculations that share no code with the package."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from nnunet_cpr.reports.statistics import (
    Components,
    compare,
    corrected_t_test,
    crossed_bootstrap,
    equivalence,
    fold_seed_test,
    holm,
    non_inferiority,
    p_number,
    reach_with,
    seeds_for,
    variance_components,
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
    low, high, p = corrected_t_test(np.array(values), ratio)
    df = len(values) - 1
    assert p == pytest.approx(2 * probability(abs(mean), math.inf, df, 0, scale), abs=1e-8)
    assert probability(low, high, df, mean, scale) == pytest.approx(0.95, abs=1e-8)
    assert low + high == pytest.approx(2 * mean, abs=1e-9)


def test_corrected_t_test_without_correction_is_the_paired_t_test():
    values = np.array([0.3, -0.1, 0.4, 0.2, 0.25])
    expected = stats.ttest_1samp(values, 0)
    interval = expected.confidence_interval()
    assert corrected_t_test(values, 0) == pytest.approx((interval.low, interval.high, expected.pvalue))


def test_corrected_t_test_matches_published_formula():
    # Bouckaert and Frank: t = mean / sqrt((1 / (k r) + n2 / n1) s^2) with k r - 1 degrees of freedom.
    values = np.array([1.0, 2.0, 3.0, 2.0])
    t = 2 / math.sqrt((1 / 4 + 1 / 9) * (2 / 3))
    assert corrected_t_test(values, 1 / 9)[2] == pytest.approx(2 * stats.t.sf(t, 3))


@examples(30, search=300)
@given(trainings, ratios, st.sampled_from([0.1, 0.5, 2.0]))
def test_equivalence_matches_integrated_posterior(values, ratio, margin):
    mean, scale = scale_by_hand(values, ratio)
    df = len(values) - 1
    found = equivalence(np.array(values), ratio, margin)
    assert found.equivalent == pytest.approx(probability(-margin, margin, df, mean, scale), abs=1e-8)
    assert found.better == pytest.approx(probability(margin, math.inf, df, mean, scale), abs=1e-8)
    assert found.better + found.equivalent + found.worse == pytest.approx(1)


def test_equal_trainings_are_equivalent_with_certainty():
    same = np.zeros(6)
    assert corrected_t_test(same, 0.25) == (0, 0, 1)
    assert equivalence(same, 0.25, 0.1).equivalent == 1
    assert equivalence(same + 0.2, 0.25, 0.1).better == 1
    assert non_inferiority(same, 0.25, 0.1) == (0, 0)


@examples(30, search=200)
@given(trainings, ratios)
def test_non_inferiority_is_one_side_of_the_interval(values, ratio):
    mean, scale = scale_by_hand(values, ratio)
    df = len(values) - 1
    low, p = non_inferiority(np.array(values), ratio, 0.5)
    assert probability(-math.inf, low, df, mean, scale) == pytest.approx(0.05, abs=1e-8)
    assert p == pytest.approx(probability(0.5, math.inf, df, -mean, scale), abs=1e-8)
    assert (low > -0.5) == (p < 0.05)


def test_non_inferiority_is_as_cautious_as_the_test_over_folds_and_seeds():
    table = [[0.1, 0.12, 0.11], [-0.28, -0.3, -0.29]]  # the folds differ, the seeds do not
    folds = [sum(row) / 3 for row in table]
    seeds = [(a + b) / 2 for a, b in zip(*table)]
    mean = sum(folds) / 2
    of_folds = sum((f - mean) ** 2 for f in folds) / 1 / 2
    of_seeds = sum((s - mean) ** 2 for s in seeds) / 2 / 3
    scale = math.sqrt(of_folds + of_seeds)
    df = (of_folds + of_seeds) ** 2 / (of_folds**2 / 1 + of_seeds**2 / 2)
    low, p = non_inferiority(np.array(table), 0.25, 0.5)
    assert p == pytest.approx(probability(0.5, math.inf, df, -mean, scale), abs=1e-8)
    assert probability(-math.inf, low, df, mean, scale) == pytest.approx(0.05, abs=1e-8)
    alone = non_inferiority(np.ravel(table), 0.25, 0.5)
    assert alone[0] > low and alone[1] < p


def test_one_training_has_no_test():
    one = np.array([0.5])
    assert all(map(math.isnan, corrected_t_test(one, 0.25)))
    assert math.isnan(equivalence(one, 0.25, 0.1).better)
    assert math.isnan(non_inferiority(one, 0.25, 0.1)[1])
    assert math.isnan(fold_seed_test(np.array([[0.5, 0.2]])))
    assert math.isnan(fold_seed_test(np.array([[0.5], [0.2]])))


def test_fold_seed_test_matches_calculation_by_hand():
    table = [[0.1, 0.3, 0.2], [0.5, 0.2, 0.8]]
    folds = [sum(row) / 3 for row in table]
    seeds = [(a + b) / 2 for a, b in zip(*table)]
    mean = sum(folds) / 2
    of_folds = sum((f - mean) ** 2 for f in folds) / 1 / 2
    of_seeds = sum((s - mean) ** 2 for s in seeds) / 2 / 3
    df = (of_folds + of_seeds) ** 2 / (of_folds**2 / 1 + of_seeds**2 / 2)
    t = mean / math.sqrt(of_folds + of_seeds)
    expected = 2 * probability(t, math.inf, df, 0, 1)
    assert fold_seed_test(np.array(table)) == pytest.approx(expected)


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


def test_crossed_bootstrap_resamples_seeds_and_cases():
    rng = np.random.default_rng(6)
    by_case = [np.repeat(rng.normal(0, 1, (1, 50)), 3, axis=0) for _ in range(4)]
    low, high = crossed_bootstrap(by_case)
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(200), rel=0.15)
    by_seed = [np.repeat(rng.normal(0, 1, (30, 1)), 4, axis=1)] * 3
    low, high = crossed_bootstrap(by_seed)
    assert high - low == pytest.approx(2 * 1.96 * by_seed[0][:, 0].std() / math.sqrt(30), rel=0.1)


def test_crossed_bootstrap_ignores_missing_values():
    rng = np.random.default_rng(7)
    fold = rng.normal(1, 1, (3, 20))
    with_nan = fold.copy()
    with_nan[0, 5] = NAN
    np.testing.assert_allclose(crossed_bootstrap([with_nan]), crossed_bootstrap([fold]), atol=0.2)
    assert np.isfinite(crossed_bootstrap([with_nan])).all()


def test_variance_components_recover_simulated_ones():
    rng = np.random.default_rng(8)
    k, s, n = 12, 12, 40
    truth = Components(case=2.0, fold=0.6, seed=0.8, training=0.5, residual=1.5)
    of_seeds = rng.normal(0, truth.seed, (s, 1))
    folds = [
        1
        + rng.normal(0, truth.case, (1, n))
        + rng.normal(0, truth.fold)
        + of_seeds
        + rng.normal(0, truth.training, (s, 1))
        + rng.normal(0, truth.residual, (s, n))
        for _ in range(k)
    ]
    found = variance_components(folds)
    for name in ("case", "training", "residual"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.15), name
    for name in ("fold", "seed"):  # 12 draws each
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.5), name


def test_variance_components_match_anova_by_hand():
    # Two folds of two cases, two seeds; every mean square from its definition.
    folds = [np.array([[1.0, 2.0], [3.0, 2.0]]), np.array([[4.0, 7.0], [5.0, 8.0]])]
    # Means of the trainings 1.5, 2.5, 5.5, 6.5; their interaction is 0.
    # Cases within folds: (2, 2) and (4.5, 7.5): 2 * (0 + 4.5) / 2 = 4.5. Residuals: +-0.5, 0.
    found = variance_components(folds)
    residual = 4 * 0.25 / 2
    case = (4.5 - residual) / 2
    assert found.residual == pytest.approx(math.sqrt(residual))
    assert found.case == pytest.approx(math.sqrt(case))
    assert found.training == 0
    assert found.seed == pytest.approx(math.sqrt((2 * 0.5 - 0) / 2))
    assert found.fold == pytest.approx(math.sqrt(2 * 8 / 2 - case / 2))


def test_one_seed_leaves_components_unknown():
    rng = np.random.default_rng(9)
    found = variance_components([rng.normal(0, 1, (1, 30)) for _ in range(3)])
    assert math.isnan(found.seed) and math.isnan(found.fold) and math.isnan(found.residual)
    assert found.case == pytest.approx(1, rel=0.3)
    assert math.isnan(variance_components([rng.normal(0, 1, (1, 30))]).training)


def test_number_of_seeds_is_the_smallest_whose_interval_is_within_the_margin():
    rng = np.random.default_rng(10)
    trainings = rng.normal(0, 0.15, (3, 3))
    found = compare([fold[:, None] for fold in trainings], 1 / 4)
    deviation = trainings.std(ddof=1)
    limit = 1.959964 * deviation * 0.5
    assert reach_with(found, math.inf) == pytest.approx(limit)
    assert reach_with(found, 3) == pytest.approx((found.high - found.low) / 2)
    margin = 1.05 * limit
    needed = seeds_for(found, margin)

    def reach(seeds):
        return stats.t.ppf(0.975, 3 * seeds - 1) * deviation * math.sqrt(1 / (3 * seeds) + 1 / 4)

    assert reach(needed) <= margin < reach(needed - 1)
    assert seeds_for(found, limit) is None
    assert seeds_for(found, 9) == 1


def test_a_number_of_seeds_needs_two_trainings():
    one = compare([np.array([[0.1, 0.2]])], 1 / 4)
    assert seeds_for(one, 0.1) == 0 and math.isnan(reach_with(one, 5))
    assert seeds_for(compare([], 1 / 4), 0.1) == 0
    same = compare([np.full((3, 4), 0.2) for _ in range(3)], 1 / 4)
    assert seeds_for(same, 0.1) == 1 and reach_with(same, math.inf) == 0


def arrays(draw_seeds):
    return draw_seeds.flatmap(
        lambda s: st.lists(
            st.lists(st.lists(points, min_size=4, max_size=4), min_size=s, max_size=s).map(np.array),
            min_size=1,
            max_size=3,
        )
    )


@examples(20, search=200)
@given(arrays(st.integers(1, 4)))
def test_swapping_the_trainers_negates_the_result(folds):
    one, other = compare(folds, 0.25), compare([-fold for fold in folds], 0.25)
    assert other.mean == pytest.approx(-one.mean, abs=1e-9)
    assert (other.low, other.high) == pytest.approx((-one.high, -one.low), abs=1e-9, nan_ok=True)
    assert other.p == pytest.approx(one.p, nan_ok=True)
    assert (other.bootstrap_low, other.bootstrap_high) == pytest.approx(
        (-one.bootstrap_high, -one.bootstrap_low), abs=1e-9
    )
    assert other.p_fold_seed == pytest.approx(one.p_fold_seed, nan_ok=True)


@examples(20, search=200)
@given(arrays(st.integers(2, 4)), st.permutations(range(4)))
def test_order_of_cases_and_folds_changes_nothing(folds, order):
    one = compare(folds, 0.25, resamples=0)
    other = compare([fold[::-1][:, order] for fold in folds[::-1]], 0.25, resamples=0)
    assert (other.mean, other.p, other.low) == pytest.approx((one.mean, one.p, one.low), abs=1e-9)
    assert other.components.training == pytest.approx(one.components.training, abs=1e-6)


def test_cases_without_value_are_left_out():
    fold = np.array([[1.0, NAN, 3], [2, NAN, 4]])
    found = compare([fold, np.full((2, 2), NAN)], 0.25)
    assert (found.folds, found.seeds, found.cases, found.mean) == (1, 2, 2, 2.5)
    nothing = compare([], 0.25)
    assert nothing.cases == 0 and math.isnan(nothing.mean)


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


def test_p_number_has_two_digits():
    assert [p_number(p) for p in (1.0, 0.6149, 0.04, 0.00123, 9e-5)] == [
        "1", "0.61", "0.04", "0.0012", "< 0.0001",
    ]  # fmt: skip
