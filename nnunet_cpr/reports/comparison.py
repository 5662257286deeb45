"""Comparison of two trainers: its numbers, and the verdict that is read off them.

Everything that a report says of two trainers, in words, tables, figures and files, is made from one
:class:`Comparison`, in a condition and over data sets alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from nnunet_cpr.reports.metrics import Metric
from nnunet_cpr.reports.results import Condition, SplitRatio
from nnunet_cpr.reports.statistics import LEVEL, MeanDifference, holm
from nnunet_cpr.studies.study import TrainerEntry


class Verdict(str, Enum):
    """Result of a comparison, of the trainer against the reference."""

    EQUIVALENT = "equivalent"
    BETTER = "better"
    WORSE = "worse"
    NON_INFERIOR = "non-inferior"
    UNDECIDED = "undecided"
    NONE = "no verdict"


class Claims(NamedTuple):
    """P of the three claims; NaN where no verdict is possible."""

    difference: float = math.nan
    equivalence: float = math.nan
    non_inferiority: float = math.nan


class Failures(NamedTuple):
    """Cases that failed in any run.

    Attributes:
        entry, reference: number of failed cases of both trainers.
        cases: number of cases.
        dice: mean Dice of the trainer in percent, which a case that fails costs.
    """

    entry: int = 0
    reference: int = 0
    cases: int = 0
    dice: float = math.nan

    @property
    def bound(self) -> float:
        """Share of failures that none in so many cases still allows, in 95 % of studies (3 / N)."""
        return min(1.0, 3 / self.cases) if self.cases else math.nan


@dataclass(frozen=True, eq=False)
class Comparison:
    """One trainer against another by one metric: in a condition, or over data sets.

    ==================  ===============================================================================
    verdict             condition: the first that holds
    ==================  ===============================================================================
    no verdict          a verdict is not possible
    equivalent          the interval is within the margin, p of both one-sided tests is at most 0.025
    better or worse     the interval excludes 0, p is at most 0.05
    non-inferior        the interval is above minus the margin, p of one one-sided test is at most 0.025
    undecided           everything else; it is no evidence of equality
    ==================  ===============================================================================

    The interval is the one that is printed, p that after Holm's correction, and the means of the main
    table must agree. The verdict must be the same without the cases in which only one of the two marks
    an absent structure; otherwise it is undecided.

    Gains are in the shown unit of the metric and have its sign, so that a positive one is better. All
    numbers are NaN where the runs are too few.

    Attributes:
        condition: data set, configuration and plans; the data set is "" over data sets.
        entry, reference: the two trainers, or the selected settings of two methods.
        margin: largest difference that counts as equivalent.
        tests: gain by each test that a claim needs.
        bootstrap: 95 % interval of the gain, of the bootstrap over cases and seeds.
        table_gain: gain by the main table's means, which are over cases for each class and then over
            classes; it can have another sign where classes are missing in many cases.
        failures: cases that failed, which a mean of few cases hides.
        cases_marked: number of cases in which one of the two marks an absent structure, in any seed.
        without_marked: the comparison without these cases; None if there are none.
        doubt: what makes every number doubtful; empty if nothing does.
        obstacle: why there is no verdict whatever the numbers are; empty if nothing speaks against one.
        folds, seeds: folds and seeds of the runs that are compared; empty over data sets.
        gains_of_cases: mean gain of each case over the seeds, by (fold, case); empty over data sets.
        cases_left_out: number of cases with a value from one of the two only, in any seed.
        ratio: test cases of a fold per other case, in a condition.
        datasets: comparisons of the data sets that are one value each here; empty in a condition.
        left_out: those without numbers, or with doubtful ones. There is no verdict without them: a
            trainer must not become better by the data sets on which it has no results.
        compared: number of comparisons of the scope in Holm's correction.
        p_holm: p of the claims after the correction; NaN before it.
    """

    condition: Condition
    metric: Metric
    entry: TrainerEntry
    reference: TrainerEntry
    margin: float
    tests: tuple[MeanDifference, ...]
    bootstrap: tuple[float, float]
    table_gain: float
    failures: Failures
    cases_marked: int
    without_marked: Comparison | None
    doubt: str
    obstacle: str
    folds: Sequence[int] = ()
    seeds: Sequence[int] = ()
    gains_of_cases: pd.Series = field(default_factory=lambda: pd.Series(dtype=float))
    cases_left_out: int = 0
    ratio: SplitRatio = SplitRatio(math.nan, "")  # noqa: RUF009
    datasets: Sequence[Comparison] = ()
    left_out: Sequence[Comparison] = ()
    compared: int = 1
    p_holm: Claims = Claims()  # noqa: RUF009

    # Numbers

    @property
    def cases(self) -> int:
        """Number of cases."""
        return len(self.gains_of_cases) + sum(each.cases for each in self.datasets)

    @property
    def gain(self) -> float:
        """Mean gain over the trainings."""
        return self.tests[0].mean

    @property
    def difference(self) -> float:
        """Mean difference over the trainings."""
        return self.metric.sign * self.gain

    @property
    def deciding(self) -> MeanDifference:
        """The test with the wider 95 % interval, which has the larger p, too."""
        tests = [test for test in self.tests if not math.isnan(test.df)]
        return max(tests, key=lambda test: test.reach, default=self.tests[0])

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the gain, the envelope of the tests and the bootstrap.

        There is no other one: a verdict never says more than it.
        """
        low, high = self.deciding.interval
        return float(np.fmin(low, self.bootstrap[0])), float(np.fmax(high, self.bootstrap[1]))

    @property
    def shown_interval(self) -> tuple[float, float]:
        """95 % interval of the difference."""
        low, high = sorted(self.metric.sign * end for end in self.interval)
        return low, high

    @property
    def p(self) -> Claims:
        """P of no difference (two-sided), of one of the margin or more, and of a loss of the margin.

        Each is the largest of the tests; the second is that of two one-sided tests (TOST).
        """
        p_inferior = self._largest(lambda test: test.probability_below(-self.margin))
        p_superior = self._largest(lambda test: test.probability_above(self.margin))
        difference = self._largest(lambda test: test.p)
        return Claims(difference, float(np.fmax(p_inferior, p_superior)), p_inferior)

    @property
    def smallest_margin(self) -> float:
        """Smallest margin within which equal trainers could have been shown equivalent."""
        level = LEVEL / 2 / max(self.compared, 1)
        low, high = self.bootstrap
        reach = self._largest(lambda test: test.one_sided_reach(level))
        return float(np.fmax(reach, (high - low) / 2))

    def _largest(self, of_test: Callable[[MeanDifference], float]) -> float:
        """Return the largest number of the tests; NaN, of too few runs, does not count."""
        return float(np.fmax.reduce([of_test(test) for test in self.tests]))

    # Verdict

    @property
    def verdict(self) -> Verdict:
        """The verdict."""
        verdict = self.verdict_with_marked
        if self.without_marked is None or verdict is Verdict.NONE:
            return verdict
        is_kept = self.without_marked.verdict_with_marked is verdict
        return verdict if is_kept else Verdict.UNDECIDED

    @property
    def verdict_with_marked(self) -> Verdict:
        """Verdict on all cases, also those in which only one of the two marks an absent structure."""
        if self.obstacle:
            return Verdict.NONE
        if self._is_equivalent:
            return Verdict.EQUIVALENT
        is_shown = self.p_holm.difference <= LEVEL and self.excludes_zero
        if is_shown and self.table_gain * self.gain >= 0:
            return Verdict.BETTER if self.gain > 0 else Verdict.WORSE
        return Verdict.NON_INFERIOR if self._is_not_worse else Verdict.UNDECIDED

    @property
    def excludes_zero(self) -> bool:
        """True if the interval excludes 0."""
        low, high = self.interval
        return low > 0 or high < 0

    @property
    def is_within(self) -> bool:
        """True if the interval is within the margin."""
        low, high = self.interval
        return -self.margin < low and high < self.margin

    @property
    def _is_equivalent(self) -> bool:
        is_shown = self.is_within and self.p_holm.equivalence <= LEVEL / 2
        return is_shown and abs(self.table_gain) <= self.margin

    @property
    def _is_not_worse(self) -> bool:
        is_shown = self.interval[0] > -self.margin and self.p_holm.non_inferiority <= LEVEL / 2
        return is_shown and self.table_gain > -self.margin

    @property
    def is_non_inferior(self) -> bool:
        """True if the trainer is shown to be not worse by the margin or more."""
        shown = (Verdict.EQUIVALENT, Verdict.BETTER, Verdict.NON_INFERIOR)
        return self.verdict in shown or (self.verdict is Verdict.WORSE and self._is_not_worse)

    # Over data sets

    @property
    def title(self) -> str:
        """Number of data sets in words, such as "5 data sets" or "4 of 5 data sets"."""
        of_all = f" of {len(self.datasets) + len(self.left_out)}" if self.left_out else ""
        return f"{len(self.datasets)}{of_all} data sets"

    @property
    def higher_on(self) -> int:
        """Number of data sets on which the mean is in favour of the trainer."""
        return sum(each.gain > 0 for each in self.datasets)

    @property
    def p_sign(self) -> float:
        """Two-sided p of the sign test over the data sets, which describes and decides nothing."""
        differing = sum(each.gain != 0 for each in self.datasets)
        return float(binomtest(self.higher_on, differing).pvalue) if differing else math.nan

    @property
    def without_one(self) -> tuple[float, float]:
        """Lowest and highest mean gain without one of the data sets."""
        gains = np.array([each.gain for each in self.datasets])
        means = (gains.sum() - gains) / (len(gains) - 1)
        return float(means.min()), float(means.max())


def judge(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons of a scope with the same reference, after Holm's correction.

    It counts those that can have a verdict, of all trainers, metrics and data sets.
    """
    without = _correct([each.without_marked or each for each in comparisons])
    return [
        replace(own, without_marked=alone) if own.without_marked else own
        for own, alone in zip(_correct(comparisons), without)
    ]


def _correct(comparisons: Sequence[Comparison]) -> list[Comparison]:
    possible = [each.p if not each.obstacle else Claims() for each in comparisons]
    corrected = zip(*map(holm, zip(*possible)))
    number = sum(not each.obstacle for each in comparisons)
    return [replace(each, compared=number, p_holm=Claims(*p)) for each, p in zip(comparisons, corrected)]
