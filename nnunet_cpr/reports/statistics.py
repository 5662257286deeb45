"""Paired statistics over cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap, rankdata, wilcoxon

MIN_CASES = 6
"""Minimum number of cases for a signed-rank test with p < 0.05; 5 cases reach 2 / 2**5 = 0.0625."""
RESAMPLES = 9999
LEVEL = 0.05
_SMALLEST_P = 1e-4
_ROUNDING = 12
"""Decimals of a difference that count; smaller differences come from the order of additions."""


@dataclass(frozen=True)
class Paired:
    """Paired statistics of one trainer and the reference, in the unit of the values.

    Attributes:
        cases: number of pairs without NaN.
        difference: mean of other - reference; NaN without cases.
        low, high: 95 % bootstrap interval of the mean difference; NaN with too few cases.
        p: two-sided p of Wilcoxon's signed-rank test; NaN with too few cases.
        rank_correlation: matched-pairs rank-biserial correlation, from -1 (the other is worse in all
            cases) to 1; 0 if all are equal, NaN without cases.
        wins, ties, losses: number of cases in which the other is better, equal, worse.
    """

    cases: int
    difference: float
    low: float
    high: float
    p: float
    rank_correlation: float
    wins: int
    ties: int
    losses: int

    @property
    def enough(self) -> bool:
        """True if there are enough cases for an interval and a test."""
        return self.cases >= MIN_CASES


def compare(reference: np.ndarray, other: np.ndarray) -> Paired:
    """Return the statistics of paired values, without the pairs that have a NaN.

    Args:
        reference: values of the reference, [n].
        other: values of the other trainer on the same cases, [n].

    Example:
        >>> result = compare(np.arange(8.0), np.arange(8.0) + 1)
        >>> result.difference, result.wins, round(result.p, 4)
        (1.0, 8, 0.0078)
    """
    differences = np.round(np.asarray(other, float) - np.asarray(reference, float), _ROUNDING)
    differences = differences[~np.isnan(differences)]
    n = len(differences)
    low, high = mean_interval(differences) if n >= MIN_CASES else (math.nan, math.nan)
    return Paired(
        cases=n,
        difference=float(differences.mean()) if n else math.nan,
        low=low,
        high=high,
        p=signed_rank(differences) if n >= MIN_CASES else math.nan,
        rank_correlation=rank_correlation(differences) if n else math.nan,
        wins=int((differences > 0).sum()),
        ties=int((differences == 0).sum()),
        losses=int((differences < 0).sum()),
    )


def mean_interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean: BCa, 9,999 resamples, seed 0."""
    if np.ptp(differences) == 0:  # every resample has the same mean
        return float(differences[0]), float(differences[0])
    result = bootstrap(
        (differences,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=1000,
        confidence_level=1 - LEVEL,
        method="BCa",
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def signed_rank(differences: np.ndarray) -> float:
    """Return the two-sided p of Wilcoxon's signed-rank test without differences of 0; 1 if all are 0."""
    if not np.any(differences):
        return 1.0
    return float(wilcoxon(differences, zero_method="wilcox").pvalue)


def rank_correlation(differences: np.ndarray) -> float:
    """Return the rank-biserial correlation: the share of positive ranks minus that of negative ranks."""
    others = differences[differences != 0]
    if not others.size:
        return 0.0
    ranks = rankdata(np.abs(others))
    return float((ranks * np.sign(others)).sum() / ranks.sum())


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


def verdict(paired: Paired, p_holm: float, other: str, reference: str) -> str:
    """Return the result of a comparison as a sentence.

    Args:
        paired: the comparison, in points of Dice (percent).
        p_holm: p after Holm's correction.
        other, reference: names of the trainers.
    """
    if not paired.cases:
        return f"{other} and {reference} cannot be compared: no case of a fold that both have finished."
    if not paired.enough:
        return (
            f"{other} and {reference} were not tested: expected at least {MIN_CASES} cases, got "
            f"{paired.cases} ({paired.difference:+.2f} points of Dice)."
        )
    sign = "<" if p_holm < _SMALLEST_P else "="
    numbers = (
        f"{paired.difference:+.2f} points of Dice "
        f"(95 % interval {paired.low:+.2f} to {paired.high:+.2f}), "
        f"p {sign} {p_number(p_holm).removeprefix('< ')} after Holm's correction, {paired.cases} cases."
    )
    by_test = p_holm < LEVEL
    by_interval = paired.low > 0 or paired.high < 0
    if by_test and by_interval and paired.difference * paired.rank_correlation > 0:
        better = other if paired.difference > 0 else reference
        return (
            f"A statistically significant difference between {other} and {reference} was found; "
            f"{better} is better: {numbers}"
        )
    if by_test and by_interval:
        reason = "most cases and the mean have opposite signs"
    elif by_test:
        reason = "the test is significant, but the interval of the mean includes 0"
    elif by_interval:
        reason = "the interval of the mean excludes 0, but the test is not significant"
    else:
        names = f"{other} and {reference}"
        return f"No statistically significant difference between {names} was found: {numbers}"
    return f"The comparison of {other} and {reference} is inconclusive; {reason}: {numbers}"


def p_number(p: float) -> str:
    """Return a p-value with two digits, such as "0.61"."""
    return f"< {_SMALLEST_P:.4f}" if p < _SMALLEST_P else str(float(f"{p:.2g}")).removesuffix(".0")
