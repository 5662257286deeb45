"""Comparison of two trainers: its numbers, and the verdict on what they show.

One table (:func:`judge`) decides. Everything that a report says of a comparison, in words, figures and
CSV files, follows from its verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from nnunet_cpr.reports import statistics
from nnunet_cpr.reports.metrics import Metric
from nnunet_cpr.reports.results import (
    MIN_FOLDS,
    MIN_SEEDS,
    Condition,
    ConditionResults,
    SplitRatio,
    case_means,
    run_means,
)
from nnunet_cpr.reports.selection import Compared
from nnunet_cpr.reports.statistics import LEVEL, MeanDifference, holm
from nnunet_cpr.studies.study import TrainerEntry

_ROUNDING = 12
"""Decimals of a value that count; smaller differences come from the order of additions."""


@dataclass(frozen=True, eq=False)
class Gain:
    """Mean gain of one trainer over another by one metric, and what a verdict needs.

    Gains are in the shown unit of the metric and have its sign, so that a positive one is better. All
    numbers are NaN where the runs are too few.

    Attributes:
        entry, reference: the two trainers, or the selected settings of two methods.
        margin: largest difference that counts as equivalent.
        tests: gain by each test that a claim needs.
        bootstrap: 95 % interval of the gain, of the bootstrap over cases and seeds.
        table_gain: gain by the main table's means, which are over cases for each class and then over
            classes; it can have another sign where classes are missing in many cases.
        doubt: what makes every number doubtful; empty if nothing does.
        obstacle: why there is no verdict whatever the numbers are; empty if nothing speaks against one.
    """

    metric: Metric
    entry: TrainerEntry
    reference: TrainerEntry
    margin: float
    tests: tuple[MeanDifference, ...]
    bootstrap: tuple[float, float]
    table_gain: float
    doubt: str
    obstacle: str

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
        """95 % interval of the gain."""
        return self.deciding.interval

    @property
    def shown_interval(self) -> tuple[float, float]:
        """95 % interval of the difference."""
        low, high = sorted(self.metric.sign * end for end in self.interval)
        return low, high

    @property
    def p(self) -> float:
        """Two-sided p of no difference, the largest of the tests."""
        return self.largest(lambda test: test.p)

    @property
    def p_non_inferior(self) -> float:
        """One-sided p of a trainer that is worse by the margin or more, the largest of the tests."""
        return self.largest(lambda test: test.probability_below(-self.margin))

    @property
    def p_equivalent(self) -> float:
        """P of trainers that differ by the margin or more: two one-sided tests (TOST)."""
        p_non_superior = self.largest(lambda test: test.probability_above(self.margin))
        return float(np.fmax(self.p_non_inferior, p_non_superior))

    @property
    def advantage_low(self) -> float:
        """Lower limit of the gain, one-sided, the lowest of the tests."""
        return -self.largest(lambda test: -test.lower_limit)

    def largest(self, of_test: Callable[[MeanDifference], float]) -> float:
        """Return the largest number of the tests; NaN, of too few runs, does not count."""
        return float(np.fmax.reduce([of_test(test) for test in self.tests]))


@dataclass(frozen=True, eq=False)
class Numbers(Gain):
    """Comparison of two trainers in one condition, on the runs that both have finished.

    The tests are the corrected repeated k-fold t-test and that with folds and seeds as random factors.

    Attributes:
        condition: data set, configuration and plans.
        folds, seeds: folds and seeds of the runs that are compared.
        gains_of_cases: mean gain of each case over the seeds.
        cases_left_out: number of cases with a value from one of the two only, in any seed.
        ratio: test cases of a fold per other case.
    """

    condition: Condition
    folds: list[int]
    seeds: list[int]
    gains_of_cases: np.ndarray
    cases_left_out: int
    ratio: SplitRatio

    @property
    def cases(self) -> int:
        """Number of cases."""
        return len(self.gains_of_cases)


def compare_with(conditions: Sequence[Compared], reference: str) -> list[Numbers]:
    """Return the comparisons of all other trainers with that of a name, by condition and metric."""
    return [
        numbers
        for compared in conditions
        for metric in compared.results.metrics
        for numbers in compare_by(metric, compared, reference)
    ]


def compare_by(metric: Metric, compared: Compared, trainer: str) -> Iterator[Numbers]:
    """Yield the comparisons of one condition by one metric."""
    results, reference = compared.results, compared.results.study.entry(trainer)
    flaws, constants = _find_flaws(compared), _find_constants(results)
    by_case = values_of_cases(results, metric)
    by_run = run_means(results.cases, metric.name).set_index(["trainer", "fold", "seed"])[metric.name]
    for entry in results.study.trainers:
        if entry == reference:
            continue
        pairs = pair_runs(results, by_case, entry, reference)
        complete = statistics.complete_folds([metric.sign * of_fold for of_fold in pairs.differences])
        trainings = statistics.training_means(complete)
        of_cases = [np.nanmean(fold, axis=0).round(_ROUNDING) for fold in complete]
        in_table = [
            by_run.reindex(product([e.key], pairs.folds, pairs.seeds)).mean() for e in (entry, reference)
        ]
        flawed, constant = (
            next((reasons[e.key] for e in (reference, entry) if e.key in reasons), "")
            for reasons in (flaws, constants)
        )
        doubt = flawed or _left_out(metric, pairs.cases_left_out)
        yield Numbers(
            condition=results.condition,
            metric=metric,
            entry=entry,
            reference=reference,
            folds=pairs.folds,
            seeds=pairs.seeds,
            gains_of_cases=np.concatenate(of_cases or [np.array([])]),
            cases_left_out=pairs.cases_left_out,
            margin=results.study.margin[metric.name],
            ratio=results.ratio,
            tests=(
                statistics.corrected_t_test(trainings, results.ratio.value),
                statistics.fold_seed_test(trainings),
            ),
            bootstrap=statistics.crossed_bootstrap(complete),
            table_gain=metric.sign * metric.scale * float(in_table[0] - in_table[1]),
            doubt=doubt,
            obstacle=doubt or constant or _shortage(trainings),
        )


def values_of_cases(results: ConditionResults, metric: Metric) -> pd.DataFrame:
    """Return the shown foreground means: rows (fold, case), columns (trainer, seed)."""
    keys = ["fold", "case", "trainer", "seed"]
    means = case_means(results.cases, metric.name).set_index(keys)[metric.name]
    return (metric.scale * means.unstack(["trainer", "seed"])).round(_ROUNDING)


class Pairs(NamedTuple):
    """Runs of two trainers with the same folds and seeds.

    Attributes:
        folds, seeds: those which both have finished.
        differences: other - reference, for each fold an array [seeds, cases].
        cases_left_out: number of cases with a value from one of the two only, in any seed.
    """

    folds: list[int]
    seeds: list[int]
    differences: list[np.ndarray]
    cases_left_out: int


def pair_runs(
    results: ConditionResults, by_case: pd.DataFrame, entry: TrainerEntry, reference: TrainerEntry
) -> Pairs:
    """Return the runs of two trainers that are compared.

    Args:
        results: results of a condition.
        by_case: its :func:`values_of_cases`.
        entry, reference: the two trainers.
    """
    finished = [set(results.finished_runs(each.key)) for each in (entry, reference)]
    folds, seeds = results.largest_rectangle(set.intersection(*finished))
    of_folds = by_case[by_case.index.isin(folds, level="fold")]
    other, base = (
        of_folds.reindex(columns=pd.MultiIndex.from_product([[each.key], seeds])).to_numpy(float)
        for each in (entry, reference)
    )
    differences = (other - base).round(_ROUNDING)
    of_fold = of_folds.index.get_level_values("fold")
    left_out = int((np.isnan(other) != np.isnan(base)).any(axis=1).sum())
    return Pairs(folds, seeds, [differences[of_fold == fold].T for fold in folds], left_out)


def _find_flaws(compared: Compared) -> dict[str, str]:
    """Return the trainers with flawed runs, whose numbers are doubtful, and why."""
    flaws, results = {}, compared.results
    reasons = {flaw.run.entry: flaw.reason for flaw in results.flaws}
    for entry in results.study.trainers:
        trained = [compared.trainer(entry, fold) for fold in results.study.folds]
        if flawed := [reasons[key] for key in trained if key in reasons]:
            flaws[entry.key] = f"no verdict, as {flawed[0].format(entry.full_title)}"
    return flaws


def _find_constants(results: ConditionResults) -> dict[str, str]:
    """Return the trainers that learned nothing here, and why they have no verdict.

    Their numbers are not doubtful: that a trainer collapses on a data set is a result.
    """
    titles = {entry.key: entry.full_title for entry in results.study.trainers}
    dice = results.cases.dropna(subset=["dice"]).groupby("trainer", sort=False)["dice"]
    return {
        trainer: f"no verdict, as the Dice of {titles[trainer]} is {100 * low:.2f} % in all cases"
        for trainer, low, high, number in dice.agg(["min", "max", "size"]).itertuples()
        if low == high and number > 1
    }


def _left_out(metric: Metric, cases: int) -> str:
    if not cases:
        return ""
    return (
        f"no verdict, as {count(cases, 'case')} with a {metric.title} from one of the two only are "
        "left out, such as cases where only one predicts an absent structure"
    )


def _shortage(trainings: np.ndarray) -> str:
    folds, seeds = trainings.shape if trainings.size else (0, 0)
    if seeds < MIN_SEEDS or folds < MIN_FOLDS:
        given = f"{count(seeds, 'seed')} and {count(folds, 'fold')}"
        return f"no verdict with {given} ({MIN_SEEDS} and {MIN_FOLDS} are needed)"
    return "" if np.ptp(trainings) else "no verdict, as all runs differ by exactly the same"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


class Verdict(str, Enum):
    """Result of a comparison, of the trainer against the reference."""

    EQUIVALENT = "equivalent"
    BETTER = "better"
    WORSE = "worse"
    NON_INFERIOR = "non-inferior"
    UNDECIDED = "undecided"
    NONE = "no verdict"


class Claim(NamedTuple):
    """A possible result, and what must agree before it is claimed.

    Attributes:
        tests: each test, after Holm's correction.
        bootstrap: the interval of the bootstrap over cases and seeds.
        table: the means of the main table.
    """

    tests: bool
    bootstrap: bool
    table: bool


class Evidence(NamedTuple):
    """Everything that a verdict depends on.

    Attributes:
        is_possible: False with too few runs, and where something makes every number doubtful.
        is_gain: True if the mean difference is in favour of the trainer.
        difference: its mean is not that of the reference.
        equivalence: the two differ by less than the margin.
        non_inferiority: it is not worse by the margin or more.
    """

    is_possible: bool
    is_gain: bool
    difference: Claim
    equivalence: Claim
    non_inferiority: Claim


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict: the first row whose condition holds.

    ==================  ==================================================
    verdict             condition
    ==================  ==================================================
    no verdict          a verdict is not possible
    equivalent          tests, bootstrap and table show equivalence
    better or worse     tests, bootstrap and table show a difference
    non-inferior        tests, bootstrap and table show non-inferiority
    undecided           everything else; it is no evidence of equality
    ==================  ==================================================
    """
    if not evidence.is_possible:
        return Verdict.NONE
    if all(evidence.equivalence):
        return Verdict.EQUIVALENT
    if all(evidence.difference):
        return Verdict.BETTER if evidence.is_gain else Verdict.WORSE
    if all(evidence.non_inferiority):
        return Verdict.NON_INFERIOR
    return Verdict.UNDECIDED


class Corrected(NamedTuple):
    """P of the three claims after Holm's correction; NaN where no verdict is possible."""

    difference: float = math.nan
    equivalence: float = math.nan
    non_inferiority: float = math.nan


G = TypeVar("G", bound=Gain)


@dataclass(frozen=True)
class Judged(Generic[G]):
    """A comparison with its verdict.

    Attributes:
        numbers: its numbers.
        compared: number of comparisons in Holm's correction, all with the same reference.
        p_holm: p after the correction.
        evidence: what the verdict follows from.
        verdict: the verdict.
    """

    numbers: G
    compared: int
    p_holm: Corrected
    evidence: Evidence
    verdict: Verdict

    @property
    def is_non_inferior(self) -> bool:
        """True if the trainer is shown to be not worse by the margin or more."""
        is_shown = self.evidence.is_possible and all(self.evidence.non_inferiority)
        return is_shown or self.verdict in (Verdict.EQUIVALENT, Verdict.BETTER)

    @property
    def smallest_margin(self) -> float:
        """Smallest margin within which equal trainers could have been shown equivalent."""
        level = LEVEL / max(self.compared, 1)
        low, high = self.numbers.bootstrap
        reach = self.numbers.largest(lambda test: test.one_sided_reach(level))
        return float(np.fmax(reach, (high - low) / 2))


def judge_all(comparisons: Sequence[G]) -> list[Judged[G]]:
    """Return the verdicts of all comparisons with the same reference.

    Holm's correction counts those that can have a verdict, of all trainers, metrics and data sets.
    """
    possible = sum(not each.obstacle for each in comparisons)
    corrected = zip(
        *(
            holm([math.nan if each.obstacle else getattr(each, name) for each in comparisons])
            for name in ("p", "p_equivalent", "p_non_inferior")
        )
    )
    judged = []
    for numbers, p in zip(comparisons, map(Corrected._make, corrected)):
        evidence = _evidence(numbers, p)
        judged.append(Judged(numbers, possible, p, evidence, judge(evidence)))
    return judged


def _evidence(n: Gain, p: Corrected) -> Evidence:
    low, high = n.bootstrap
    excludes_zero = low > 0 if n.gain > 0 else high < 0
    is_within = -n.margin < low and high < n.margin
    return Evidence(
        is_possible=not n.obstacle,
        is_gain=n.gain > 0,
        difference=Claim(p.difference < LEVEL, excludes_zero, n.table_gain * n.gain >= 0),
        equivalence=Claim(p.equivalence < LEVEL, is_within, abs(n.table_gain) <= n.margin),
        non_inferiority=Claim(p.non_inferiority < LEVEL, low > -n.margin, n.table_gain > -n.margin),
    )
