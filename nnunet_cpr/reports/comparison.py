"""Comparisons of trainers on the runs that both have finished: statistics, verdict and sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pandas as pd

from nnunet_cpr.reports.metrics import Metric, p_text
from nnunet_cpr.reports.results import UNSEEDED, Setting, case_means, run_means
from nnunet_cpr.reports.selection import Compared
from nnunet_cpr.reports.statistics import (
    LEVEL,
    complete_folds,
    corrected_t_test,
    crossed_bootstrap,
    fold_seed_test,
    holm,
    training_means,
)
from nnunet_cpr.studies.definition import TrainerEntry

MIN_SEEDS = 3
"""Minimum number of seeds for a statement about methods instead of trainings."""
MIN_FOLDS = 2
"""Minimum number of folds for such a statement."""
PROBABLE = 0.95
"""Probability from which two methods are called equivalent."""
_ROUNDING = 12
"""Decimals of a value that count; smaller differences come from the order of additions."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of one trainer with another by one metric in one setting.

    Numbers are in the shown unit of the metric, and NaN where the runs are too few.

    Attributes:
        entry, reference: the two trainers, or the selected settings of two methods.
        folds, seeds: folds and seeds of the runs that are compared.
        cases, cases_better, cases_worse: number of cases, and of those in which the other is better.
        cases_left_out: number of cases with a value from one of the two only, in any seed.
        margin: largest difference that counts as equivalent.
        difference: other - reference: mean over the cases, then over the trainings.
        interval_low, interval_high: its 95 % interval, that of the corrected t-test.
        bootstrap_low, bootstrap_high: 95 % interval of the bootstrap over cases and seeds.
        table_difference: the same from the main table's means, which are over cases for each class
            and then over classes; it can have another sign where classes are missing in many cases.
        p_better, p_equivalent, p_worse: probability of a gain above, within and below the margin.
        p_corrected_t, p_fold_seed, p: p of both tests, and the larger one.
        p_holm: p after Holm's correction over all comparisons with the same reference.
        advantage_low: lower limit of the gain, one-sided.
        p_non_inferior, p_non_inferior_holm: p of a trainer that is worse by the margin or more.
        verdict: ``better``, ``worse``, ``equivalent`` or ``undecided``.
        is_non_inferior: True if the trainer is shown to be not worse by more than the margin.
        doubt: why there is no verdict whatever the numbers are; empty if nothing speaks against one.
    """

    setting: Setting
    metric: Metric
    entry: TrainerEntry
    reference: TrainerEntry
    folds: list[int]
    seeds: list[int]
    cases: int
    cases_better: int
    cases_worse: int
    cases_left_out: int
    margin: float
    difference: float
    interval_low: float
    interval_high: float
    bootstrap_low: float
    bootstrap_high: float
    table_difference: float
    p_better: float
    p_equivalent: float
    p_worse: float
    p_corrected_t: float
    p_fold_seed: float
    p: float
    advantage_low: float
    p_non_inferior: float
    doubt: str
    p_holm: float = math.nan
    p_non_inferior_holm: float = math.nan
    verdict: str = "undecided"
    is_non_inferior: bool = False

    @property
    def gain(self) -> float:
        """Mean difference, positive if the other trainer is better."""
        return self.metric.sign * self.difference

    @property
    def sentence(self) -> str:
        """The result in words."""
        names = f"{self.entry.full_title} instead of {self.reference.full_title}"
        metric = "" if self.metric.name == "dice" else f" by {self.metric.title}"
        if math.isnan(self.difference):
            return f"{names}{metric}: no run with values that both have finished."
        numbers = f"{self._amount(self.gain)}{metric}"
        if not math.isnan(self.interval_low):
            numbers += f", 95 % interval {self._interval()}"
        if self.verdict == "equivalent":
            return f"{names}: {numbers}; equivalent within {self.metric.amount(self.margin, 'g')}."
        if self.verdict == "undecided":
            return f"{names}: {numbers}; {self.doubt or self._undecided()}."
        return f"{names}: {numbers} ({_corrected(self.p_holm)})."

    def _amount(self, gain: float) -> str:
        way = "" if round(gain, 2) == 0 else " better" if gain > 0 else " worse"
        return f"{self.metric.amount(gain)}{way}"

    def _interval(self) -> str:
        low, high = sorted((self.metric.sign * self.interval_low, self.metric.sign * self.interval_high))
        if low > 0:
            return f"{low:.2f} to {high:.2f}"
        if high < 0:
            return f"{-high:.2f} to {-low:.2f}"
        return f"{abs(low):.2f} worse to {high:.2f} better"

    def _undecided(self) -> str:
        """Return why the numbers do not give a verdict."""
        is_significant = self.p_holm < LEVEL and _excludes_zero(self)
        if is_significant or (self.p_equivalent >= PROBABLE and _table_differs(self)):
            means = self._amount(self.metric.sign * self.table_difference)
            return f"no verdict, as the means of the main table, over classes, are {means}"
        if self.p_holm < LEVEL or self.p_equivalent >= PROBABLE:
            return "no verdict, as the bootstrap over cases and seeds does not confirm it"
        return f"not statistically significant ({_corrected(self.p_holm)})"


def compare_with(parts: Sequence[Compared], reference: TrainerEntry) -> list[Comparison]:
    """Return the comparisons of all other trainers with one of them, by setting and metric."""
    found = []
    for compared in parts:
        for metric in compared.results.metrics:
            values = _Values(compared, metric)
            others = [entry for entry in compared.entries if entry != reference]
            found += [_compare(values, entry, reference) for entry in others]
    p_holm, p_non_inferior = holm([c.p for c in found]), holm([c.p_non_inferior for c in found])
    corrected = [
        replace(c, p_holm=p, p_non_inferior_holm=p_one_sided)
        for c, p, p_one_sided in zip(found, p_holm, p_non_inferior)
    ]
    return [replace(c, verdict=_verdict(c), is_non_inferior=_is_non_inferior(c)) for c in corrected]


def _verdict(c: Comparison) -> str:
    is_within = -c.margin < c.bootstrap_low and c.bootstrap_high < c.margin
    if c.doubt:
        return "undecided"
    if c.p_equivalent >= PROBABLE and is_within and not _table_differs(c):
        return "equivalent"
    if c.p_holm < LEVEL and _excludes_zero(c) and c.table_difference * c.difference >= 0:
        return "better" if c.gain > 0 else "worse"
    return "undecided"


def _is_non_inferior(c: Comparison) -> bool:
    lowest = min(c.metric.sign * c.bootstrap_low, c.metric.sign * c.bootstrap_high)
    lowest = min(lowest, c.metric.sign * c.table_difference)
    return not c.doubt and c.p_non_inferior_holm < LEVEL and lowest > -c.margin


def _excludes_zero(c: Comparison) -> bool:
    return c.bootstrap_low > 0 or c.bootstrap_high < 0


def _table_differs(c: Comparison) -> bool:
    return abs(c.table_difference) > c.margin


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


def _compare(values: _Values, entry: TrainerEntry, reference: TrainerEntry) -> Comparison:
    results, metric, failures = values.results, values.metric, values.failures
    finished = [set(results.finished_runs(each.trainer)) for each in (entry, reference)]
    folds, seeds = results.largest_rectangle(set.intersection(*finished))
    by_case = values.by_case[values.by_case.index.get_level_values("fold").isin(folds)]
    other, base = (
        by_case.reindex(columns=pd.MultiIndex.from_product([[each.trainer], seeds])).to_numpy(float)
        for each in (entry, reference)
    )
    difference = np.round(other - base, _ROUNDING)
    of_fold = by_case.index.get_level_values("fold")
    complete = complete_folds([difference[of_fold == fold].T for fold in folds])
    runs = list(product(folds, seeds))
    in_table = [
        values.by_run.reindex([(each.trainer, *run) for run in runs]).mean()
        for each in (entry, reference)
    ]
    trainings = training_means(complete)
    margin = results.study.margin[metric.name]
    corrected = corrected_t_test(trainings, results.ratios[results.setting.dataset])
    crossed = fold_seed_test(trainings)
    gains = [replace(test, mean=metric.sign * test.mean) for test in (corrected, crossed)]
    p_worse = [gain.probability_below(-margin) for gain in gains]
    bootstrap_low, bootstrap_high = crossed_bootstrap(complete)
    of_cases = metric.sign * np.concatenate(
        [np.nanmean(fold, axis=0).round(_ROUNDING) for fold in complete] or [[]]
    )
    cases_left_out = int((np.isnan(other) != np.isnan(base)).any(axis=1).sum())
    return Comparison(
        setting=results.setting,
        metric=metric,
        entry=entry,
        reference=reference,
        folds=folds,
        seeds=seeds,
        cases=len(of_cases),
        cases_better=int((of_cases > 0).sum()),
        cases_worse=int((of_cases < 0).sum()),
        cases_left_out=cases_left_out,
        margin=margin,
        difference=corrected.mean,
        interval_low=corrected.interval[0],
        interval_high=corrected.interval[1],
        bootstrap_low=bootstrap_low,
        bootstrap_high=bootstrap_high,
        table_difference=float(in_table[0] - in_table[1]),
        p_better=gains[0].probability_above(margin),
        p_equivalent=gains[0].probability_above(-margin) - gains[0].probability_above(margin),
        p_worse=p_worse[0],
        p_corrected_t=corrected.p,
        p_fold_seed=crossed.p,
        p=float(np.fmax(corrected.p, crossed.p)),
        advantage_low=float(np.fmin(gains[0].lower_limit, gains[1].lower_limit)),
        p_non_inferior=float(np.fmax(p_worse[0], p_worse[1])),
        doubt=next((failures[e.trainer] for e in (reference, entry) if e.trainer in failures), "")
        or _doubt(metric, trainings, cases_left_out),
    )


def _find_failures(compared: Compared) -> dict[str, str]:
    """Return the trainers that learned nothing or were not regularized, and why they have no verdict."""
    failures, results = {}, compared.results
    unbounded = {run.entry for run in results.unbounded}
    for entry in compared.entries:
        if unbounded & {compared.trainer(entry, fold) for fold in results.study.folds}:
            failures[entry.trainer] = f"no verdict, as bounds of {entry.full_title} were never set"
    known = results.cases.dropna(subset=["dice"])
    dice = known.groupby(["trainer", "class"], sort=False)["dice"]
    for (trainer, name), low, high, count in dice.agg(["min", "max", "size"]).itertuples():
        if low == high and count > 1:
            title = next(e.full_title for e in compared.entries if e.trainer == trainer)
            same = f"the Dice of {title} is {100 * low:.2f} % in all cases of class {name}"
            failures.setdefault(trainer, f"no verdict, as {same}")
    return failures


def _doubt(metric: Metric, trainings: np.ndarray, cases_left_out: int) -> str:
    folds, seeds = trainings.shape if trainings.size else (0, 0)
    if cases_left_out:
        return (
            f"no verdict, as {_count(cases_left_out, 'case')} with a {metric.title} from one of the two "
            "only are left out, such as cases where only one predicts an absent structure"
        )
    if seeds < MIN_SEEDS or folds < MIN_FOLDS:
        return f"no verdict with {_count(seeds, 'seed')} and {_count(folds, 'fold')}"
    if not np.ptp(trainings):
        return "no verdict, as all runs differ by exactly the same"
    return ""


def _corrected(p: float) -> str:
    text = p_text(p)
    return f"p {'' if text.startswith('<') else '= '}{text} after Holm's correction"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


_KEY = ["dataset", "configuration", "plans", "metric", "unit", "reference", "trainer"]
_NUMBERS = [
    *("difference", "interval_low", "interval_high", "bootstrap_low", "bootstrap_high"),
    *("p_corrected_t", "p_fold_seed", "p", "p_holm", "margin", "p_better", "p_equivalent", "p_worse"),
    *("advantage_low", "cases", "cases_better", "cases_worse", "cases_left_out", "sentence"),
]


def comparison_table(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Return ``comparisons.csv``: one row for each comparison.

    ``difference`` is other - reference in ``unit``; ``p_better``, ``verdict`` and ``advantage_low`` are
    about the trainer, so a negative difference of HD95 is better.
    """
    rows = [
        {
            **c.setting._asdict(),
            "metric": c.metric.name,
            "unit": c.metric.difference_unit,
            "reference": c.reference.trainer,
            "trainer": c.entry.trainer,
            "verdict": c.verdict,
            "folds": " ".join(map(str, c.folds)),
            "seeds": " ".join(str(seed) for seed in c.seeds if seed != UNSEEDED),
            **{name: getattr(c, name) for name in _NUMBERS},
        }
        for c in comparisons
    ]
    return pd.DataFrame(rows, columns=[*_KEY, "verdict", "folds", "seeds", *_NUMBERS])


def non_inferiority_table(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Return ``non_inferiority.csv``: one row for each comparison with ``non_inferior_to``."""
    table = comparison_table(comparisons)
    table = table[[*_KEY, "seeds", "difference", "advantage_low", "margin"]].assign(
        seeds=[len(c.seeds) for c in comparisons],
        p=[c.p_non_inferior for c in comparisons],
        p_holm=[c.p_non_inferior_holm for c in comparisons],
        non_inferior=["shown" if c.is_non_inferior else "not shown" for c in comparisons],
    )
    return table.rename(columns={"reference": "non_inferior_to"})
