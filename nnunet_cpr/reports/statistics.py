"""Statistics of the differences between two methods that were each trained several times.

The differences of one comparison are a list with an array [seeds, cases] for each fold: the other
trainer's value of a case minus the reference's, trained with the same fold and seed. Cases of a fold
share its trainings, so a test over cases cannot see the variation between trainings;
``docs/concepts/study-statistics.md`` derives and simulates the methods of this module.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.05
RESAMPLES = 9999
_SMALLEST_SCALE = 1e-12

Folds = Sequence[np.ndarray]
"""Differences of each fold, [seeds, cases]; NaN where a case has no value."""


@dataclass(frozen=True)
class MeanDifference:
    """Student's t distribution of a mean difference, in the unit of the values.

    Attributes:
        mean: mean over the trainings.
        scale: standard error of the mean.
        df: degrees of freedom; NaN for too few trainings, and then every result is NaN.
    """

    mean: float = math.nan
    scale: float = math.nan
    df: float = math.nan

    @property
    def p(self) -> float:
        """Two-sided p of a mean of 0."""
        return float(2 * stats.t.sf(abs(self.mean) / self._positive_scale, self.df))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval."""
        return self.mean - self.reach, self.mean + self.reach

    @property
    def reach(self) -> float:
        """Half the width of the 95 % interval."""
        return self.one_sided_reach(LEVEL / 2)

    def one_sided_reach(self, level: float) -> float:
        """Return the distance of a one-sided limit from the mean."""
        return float(stats.t.ppf(1 - level, self.df)) * self.scale

    def probability_above(self, value: float) -> float:
        """Return the posterior probability of a mean above a value (Benavoli et al., 2017)."""
        return float(stats.t.sf((value - self.mean) / self._positive_scale, self.df))

    def probability_below(self, value: float) -> float:
        """Return that of a mean below a value; it is also the one-sided p of such a mean."""
        return float(stats.t.cdf((value - self.mean) / self._positive_scale, self.df))

    @property
    def _positive_scale(self) -> float:
        return max(self.scale, _SMALLEST_SCALE)  # all trainings may have the same difference


def training_means(differences: Folds) -> np.ndarray:
    """Return the mean over the cases of each training, [folds, seeds]."""
    return np.array([np.nanmean(fold, axis=1) for fold in differences])


def corrected_t_test(trainings: np.ndarray, ratio: float) -> MeanDifference:
    """Return the corrected repeated k-fold t-test.

    The variance of the mean of n differences is s^2 (1/n + n_test/n_train) in place of s^2 / n, since
    the trainings of different folds share most of their cases (Nadeau and Bengio, 2003; Bouckaert and
    Frank, 2004).

    Args:
        trainings: differences of the trainings, of any shape.
        ratio: n_test / n_train.

    Example:
        >>> test = corrected_t_test(np.array([0.2, 0.3, 0.4]), ratio=0.25)
        >>> [round(limit, 3) for limit in test.interval], round(test.p, 3)
        ([-0.029, 0.629], 0.059)
    """
    n = trainings.size
    if n < 2:
        return MeanDifference(float(trainings.mean()) if n else math.nan)
    deviation = float(trainings.std(ddof=1)) if np.ptp(trainings) else 0.0  # exactly 0 if all are equal
    return MeanDifference(float(trainings.mean()), deviation * math.sqrt(1 / n + ratio), n - 1)


def fold_seed_test(trainings: np.ndarray) -> MeanDifference:
    """Return the test with folds and seeds as crossed random factors.

    The variance of the mean is that between folds plus that between seeds, as in Clark's (1973) min F';
    the degrees of freedom are Satterthwaite's, at most twice those of the fewer of folds and seeds, with
    two folds at most one: two folds say next to nothing about the variation between folds, and few seeds
    that look alike by chance leave too many degrees of freedom for the small p that several comparisons
    need. Simulated reports would claim too much. A difference that only some folds or only some seeds
    show is not significant here. Without two folds and two seeds every result is NaN.

    Args:
        trainings: differences of the trainings, [folds, seeds].

    Example:
        >>> fold_seed_test(np.array([[0.4, 0.5, 0.6], [0.5, 0.6, 0.4], [0.4, 0.4, 0.5]])).p < 0.05
        True
    """
    if trainings.ndim < 2 or min(trainings.shape) < 2:
        return MeanDifference()
    k, s = trainings.shape
    of_folds = trainings.mean(axis=1).var(ddof=1) / k
    of_seeds = trainings.mean(axis=0).var(ddof=1) / s
    variance = of_folds + of_seeds
    df = variance**2 / (of_folds**2 / (k - 1) + of_seeds**2 / (s - 1)) if variance else k * s - 1
    largest = 1 if k == 2 else 2 * (min(k, s) - 1)
    return MeanDifference(float(trainings.mean()), math.sqrt(variance), min(df, largest))


def crossed_test(differences: np.ndarray) -> MeanDifference:
    """Return the test of a mean over runs that all have the same cases, those of a test set.

    The claim is about methods that are trained on these training cases, and about new test cases: cases
    and seeds are random factors, folds are not. The variance of the mean is that of the cases' means
    plus that of the runs' means between the seeds of a fold, a crossed design of readers and cases
    (Obuchowski and Rockette, 1995); the degrees of freedom are Satterthwaite's, as in Hillis (2007),
    with those of the cases. What a case and a run have in common counts in both, so the variance is
    rather too large. Folds share training cases: as a random factor they would claim too much.

    Args:
        differences: differences of the cases, [folds, seeds, cases]; NaN where a case has no value. Each
            run and each case needs one. Without two seeds and two cases only the mean is known.

    Example:
        >>> cases = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
        >>> test = crossed_test(np.array([[cases, cases + 0.1], [cases + 0.1, cases]]))
        >>> [round(limit, 3) for limit in test.interval], round(test.df, 2)
        ([0.153, 0.547], 5.56)
    """
    if not differences.size:
        return MeanDifference()
    folds, seeds, cases = differences.shape
    runs = np.nanmean(differences, axis=2)
    mean = float(runs.mean())
    if seeds < 2 or cases < 2:
        return MeanDifference(mean)
    of_cases = float(np.nanmean(differences, axis=(0, 1)).var(ddof=1)) / cases
    of_seeds = float(runs.var(axis=1, ddof=1).mean()) / (folds * seeds)
    variance = of_cases + of_seeds
    df_cases, df_seeds = cases - 1, folds * (seeds - 1)
    parts = of_cases**2 / df_cases + of_seeds**2 / df_seeds
    df = variance**2 / parts if parts else df_cases + df_seeds
    return MeanDifference(mean, math.sqrt(variance), df)


def seed_test(trainings: np.ndarray) -> MeanDifference:
    """Return the test of the mean with the seeds of each fold as the only random factor.

    It stands beside :func:`crossed_test`: seeds that look alike by chance make its variance too small
    and leave it too many degrees of freedom, so that of few seeds it alone would claim too much.

    Args:
        trainings: differences of the trainings, [folds, seeds]; one seed has only a mean.

    Example:
        >>> seed_test(np.array([[0.2, 0.4], [0.3, 0.1], [0.5, 0.3]])).df
        3
    """
    if not trainings.size:
        return MeanDifference()
    folds, seeds = trainings.shape
    if seeds < 2:
        return MeanDifference(float(trainings.mean()))
    variance = float(trainings.var(axis=1, ddof=1).mean()) / (folds * seeds)
    return MeanDifference(float(trainings.mean()), math.sqrt(variance), folds * (seeds - 1))


def crossed_bootstrap(differences: Folds, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean, resampling seeds and cases as crossed factors.

    Every resample draws the seeds once for all folds, and the cases of each fold, independently; a
    value counts with the product of the two weights (Owen, 2007). The random seed is fixed. Simulated
    studies need it: where cases vary more than trainings, both t-tests claim too much with few folds.

    Args:
        differences: for each fold an array [seeds, cases].
        resamples: number of resamples.

    Example:
        >>> crossed_bootstrap([np.full((3, 10), 0.5)])
        (0.5, 0.5)
    """
    if not differences:
        return math.nan, math.nan
    of_seeds = _weights(len(differences[0]), resamples, 0)
    means = np.zeros(resamples)
    with np.errstate(invalid="ignore"):
        for position, fold in enumerate(differences, start=1):
            of_cases = _weights(fold.shape[1], resamples, position)
            present = ~np.isnan(fold)
            of_trainings = (of_cases @ np.where(present, fold, 0).T) / (
                of_cases @ present.T.astype(float)
            )
            used = np.where(np.isnan(of_trainings), 0, of_seeds)
            means += (np.nan_to_num(of_trainings) * used).sum(axis=1) / used.sum(axis=1)
    low, high = np.nanpercentile(means / len(differences), [100 * LEVEL / 2, 100 * (1 - LEVEL / 2)])
    return float(low), float(high)


@functools.lru_cache(maxsize=64)
def _weights(count: int, resamples: int, stream: int) -> np.ndarray:
    """Return how often each of ``count`` units is drawn in each resample, [resamples, count]."""
    rng = np.random.default_rng([stream, count])
    return rng.multinomial(count, np.full(count, 1 / count), size=resamples).astype(float)


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
