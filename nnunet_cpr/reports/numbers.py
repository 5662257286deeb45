"""Numbers of a comparison of two trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from nnunet_cpr.reports.metrics import Metric
from nnunet_cpr.reports.results import (
    MIN_FOLDS,
    MIN_SEEDS,
    Results,
    Setting,
    SplitRatio,
    case_means,
    run_means,
)
from nnunet_cpr.reports.selection import Compared
from nnunet_cpr.reports.statistics import (
    MeanDifference,
    complete_folds,
    corrected_t_test,
    crossed_bootstrap,
    fold_seed_test,
    training_means,
)
from nnunet_cpr.studies.definition import TrainerEntry

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
    def p(self) -> float:
        """Two-sided p of no difference, the largest of the tests."""
        return self._larger(lambda test: test.p)

    @property
    def p_non_inferior(self) -> float:
        """One-sided p of a trainer that is worse by the margin or more, the largest of the tests."""
        return self._larger(lambda test: test.probability_below(-self.margin))

    @property
    def p_equivalent(self) -> float:
        """P of trainers that differ by the margin or more: two one-sided tests (TOST)."""
        p_non_superior = self._larger(lambda test: test.probability_above(self.margin))
        return float(np.fmax(self.p_non_inferior, p_non_superior))

    @property
    def advantage_low(self) -> float:
        """Lower limit of the gain, one-sided, the lowest of the tests."""
        return -self._larger(lambda test: -test.lower_limit)

    def smallest_margin(self, level: float) -> float:
        """Return the smallest margin within which equal trainers could have been shown equivalent.

        Args:
            level: level of the one-sided tests.
        """
        low, high = self.bootstrap
        return float(np.fmax(self._larger(lambda test: test.one_sided_reach(level)), (high - low) / 2))

    def _larger(self, of_test: Callable[[MeanDifference], float]) -> float:
        """Return the largest number of the tests; NaN, of too few runs, does not count."""
        return float(np.fmax.reduce([of_test(test) for test in self.tests]))


@dataclass(frozen=True, eq=False)
class Numbers(Gain):
    """Comparison of two trainers in one setting, on the runs that both have finished.

    The tests are the corrected repeated k-fold t-test and that with folds and seeds as random factors.

    Attributes:
        setting: data set, configuration and plans.
        folds, seeds: folds and seeds of the runs that are compared.
        gains_of_cases: mean gain of each case over the seeds.
        cases_left_out: number of cases with a value from one of the two only, in any seed.
        ratio: test cases of a fold per other case.
    """

    setting: Setting
    folds: list[int]
    seeds: list[int]
    gains_of_cases: np.ndarray
    cases_left_out: int
    ratio: SplitRatio

    @property
    def cases(self) -> int:
        """Number of cases."""
        return len(self.gains_of_cases)


def compare_with(parts: Sequence[Compared], reference: TrainerEntry) -> list[Numbers]:
    """Return the comparisons of all other trainers with one of them, by setting and metric."""
    found = []
    for compared in parts:
        for metric in compared.results.metrics:
            values = _Values(compared, metric)
            others = [entry for entry in compared.entries if entry != reference]
            found += [_compare(values, entry, reference) for entry in others]
    return found


class _Values:
    """Foreground means of one metric in one setting, in its shown unit.

    Attributes:
        by_case: rows (fold, case), columns (trainer, seed).
        by_run: the means of the main table, by (trainer, fold, seed).
        failures: why trainers have no verdict, by their names.
    """

    def __init__(self, compared: Compared, metric: Metric) -> None:
        self.results, self.metric = compared.results, metric
        cases, keys = self.results.cases, ["fold", "case", "trainer", "seed"]
        by_case = case_means(cases, metric.name).set_index(keys)[metric.name]
        self.by_case = (metric.scale * by_case.unstack(["trainer", "seed"])).round(_ROUNDING)
        by_run = run_means(cases, metric.name).set_index(["trainer", "fold", "seed"])
        self.by_run = metric.scale * by_run[metric.name]
        self.failures = _find_failures(compared)

    def of(self, entry: TrainerEntry, folds: list[int], seeds: list[int]) -> np.ndarray:
        """Return the values of a trainer, [cases of the folds, seeds]."""
        rows = self.by_case[self.by_case.index.get_level_values("fold").isin(folds)]
        columns = pd.MultiIndex.from_product([[entry.trainer], seeds])
        return np.asarray(rows.reindex(columns=columns).to_numpy(float))

    def folds_of_cases(self, folds: list[int]) -> np.ndarray:
        """Return the fold of each row of :meth:`of`."""
        of_fold = self.by_case.index.get_level_values("fold")
        return np.asarray(of_fold[of_fold.isin(folds)])

    def in_table(self, entry: TrainerEntry, folds: list[int], seeds: list[int]) -> float:
        """Return the mean of the main table over these runs."""
        runs = [(entry.trainer, *run) for run in product(folds, seeds)]
        return float(self.by_run.reindex(runs).mean())


def _compare(values: _Values, entry: TrainerEntry, reference: TrainerEntry) -> Numbers:
    results, metric = values.results, values.metric
    folds, seeds = common_runs(results, entry, reference)
    other, base = (values.of(each, folds, seeds) for each in (entry, reference))
    gains = np.round(metric.sign * (other - base), _ROUNDING)
    of_fold = values.folds_of_cases(folds)
    complete = complete_folds([gains[of_fold == fold].T for fold in folds])
    trainings = training_means(complete)
    of_cases = [np.nanmean(fold, axis=0).round(_ROUNDING) for fold in complete]
    left_out = int((np.isnan(other) != np.isnan(base)).any(axis=1).sum())
    ratio = results.ratios[results.setting.dataset]
    in_table = [values.in_table(each, folds, seeds) for each in (entry, reference)]
    failures = [values.failures[e.trainer] for e in (reference, entry) if e.trainer in values.failures]
    doubt = failures[0] if failures else _left_out(metric, left_out)
    return Numbers(
        setting=results.setting,
        metric=metric,
        entry=entry,
        reference=reference,
        folds=folds,
        seeds=seeds,
        gains_of_cases=np.concatenate(of_cases or [np.array([])]),
        cases_left_out=left_out,
        margin=results.study.margin[metric.name],
        ratio=ratio,
        tests=(corrected_t_test(trainings, ratio.value), fold_seed_test(trainings)),
        bootstrap=crossed_bootstrap(complete),
        table_gain=metric.sign * (in_table[0] - in_table[1]),
        doubt=doubt,
        obstacle=doubt or _shortage(trainings),
    )


def common_runs(
    results: Results, entry: TrainerEntry, reference: TrainerEntry
) -> tuple[list[int], list[int]]:
    """Return the folds and seeds of a part that are compared: those which both have finished."""
    finished = [set(results.finished_runs(each.trainer)) for each in (entry, reference)]
    return results.largest_rectangle(set.intersection(*finished))


def _find_failures(compared: Compared) -> dict[str, str]:
    """Return the trainers that learned nothing or were not regularized, and why they have no verdict."""
    failures, results = {}, compared.results
    titles = {entry.trainer: entry.full_title for entry in compared.entries}
    unbounded = {run.entry for run in results.unbounded}
    for entry in compared.entries:
        if unbounded & {compared.trainer(entry, fold) for fold in results.study.folds}:
            failures[entry.trainer] = f"no verdict, as bounds of {entry.full_title} were never set"
    dice = results.cases.dropna(subset=["dice"]).groupby("trainer", sort=False)["dice"]
    for trainer, low, high, count in dice.agg(["min", "max", "size"]).itertuples():
        if low == high and count > 1:
            same = f"the Dice of {titles[trainer]} is {100 * low:.2f} % in all cases"
            failures.setdefault(trainer, f"no verdict, as {same}")
    return failures


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
        return f"no verdict with {count(seeds, 'seed')} and {count(folds, 'fold')}"
    return "" if np.ptp(trainings) else "no verdict, as all runs differ by exactly the same"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
