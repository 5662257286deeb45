"""Comparison of two trainers: its numbers, and the verdict on what they show.

One table (:class:`Judged`) decides. Everything that a report says of a comparison, in words, figures and
CSV files, follows from its verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import Any, Generic, NamedTuple, TypeVar

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
        failures: cases that failed, which a mean of few cases hides.
        cases_marked: number of cases in which one of the two marks an absent structure, in any seed.
        without_marked: the comparison without these cases; None if there are none.
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
    failures: Failures
    cases_marked: int
    without_marked: Gain | None
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


FAILED = 0.1
"""Dice of a case below which it counts as failed, the mean over its classes in any run."""


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
    dice = results.cases.groupby(["trainer", "fold", "seed", "case"], sort=False)["dice"].mean()
    for entry in results.study.trainers:
        if entry == reference:
            continue
        pairs = pair_runs(results, metric, entry, reference)
        flawed, constant = (
            next((reasons[e.key] for e in (reference, entry) if e.key in reasons), "")
            for reasons in (flaws, constants)
        )
        doubt = flawed or _left_out(metric, pairs.cases_left_out)
        numbers = Numbers(
            condition=results.condition,
            metric=metric,
            entry=entry,
            reference=reference,
            folds=pairs.folds,
            seeds=pairs.seeds,
            cases_left_out=pairs.cases_left_out,
            cases_marked=pairs.cases_marked,
            without_marked=None,
            margin=results.study.margin[metric.name],
            ratio=results.ratio,
            table_gain=_table_gain(results.cases, metric, pairs, entry, reference),
            failures=_failures(dice, pairs, entry.key, reference.key),
            doubt=doubt,
            **_test(metric, pairs.differences, results.ratio, doubt or constant),
        )
        if pairs.cases_marked:
            others = [
                np.where(marked.any(axis=0), np.nan, of_fold)
                for of_fold, marked in zip(pairs.differences, pairs.marked)
            ]
            tested = _test(metric, others, results.ratio, doubt or constant)
            rest = results.cases.set_index(["fold", "case"]).drop(index=pairs.names_of_marked)
            gain = _table_gain(rest.reset_index(), metric, pairs, entry, reference)
            numbers = replace(numbers, without_marked=replace(numbers, table_gain=gain, **tested))
        yield numbers


def _test(
    metric: Metric, differences: Sequence[np.ndarray], ratio: SplitRatio, obstacle: str
) -> dict[str, Any]:
    """Return the gains of the cases, their tests, and why there is no verdict on them."""
    complete = statistics.complete_folds([metric.sign * of_fold for of_fold in differences])
    trainings = statistics.training_means(complete)
    of_cases = [np.nanmean(fold, axis=0).round(_ROUNDING) for fold in complete]
    return {
        "gains_of_cases": np.concatenate(of_cases or [np.array([])]),
        "tests": (
            statistics.corrected_t_test(trainings, ratio.value),
            statistics.fold_seed_test(trainings),
        ),
        "bootstrap": statistics.crossed_bootstrap(complete),
        "obstacle": obstacle or _shortage(trainings),
    }


def _table_gain(
    cases: pd.DataFrame, metric: Metric, pairs: Pairs, entry: TrainerEntry, reference: TrainerEntry
) -> float:
    """Return the gain by the main table's means, of the runs that are compared."""
    by_run = run_means(cases, metric.name).set_index(["trainer", "fold", "seed"])[metric.name]
    ours, theirs = (
        by_run.reindex(product([each.key], pairs.folds, pairs.seeds)).mean()
        for each in (entry, reference)
    )
    return metric.sign * metric.scale * float(ours - theirs)


def _failures(dice: pd.Series, pairs: Pairs, entry: str, reference: str) -> Failures:
    """Return the failed cases of two trainers in the runs that are compared."""
    chosen = dice[
        dice.index.isin(pairs.folds, level="fold") & dice.index.isin(pairs.seeds, level="seed")
    ]
    worst = chosen.groupby(["trainer", "fold", "case"]).min()
    failed = (worst < FAILED).groupby("trainer").sum()
    cases = len(worst.reset_index()[["fold", "case"]].drop_duplicates())
    mean = 100 * chosen[chosen.index.isin([entry], level="trainer")].mean()
    return Failures(int(failed.get(entry, 0)), int(failed.get(reference, 0)), cases, float(mean))


def class_values(cases: pd.DataFrame, metric: Metric) -> pd.DataFrame:
    """Return the shown values of a table of cases: rows (fold, case, class), columns (trainer, seed).

    The value of a class that is in neither mask, which has no Dice, is infinite; that of one without a
    value for another reason, such as a file that cannot be read, is NaN.
    """
    keys = ["fold", "case", "class", "trainer", "seed"]
    values = (metric.scale * cases[metric.name]).mask(cases["dice"].isna(), np.inf)
    table = cases[keys].assign(value=values).set_index(keys)["value"]
    return table.unstack(["trainer", "seed"]).round(_ROUNDING)


class Pairs(NamedTuple):
    """Runs of two trainers with the same folds and seeds.

    Attributes:
        folds, seeds: those which both have finished.
        differences: other - reference, for each fold an array [seeds, cases]. Where only one of the two
            marks a structure that is absent, the other one has the best value.
        marked: True for such a case, for each fold an array [seeds, cases].
        cases_left_out: number of cases with a value from one of the two only, in any seed.
        names_of_marked: fold and name of the cases in which one of the two marks an absent structure, in
            any seed.
    """

    folds: list[int]
    seeds: list[int]
    differences: list[np.ndarray]
    marked: list[np.ndarray]
    cases_left_out: int
    names_of_marked: pd.MultiIndex

    @property
    def cases_marked(self) -> int:
        """Number of cases in which one of the two marks an absent structure."""
        return len(self.names_of_marked)


def pair_runs(
    results: ConditionResults, metric: Metric, entry: TrainerEntry, reference: TrainerEntry
) -> Pairs:
    """Return the runs of two trainers that are compared, by a metric."""
    cases = results.cases
    values = class_values(cases[cases["trainer"].isin([entry.key, reference.key])], metric)
    finished = [set(results.finished_runs(each.key)) for each in (entry, reference)]
    folds, seeds = results.largest_rectangle(set.intersection(*finished))
    here = values[values.index.isin(folds, level="fold")]
    other, base = (
        here.reindex(columns=pd.MultiIndex.from_product([[each.key], seeds])).to_numpy(float)
        for each in (entry, reference)
    )
    absent = np.isinf(other), np.isinf(base)
    marked = (absent[0] & np.isfinite(base)) | (absent[1] & np.isfinite(other))
    best = metric.scale if metric.sign > 0 else 0.0
    other, base = (
        np.where(own & np.isfinite(others), best, np.where(own, np.nan, own_values))
        for own, own_values, others in ((absent[0], other, base), (absent[1], base, other))
    )
    known = pd.DataFrame({"left out": (np.isnan(other) != np.isnan(base)).any(axis=1)}, here.index)
    case = ["fold", "case"]
    by_case = pd.DataFrame(other - base, here.index).groupby(case, sort=True).mean().round(_ROUNDING)
    of_marked = pd.DataFrame(marked, here.index).groupby(case, sort=True).any()
    of_fold = by_case.index.get_level_values("fold")
    return Pairs(
        folds,
        seeds,
        [by_case.to_numpy()[of_fold == fold].T for fold in folds],
        [of_marked.to_numpy()[of_fold == fold].T for fold in folds],
        int(known.groupby(case)["left out"].any().sum()),
        of_marked.index[of_marked.any(axis=1)],
    )


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
        "left out, such as cases that cannot be read"
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


class Corrected(NamedTuple):
    """P of the three claims after Holm's correction; NaN where no verdict is possible."""

    difference: float = math.nan
    equivalence: float = math.nan
    non_inferiority: float = math.nan


G = TypeVar("G", bound=Gain)


@dataclass(frozen=True)
class Judged(Generic[G]):
    """A comparison with its verdict.

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

    Attributes:
        numbers: its numbers.
        compared: number of comparisons in Holm's correction, all with the same reference.
        p_holm: p after the correction.
        without_marked: the verdict without the cases of absent structures; None if there are none.
    """

    numbers: G
    compared: int
    p_holm: Corrected
    without_marked: Verdict | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict."""
        verdict = self.own_verdict
        is_kept = self.without_marked in (None, verdict) or verdict is Verdict.NONE
        return verdict if is_kept else Verdict.UNDECIDED

    @property
    def own_verdict(self) -> Verdict:
        """Verdict on all cases."""
        n = self.numbers
        if n.obstacle:
            return Verdict.NONE
        if self._is_equivalent:
            return Verdict.EQUIVALENT
        if self.p_holm.difference <= LEVEL and self.excludes_zero and n.table_gain * n.gain >= 0:
            return Verdict.BETTER if n.gain > 0 else Verdict.WORSE
        return Verdict.NON_INFERIOR if self._is_not_worse else Verdict.UNDECIDED

    @property
    def excludes_zero(self) -> bool:
        """True if the interval excludes 0."""
        low, high = self.numbers.interval
        return low > 0 or high < 0

    @property
    def is_within(self) -> bool:
        """True if the interval is within the margin."""
        low, high = self.numbers.interval
        return -self.numbers.margin < low and high < self.numbers.margin

    @property
    def _is_equivalent(self) -> bool:
        is_shown = self.is_within and self.p_holm.equivalence <= LEVEL / 2
        return is_shown and abs(self.numbers.table_gain) <= self.numbers.margin

    @property
    def _is_not_worse(self) -> bool:
        n = self.numbers
        is_shown = n.interval[0] > -n.margin and self.p_holm.non_inferiority <= LEVEL / 2
        return is_shown and n.table_gain > -n.margin

    @property
    def is_non_inferior(self) -> bool:
        """True if the trainer is shown to be not worse by the margin or more."""
        shown = (Verdict.EQUIVALENT, Verdict.BETTER, Verdict.NON_INFERIOR)
        return self.verdict in shown or (self.verdict is Verdict.WORSE and self._is_not_worse)

    @property
    def smallest_margin(self) -> float:
        """Smallest margin within which equal trainers could have been shown equivalent."""
        level = LEVEL / 2 / max(self.compared, 1)
        low, high = self.numbers.bootstrap
        reach = self.numbers.largest(lambda test: test.one_sided_reach(level))
        return float(np.fmax(reach, (high - low) / 2))


def judge_all(comparisons: Sequence[G]) -> list[Judged[G]]:
    """Return the verdicts of all comparisons of a scope with the same reference.

    Holm's correction counts those that can have a verdict, of all trainers, metrics and data sets.
    """
    judged = _correct(comparisons)
    without = _correct([each.without_marked or each for each in comparisons])
    return [
        replace(own, without_marked=alone.own_verdict) if own.numbers.without_marked else own
        for own, alone in zip(judged, without)
    ]


def _correct(comparisons: Sequence[Any]) -> list[Judged[Any]]:
    possible = sum(not each.obstacle for each in comparisons)
    corrected = zip(
        *(
            holm([math.nan if each.obstacle else getattr(each, name) for each in comparisons])
            for name in ("p", "p_equivalent", "p_non_inferior")
        )
    )
    return [Judged(n, possible, p) for n, p in zip(comparisons, map(Corrected._make, corrected))]
