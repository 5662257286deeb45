"""Statistics of the differences between two methods that were each trained several times.

The differences of one comparison are a list with an array [seeds, cases] for each fold: the other
trainer's value of a case minus the reference's, trained with the same fold and seed. Cases of a fold
share its trainings, so a test over cases cannot see the variation between trainings;
``docs/concepts/study-statistics.md`` derives and simulates the methods of this module.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.05
RESAMPLES = 9999
MIN_SEEDS = 3
"""Minimum number of seeds for a statement about methods instead of trainings."""
MIN_FOLDS = 2
"""Minimum number of folds for such a statement."""
_SMALLEST_P = 1e-4
_MAX_SEEDS = 10_000

Folds = Sequence[np.ndarray]
"""Differences of each fold, [seeds, cases]; NaN where a case has no value."""


@dataclass(frozen=True)
class Components:
    """Standard deviations of a difference, by their source, in the unit of the values.

    NaN where the design cannot tell: ``seed`` and ``training`` need two seeds, ``fold`` two folds. With
    one seed, ``training`` contains the variation between folds, and ``case`` the residual.

    Attributes:
        case: between cases, the same in all trainings.
        fold: between folds, the same in all seeds.
        seed: between seeds, the same in all folds.
        training: between trainings, beyond fold and seed.
        residual: between cases of one training, beyond all others.
    """

    case: float
    fold: float
    seed: float
    training: float
    residual: float


@dataclass(frozen=True)
class Equivalence:
    """Posterior probabilities of the Bayesian correlated t-test.

    Attributes:
        better: probability that the difference is above the margin.
        equivalent: probability that it is within the margin.
        worse: probability that it is below minus the margin.
    """

    better: float
    equivalent: float
    worse: float


@dataclass(frozen=True)
class Difference:
    """Statistics of one comparison, in the unit of the values; positive: the other trainer is larger.

    Attributes:
        folds, seeds, cases: size of the sample.
        mean: mean over cases, then over trainings; NaN without cases.
        low, high: 95 % interval of the corrected repeated k-fold t-test; NaN with one training.
        p: two-sided p of this test; NaN with one training.
        deviation: standard deviation between trainings; NaN with one training.
        ratio: number of test cases per training case of a fold.
        bootstrap_low, bootstrap_high: 95 % bootstrap interval over cases and seeds.
        p_fold_seed: two-sided p over folds and seeds as random factors; NaN with one seed or fold.
        components: standard deviations by source.
    """

    folds: int
    seeds: int
    cases: int
    mean: float
    low: float
    high: float
    p: float
    deviation: float
    ratio: float
    bootstrap_low: float
    bootstrap_high: float
    p_fold_seed: float
    components: Components

    @property
    def has_bootstrap_interval_without_zero(self) -> bool:
        """True if the bootstrap interval excludes 0."""
        return self.bootstrap_low > 0 or self.bootstrap_high < 0


def compare(differences: Folds, ratio: float, resamples: int = RESAMPLES) -> Difference:
    """Return the statistics of paired differences.

    Args:
        differences: for each fold an array [seeds, cases] with the same number of seeds; folds in
            which a seed has no value are left out.
        ratio: number of test cases per training case of a fold, such as 1/4 for five folds.
        resamples: number of bootstrap resamples; 0 for no bootstrap interval.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> folds = [0.5 + 0.1 * rng.standard_normal((3, 20)) for _ in range(5)]
        >>> result = compare(folds, ratio=1 / 4)
        >>> round(result.mean, 1), result.p < 0.05
        (0.5, True)
    """
    folds = [fold[:, ~np.isnan(fold).all(axis=0)] for fold in differences]
    folds = complete_folds(folds)
    trainings = training_means(folds)
    if not folds:
        numbers = (
            "mean",
            "low",
            "high",
            "p",
            "deviation",
            "bootstrap_low",
            "bootstrap_high",
            "p_fold_seed",
        )
        nothing = Components(*[math.nan] * 5)
        return Difference(
            folds=0,
            seeds=0,
            cases=0,
            ratio=ratio,
            components=nothing,
            **dict.fromkeys(numbers, math.nan),
        )
    low, high, p = corrected_t_test(trainings.ravel(), ratio)
    bootstrap_low, bootstrap_high = crossed_bootstrap(folds, resamples) if resamples else (math.nan,) * 2
    return Difference(
        folds=len(folds),
        seeds=trainings.shape[1],
        cases=sum(fold.shape[1] for fold in folds),
        mean=float(trainings.mean()),
        low=low,
        high=high,
        p=p,
        deviation=_deviation(trainings) if trainings.size > 1 else math.nan,
        ratio=ratio,
        bootstrap_low=bootstrap_low,
        bootstrap_high=bootstrap_high,
        p_fold_seed=fold_seed_test(trainings),
        components=variance_components(folds),
    )


def complete_folds(differences: Folds) -> list[np.ndarray]:
    """Return the folds in which every seed has a value."""
    return [fold for fold in differences if fold.size and (~np.isnan(fold)).any(axis=1).all()]


def training_means(differences: Folds) -> np.ndarray:
    """Return the mean over the cases of each training, [folds, seeds]."""
    return np.array([np.nanmean(fold, axis=1) for fold in differences])


# Tests and intervals


def corrected_t_test(trainings: np.ndarray, ratio: float) -> tuple[float, float, float]:
    """Return interval and p of the corrected repeated k-fold t-test.

    The variance of the mean of n differences is s^2 (1/n + n_test/n_train) in place of s^2 / n, since
    the trainings of different folds share most of their cases (Nadeau and Bengio, 2003; Bouckaert and
    Frank, 2004).

    Args:
        trainings: differences of the trainings, [n].
        ratio: n_test / n_train.

    Returns:
        Lower and upper limit of the 95 % interval, and the two-sided p; NaN with fewer than 2 trainings.

    Example:
        >>> low, high, p = corrected_t_test(np.array([0.2, 0.3, 0.4]), ratio=0.25)
        >>> round(low, 3), round(high, 3), round(p, 3)
        (-0.029, 0.629, 0.059)
    """
    posterior = _correlated_t(trainings, ratio)
    if posterior is None:
        return math.nan, math.nan, math.nan
    mean, scale, df = posterior
    if scale == 0:
        return mean, mean, 0.0 if mean else 1.0
    reach = float(stats.t.ppf(1 - LEVEL / 2, df)) * scale
    return mean - reach, mean + reach, float(2 * stats.t.sf(abs(mean) / scale, df))


def equivalence(trainings: np.ndarray, ratio: float, margin: float) -> Equivalence:
    """Return the posterior of the Bayesian correlated t-test with a region of equivalence.

    With the prior of Benavoli et al. (2017), the posterior of the mean difference is Student's t
    distribution with n - 1 degrees of freedom, the mean, and the scale of :func:`corrected_t_test`.

    Args:
        trainings: differences of the trainings, [n].
        ratio: n_test / n_train.
        margin: half the width of the region, in the unit of the differences.

    Returns:
        NaN with fewer than 2 trainings.

    Example:
        >>> equivalence(np.array([0.01, -0.02, 0.02, 0.0]), 0.25, margin=0.1).equivalent > 0.99
        True
    """
    posterior = _correlated_t(trainings, ratio)
    if posterior is None:
        return Equivalence(math.nan, math.nan, math.nan)
    mean, scale, df = posterior
    if scale == 0:
        return Equivalence(float(mean > margin), float(abs(mean) <= margin), float(mean < -margin))
    worse = float(stats.t.cdf((-margin - mean) / scale, df))
    better = float(stats.t.sf((margin - mean) / scale, df))
    return Equivalence(better, max(0.0, 1 - worse - better), worse)


def non_inferiority(trainings: np.ndarray, ratio: float, margin: float) -> tuple[float, float]:
    """Return the one-sided tests of "not worse by more than the margin".

    Args:
        trainings: differences of the trainings, positive if the tested trainer is better,
            [folds, seeds].
        ratio: n_test / n_train.
        margin: largest difference that counts as not worse.

    Returns:
        The lower limit of the one-sided 95 % interval, and the p of the hypothesis that the difference
        is -margin or below, each the more cautious one of :func:`corrected_t_test` and
        :func:`fold_seed_test`; NaN with fewer than 2 trainings.

    Example:
        >>> trainings = np.array([[0.0, 0.02], [-0.02, 0.01]])
        >>> low, p = non_inferiority(trainings, 0.25, margin=0.1)
        >>> low > -0.1, p < 0.05
        (True, True)
    """
    tests = _correlated_t(trainings.ravel(), ratio), _fold_seed_t(trainings)
    found = [_one_sided(test, margin) for test in tests if test is not None]
    if not found:
        return math.nan, math.nan
    lows, p = zip(*found)
    return min(lows), max(p)


def _one_sided(test: tuple[float, float, float], margin: float) -> tuple[float, float]:
    """Return the lower limit of a t-test, and the p of a mean of -margin or below."""
    mean, scale, df = test
    if scale == 0:
        return mean, float(mean <= -margin)
    low = mean - stats.t.ppf(1 - LEVEL, df) * scale
    return float(low), float(stats.t.sf((mean + margin) / scale, df))


def fold_seed_test(trainings: np.ndarray) -> float:
    """Return the two-sided p of the mean with folds and seeds as crossed random factors.

    The variance of the mean is that between folds plus that between seeds, as in Clark's (1973) min F';
    the degrees of freedom are Satterthwaite's. A difference that only some folds or only some seeds
    show is not significant here.

    Args:
        trainings: differences of the trainings, [folds, seeds].

    Returns:
        NaN with one fold or one seed.

    Example:
        >>> fold_seed_test(np.array([[0.4, 0.5, 0.6], [0.5, 0.6, 0.4]])) < 0.05
        True
    """
    test = _fold_seed_t(trainings)
    if test is None:
        return math.nan
    mean, scale, df = test
    if scale == 0:
        return 0.0 if mean else 1.0
    return float(2 * stats.t.sf(abs(mean) / scale, df))


def crossed_bootstrap(differences: Folds, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean, resampling seeds and cases as crossed factors.

    Every resample draws the seeds once for all folds, and the cases of each fold, independently; a
    value counts with the product of the two weights (Owen, 2007). The random seed is fixed.

    Args:
        differences: for each fold an array [seeds, cases].
        resamples: number of resamples.

    Example:
        >>> low, high = crossed_bootstrap([np.full((3, 10), 0.5)])
        >>> low, high
        (0.5, 0.5)
    """
    of_seeds = _weights(len(differences[0]), resamples, 0)
    means = np.zeros(resamples)
    for position, fold in enumerate(differences, start=1):
        of_cases = _weights(fold.shape[1], resamples, position)
        present = ~np.isnan(fold)
        if present.all():
            # One mean a training, then over the seeds.
            means += np.einsum("rs,rs->r", of_cases @ fold.T, of_seeds) / fold.size
            continue
        sums = of_cases @ np.where(present, fold, 0).T
        counts = of_cases @ present.T.astype(float)
        with np.errstate(invalid="ignore"):
            of_trainings = np.where(counts > 0, sums / counts, np.nan)
        used = np.where(np.isnan(of_trainings), 0, of_seeds)
        with np.errstate(invalid="ignore"):
            means += np.einsum("rs,rs->r", np.nan_to_num(of_trainings), used) / used.sum(axis=1)
    means = means[~np.isnan(means)] / len(differences)
    if not means.size:
        return math.nan, math.nan
    low, high = np.percentile(means, [100 * LEVEL / 2, 100 * (1 - LEVEL / 2)])
    return float(low), float(high)


def variance_components(differences: Folds) -> Components:
    """Return the standard deviations of the differences by source.

    The model is difference = mean + fold + seed + training + case + residual with independent random
    effects, cases nested in folds, training = fold x seed; the estimates equate observed and expected
    mean squares (Searle et al., 1992, ch. 4) and are 0 where that gives a negative variance.

    Args:
        differences: for each fold an array [seeds, cases]; cases with NaN are left out.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> folds = [rng.normal(0, 2, (1, 50)) + rng.normal(0, 0.5, (3, 50)) for _ in range(5)]
        >>> found = variance_components(folds)
        >>> round(found.case), round(found.residual, 1)
        (2, 0.5)
    """
    folds = [fold[:, ~np.isnan(fold).any(axis=0)] for fold in differences]
    folds = [fold for fold in folds if fold.shape[1]]
    if not folds:
        return Components(*[math.nan] * 5)
    k, s = len(folds), len(folds[0])
    n = k / sum(1 / fold.shape[1] for fold in folds)  # harmonic mean
    trainings = np.array([fold.mean(axis=1) for fold in folds])
    df_cases = sum(fold.shape[1] - 1 for fold in folds)
    of_cases = _ratio(
        s * sum(((fold.mean(axis=0) - fold.mean()) ** 2).sum() for fold in folds), df_cases
    )
    rest = sum(
        ((fold - fold.mean(axis=0) - fold.mean(axis=1, keepdims=True) + fold.mean()) ** 2).sum()
        for fold in folds
    )
    residual = _ratio(rest, df_cases * (s - 1))
    of_folds = s * trainings.mean(axis=1).var(ddof=1) if k > 1 else math.nan
    if s == 1:
        # Residual and case, and training and fold, cannot be told apart.
        return Components(_root(of_cases), math.nan, math.nan, _root(of_folds - of_cases / n), math.nan)
    inner = trainings - trainings.mean(axis=1, keepdims=True)
    of_seeds = math.nan
    if k > 1:
        of_seeds = k * trainings.mean(axis=0).var(ddof=1)
        inner = inner - trainings.mean(axis=0) + trainings.mean()
    of_trainings = (inner**2).sum() / ((s - 1) * max(k - 1, 1))
    case = (of_cases - residual) / s
    return Components(
        case=_root(case),
        fold=_root((of_folds - of_trainings) / s - max(case, 0) / n),
        seed=_root((of_seeds - of_trainings) / k),
        training=_root(of_trainings - residual / n),
        residual=_root(residual),
    )


def reach_with(difference: Difference, seeds: float) -> float:
    """Return half the width that the 95 % interval would have with another number of seeds.

    Folds and the standard deviation between trainings stay as they are. The part n_test/n_train of
    the variance does not shrink with seeds, so that the width has a limit.

    Args:
        difference: a comparison.
        seeds: number of seeds; ``math.inf`` for the limit.

    Returns:
        NaN with one training.

    Example:
        >>> folds = [np.array([[0.1], [0.4], [0.2]]) for _ in range(5)]
        >>> result = compare(folds, ratio=1 / 4)
        >>> [round(reach_with(result, seeds), 2) for seeds in (3, 10, math.inf)]
        [0.16, 0.13, 0.13]
    """
    n = difference.folds * seeds
    if math.isnan(difference.deviation) or n < 2:
        return math.nan
    return float(stats.t.ppf(1 - LEVEL / 2, n - 1) * _scale(difference.deviation, n, difference.ratio))


def seeds_for(difference: Difference, margin: float) -> int | None:
    """Return the number of seeds with which the 95 % interval would be the margin to both sides.

    Args:
        difference: a comparison.
        margin: half the width of the interval.

    Returns:
        None if no number of seeds is enough; 0 if one training does not say.
    """
    if math.isnan(difference.deviation):
        return 0
    numbers = range(1, _MAX_SEEDS + 1)
    found = bisect.bisect_left(numbers, True, key=lambda n: reach_with(difference, n) <= margin)
    return numbers[found] if found < len(numbers) else None


def holm(p: Sequence[float]) -> list[float]:
    """Return the p-values of one family after Holm's step-down correction (1979); NaN are ignored.

    Example:
        >>> holm([0.01, 0.04])
        [0.02, 0.04]
    """
    corrected = [math.nan] * len(p)
    tested = sorted((i for i in range(len(p)) if not math.isnan(p[i])), key=lambda i: p[i])
    largest = 0.0
    for rank, i in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p[i]))
        corrected[i] = largest
    return corrected


def p_number(p: float) -> str:
    """Return a p-value with two digits, such as "0.61"."""
    return f"< {_SMALLEST_P:.4f}" if p < _SMALLEST_P else str(float(f"{p:.2g}")).removesuffix(".0")


def _correlated_t(trainings: np.ndarray, ratio: float) -> tuple[float, float, int] | None:
    """Return mean, scale and degrees of freedom of the mean of correlated differences."""
    n = len(trainings)
    if n < 2:
        return None
    return float(trainings.mean()), _scale(_deviation(trainings), n, ratio), n - 1


def _fold_seed_t(trainings: np.ndarray) -> tuple[float, float, float] | None:
    """Return mean, scale and degrees of freedom with folds and seeds as crossed random factors."""
    if trainings.ndim < 2 or min(trainings.shape) < 2:
        return None
    k, s = trainings.shape
    of_folds = trainings.mean(axis=1).var(ddof=1) / k
    of_seeds = trainings.mean(axis=0).var(ddof=1) / s
    variance = of_folds + of_seeds
    df = variance**2 / (of_folds**2 / (k - 1) + of_seeds**2 / (s - 1)) if variance else math.nan
    return float(trainings.mean()), math.sqrt(variance), df


def _deviation(trainings: np.ndarray) -> float:
    """Return the standard deviation, exactly 0 for equal values."""
    return float(trainings.std(ddof=1)) if np.ptp(trainings) else 0.0


def _scale(deviation: float, n: float, ratio: float) -> float:
    """Return the standard error of the mean of n correlated differences."""
    return deviation * math.sqrt(1 / n + ratio)


@functools.lru_cache(maxsize=64)
def _weights(count: int, resamples: int, stream: int) -> np.ndarray:
    """Return how often each of ``count`` units is drawn in each resample, [resamples, count]."""
    rng = np.random.default_rng([stream, count])
    return rng.multinomial(count, np.full(count, 1 / count), size=resamples).astype(float)


def _ratio(sum_of_squares: float, df: int) -> float:
    return sum_of_squares / df if df else math.nan


def _root(variance: float) -> float:
    return math.sqrt(max(variance, 0.0)) if not math.isnan(variance) else math.nan
