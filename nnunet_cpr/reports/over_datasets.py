"""Comparison of two trainers over several data sets, each of which counts once.

The gains of the data sets vary, and are measured with errors by their folds and seeds. A t-test over
them takes both into account, whatever the errors are, and needs no seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nnunet_cpr.reports.comparison import Comparison, Failures, judge
from nnunet_cpr.reports.statistics import corrected_t_test

MIN_DATASETS = 3
"""Minimum number of data sets for a comparison over data sets."""


def judge_scopes(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons over data sets and those of the conditions, with their verdicts.

    Each of the two is a scope, with Holm's correction of its own.

    Args:
        comparisons: comparisons of the conditions with one reference.
    """
    return [*judge(over_datasets(comparisons)), *judge(comparisons)]


def over_datasets(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return a comparison over data sets for each trainer, metric, configuration and plans.

    Args:
        comparisons: comparisons with one reference. There is none over fewer than three data sets whose
            numbers are not doubtful.
    """
    groups: dict[tuple[str, ...], list[Comparison]] = {}
    for each in comparisons:
        key = (each.metric.name, each.entry.key, *each.condition[1:])
        groups.setdefault(key, []).append(each)
    found = []
    for group in groups.values():
        counted = [each for each in group if not each.doubt and not np.isnan(each.gain)]
        if len(counted) >= MIN_DATASETS:
            found.append(_over(counted, [each for each in group if each not in counted]))
    return found


def _over(counted: list[Comparison], left_out: list[Comparison]) -> Comparison:
    over, marked = _mean(counted, left_out), sum(each.cases_marked for each in counted)
    if not marked:
        return over
    without = _mean([each.without_marked or each for each in counted], left_out)
    return replace(over, cases_marked=marked, without_marked=without)


def _mean(counted: list[Comparison], left_out: list[Comparison]) -> Comparison:
    gains = np.array([each.gain for each in counted])
    test = corrected_t_test(gains, ratio=0)  # Student's, as data sets share no cases
    first = counted[0]
    return Comparison(
        condition=first.condition._replace(dataset=""),
        metric=first.metric,
        entry=first.entry,
        reference=first.reference,
        margin=first.margin,
        tests=(test,),
        bootstrap=test.interval,  # a bootstrap over so few units would be too narrow
        table_gain=float(np.mean([each.table_gain for each in counted])),
        failures=_sum_failures([each.failures for each in counted]),
        cases_marked=0,
        without_marked=None,
        doubt="",
        obstacle=_obstacle(gains, left_out),
        datasets=counted,
        left_out=left_out,
    )


def _sum_failures(failures: Sequence[Failures]) -> Failures:
    numbers = np.array(failures)
    entry, reference, cases = map(int, numbers[:, :3].sum(axis=0))
    return Failures(entry, reference, cases, float(numbers[:, 3].mean()))


def _obstacle(gains: np.ndarray, left_out: Sequence[Comparison]) -> str:
    if left_out:
        reasons = [
            f"{n.condition.dataset}: {n.doubt.removeprefix('no verdict, as ') or 'no finished runs'}"
            for n in left_out
        ]
        return f"no verdict, as data sets are left out ({'; '.join(reasons)})"
    return "" if np.ptp(gains) else "no verdict, as all data sets differ by exactly the same"
