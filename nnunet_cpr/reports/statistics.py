"""Paired statistics over cases. Pure functions of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap, rankdata, wilcoxon

FEWEST_CASES = 6
"""With fewer no result of the signed-rank test can have p < 0.05: 2 / 2**5 = 0.0625."""
RESAMPLES = 9999
LEVEL = 0.05
_ROUNDING = 12
"""Decimals of a difference that are looked at; what is beyond comes from the order of additions."""


@dataclass(frozen=True)
class Paired:
    """One trainer against the reference, in the unit of what was given.

    Attributes:
        cases: pairs where both have a value.
        difference: mean of other - reference; NaN without cases.
        low, high: 95 % bootstrap interval of the mean difference; NaN with too few cases.
        p: two-sided, of Wilcoxon's signed-rank test; NaN with too few cases.
        rank_correlation: the effect that this test looks at, from -1 (the other is worse in all cases)
            to 1; 0 where all are equal, NaN without cases.
        wins, ties, losses: cases where the other is better, equal, worse.
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
        """Whether an interval and a test mean something."""
        return self.cases >= FEWEST_CASES


def compare(reference: np.ndarray, other: np.ndarray) -> Paired:
    """Compare paired values, case by case; pairs with a NaN do not count.

    Args:
        reference: values of the reference, [n].
        other: values of the other on the same cases, [n].
    """
    differences = np.round(np.asarray(other, float) - np.asarray(reference, float), _ROUNDING)
    differences = differences[~np.isnan(differences)]
    n = len(differences)
    low, high = mean_interval(differences) if n >= FEWEST_CASES else (math.nan, math.nan)
    return Paired(
        cases=n,
        difference=float(differences.mean()) if n else math.nan,
        low=low,
        high=high,
        p=signed_rank(differences) if n >= FEWEST_CASES else math.nan,
        rank_correlation=rank_correlation(differences) if n else math.nan,
        wins=int((differences > 0).sum()),
        ties=int((differences == 0).sum()),
        losses=int((differences < 0).sum()),
    )


def mean_interval(differences: np.ndarray) -> tuple[float, float]:
    """The 95 % bootstrap interval of a mean: BCa, 9,999 resamples of the cases, seed 0."""
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
    """The two-sided p of Wilcoxon's signed-rank test; differences of 0 are left out, as he did.

    1 where all are 0.
    """
    if not np.any(differences):
        return 1.0
    return float(wilcoxon(differences, zero_method="wilcox").pvalue)


def rank_correlation(differences: np.ndarray) -> float:
    """Matched-pairs rank-biserial correlation: the share of the ranks that is for, less that against."""
    others = differences[differences != 0]
    if not others.size:
        return 0.0
    ranks = rankdata(np.abs(others))
    return float((ranks * np.sign(others)).sum() / ranks.sum())


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979) of the p-values of one family; NaN stay and do not count."""
    corrected = [math.nan] * len(p)
    tested = sorted((i for i in range(len(p)) if not math.isnan(p[i])), key=lambda i: p[i])
    largest = 0.0
    for rank, i in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p[i]))
        corrected[i] = largest
    return corrected


def verdict(paired: Paired, p_holm: float, other: str, reference: str) -> str:
    """A plain sentence that says whether the data show a difference.

    Args:
        paired: the comparison, in points of Dice (percent).
        p_holm: its p after Holm's correction.
        other, reference: the names.
    """
    if not paired.cases:
        return f"{other} and {reference} cannot be compared: no case of a fold that both have finished."
    cases = "1 case" if paired.cases == 1 else f"{paired.cases} cases"
    if not paired.enough:
        return (
            f"{cases} are too few to tell whether {other} and {reference} differ "
            f"({paired.difference:+.2f} points of Dice); {FEWEST_CASES} are needed for a test."
        ).replace("1 case are", "1 case is")
    sign = "<" if p_holm < _SMALLEST_P else "="
    numbers = (
        f"{paired.difference:+.2f} points of Dice "
        f"(95 % interval {paired.low:+.2f} to {paired.high:+.2f}), "
        f"p {sign} {p_number(p_holm).removeprefix('< ')} after Holm's correction, {cases}."
    )
    by_test = p_holm < LEVEL
    by_interval = paired.low > 0 or paired.high < 0
    if by_test and by_interval and paired.difference * paired.rank_correlation > 0:
        better = other if paired.difference > 0 else reference
        return (
            f"The data show a difference between {other} and {reference}; {better} is better: {numbers}"
        )
    if by_test and by_interval:
        why = "most cases and the mean point to opposite sides"
    elif by_test:
        why = "the test says so and the interval of the mean includes 0"
    elif by_interval:
        why = "the interval of the mean excludes 0 and the test does not say so"
    else:
        return f"The data show no difference between {other} and {reference}: {numbers}"
    return f"The data do not settle whether {other} and {reference} differ; {why}: {numbers}"


_SMALLEST_P = 1e-4


def p_number(p: float) -> str:
    """Two digits of a p-value, such as "0.61"."""
    return f"< {_SMALLEST_P:.4f}" if p < _SMALLEST_P else str(float(f"{p:.2g}")).removesuffix(".0")
