"""Runs of two trainers that both have finished, and the comparison made from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nnunet_cpr.refusals import counted
from nnunet_cpr.reports import statistics
from nnunet_cpr.reports.comparison import Comparison, Failures
from nnunet_cpr.reports.metrics import Metric
from nnunet_cpr.reports.results import (
    MIN_FOLDS,
    MIN_SEEDS,
    ConditionResults,
    SplitRatio,
    failed_cases,
    run_means,
)
from nnunet_cpr.reports.selection import Compared
from nnunet_cpr.studies.study import TrainerEntry

_ROUNDING = 12
"""Decimals of a value that count; smaller differences come from the order of additions."""


def compare_with(conditions: Sequence[Compared], reference: str) -> list[Comparison]:
    """Return the comparisons of all other trainers with that of a name, by condition and metric."""
    return [
        numbers
        for compared in conditions
        for metric in compared.results.metrics
        for numbers in compare_by(metric, compared, reference)
    ]


def compare_by(metric: Metric, compared: Compared, trainer: str) -> Iterator[Comparison]:
    """Yield the comparisons of one condition by one metric."""
    results, reference = compared.results, compared.results.study.entry(trainer)
    flaws, constants = _find_flaws(compared), _find_constants(results)
    for entry in results.study.trainers:
        if entry == reference:
            continue
        pairs = pair_runs(results, metric, entry, reference)
        flawed, constant = (
            next((reasons[e.key] for e in (reference, entry) if e.key in reasons), "")
            for reasons in (flaws, constants)
        )
        doubt = flawed or _left_out(metric, pairs.cases_left_out)
        numbers = Comparison(
            condition=results.condition,
            metric=metric,
            entry=entry,
            reference=reference,
            folds=pairs.folds,
            seeds=pairs.seeds,
            cases_left_out=pairs.cases_left_out,
            cases_marked=len(pairs.marked),
            without_marked=None,
            margin=results.study.margin[metric.name],
            ratio=results.ratio,
            table_gain=_table_gain(results.cases, metric, pairs, entry, reference),
            failures=_failures(results.cases, pairs, entry.key, reference.key),
            doubt=doubt,
            **_test(metric, pairs.differences, results.ratio, doubt or constant),
        )
        if len(pairs.marked):
            others = [
                of_fold.drop(columns=pairs.marked, errors="ignore") for of_fold in pairs.differences
            ]
            tested = _test(metric, others, results.ratio, doubt or constant)
            rest = results.cases.set_index(["fold", "case"]).drop(index=pairs.marked)
            gain = _table_gain(rest.reset_index(), metric, pairs, entry, reference)
            numbers = replace(numbers, without_marked=replace(numbers, table_gain=gain, **tested))
        yield numbers


def _test(
    metric: Metric, differences: Sequence[pd.DataFrame], ratio: SplitRatio, obstacle: str
) -> dict[str, Any]:
    """Return the gains of the cases, their tests, and why there is no verdict on them."""
    found = [metric.sign * of_fold.dropna(axis=1, how="all") for of_fold in differences]
    # A fold counts if every training has a value.
    folds = [fold for fold in found if fold.size and fold.notna().any(axis=1).all()]
    complete = [fold.to_numpy() for fold in folds]
    trainings = statistics.training_means(complete)
    of_cases = [fold.mean().round(_ROUNDING) for fold in folds]
    return {
        "gains_of_cases": pd.concat(of_cases or [pd.Series(dtype=float)]),
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


def _failures(cases: pd.DataFrame, pairs: Pairs, entry: str, reference: str) -> Failures:
    """Return the failed cases of two trainers in the runs that are compared."""
    chosen = cases[cases["fold"].isin(pairs.folds) & cases["seed"].isin(pairs.seeds)]
    failed = failed_cases(chosen).get_level_values("trainer")
    ours = chosen[chosen["trainer"] == entry].groupby(["fold", "case", "seed"])["dice"].mean()
    number = len(chosen[["fold", "case"]].drop_duplicates())
    return Failures(
        int((failed == entry).sum()), int((failed == reference).sum()), number, 100 * float(ours.mean())
    )


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
        differences: other - reference, for each fold a table with a row for each seed and a column
            (fold, case) for each case. Where only one of the two marks a structure that is absent, the
            other one has the best value.
        cases_left_out: number of cases with a value from one of the two only, in any seed.
        marked: fold and name of the cases in which one of the two marks an absent structure in any seed.
    """

    folds: list[int]
    seeds: list[int]
    differences: list[pd.DataFrame]
    cases_left_out: int
    marked: pd.MultiIndex


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
    of_marked = pd.DataFrame(marked, here.index).groupby(case, sort=True).any().any(axis=1)
    return Pairs(
        folds,
        seeds,
        [by_case.loc[[fold]].T for fold in folds],
        int(known.groupby(case)["left out"].any().sum()),
        of_marked.index[of_marked],
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
        f"no verdict, as {counted(cases, 'case')} with a {metric.title} from one of the two only are "
        "left out, such as cases that cannot be read"
    )


def _shortage(trainings: np.ndarray) -> str:
    folds, seeds = trainings.shape if trainings.size else (0, 0)
    if seeds < MIN_SEEDS or folds < MIN_FOLDS:
        given = f"{counted(seeds, 'seed')} and {counted(folds, 'fold')}"
        return f"no verdict with {given} ({MIN_SEEDS} and {MIN_FOLDS} are needed)"
    return "" if np.ptp(trainings) else "no verdict, as all runs differ by exactly the same"
