"""Comparison of two trainers over several data sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binomtest

from nnunet_cpr.reports.comparison import Failures, Gain, Judged, Numbers, judge_all
from nnunet_cpr.reports.results import Condition
from nnunet_cpr.reports.statistics import corrected_t_test

MIN_DATASETS = 3
"""Minimum number of data sets for a comparison over data sets."""


@dataclass(frozen=True, eq=False)
class OverDatasets(Gain):
    """Mean gain over data sets, each of which counts once.

    The gains of the data sets vary, and are measured with errors by their folds and seeds. A t-test over
    them takes both into account, whatever the errors are, and needs no seeds.

    Attributes:
        datasets: comparisons of the data sets.
        left_out: those without numbers, or with doubtful ones. There is no verdict without them: a
            trainer must not become better by the data sets on which it has no results.
    """

    datasets: list[Numbers]
    left_out: list[Numbers]

    @property
    def condition(self) -> Condition:
        """Condition of all data sets but for their names."""
        return self.datasets[0].condition._replace(dataset="")

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


class HypothesisFamily(NamedTuple):
    """Comparisons with one reference; those of a scope count in Holm's correction.

    Those over data sets are a scope of their own.

    Attributes:
        over: comparisons over data sets.
        comparisons: comparisons in each condition.
    """

    over: list[Judged[OverDatasets]]
    comparisons: list[Judged[Numbers]]


def judge_family(comparisons: Sequence[Numbers]) -> HypothesisFamily:
    """Return the verdicts of comparisons with one reference, and of those over data sets."""
    return HypothesisFamily(judge_all(over_datasets(comparisons)), judge_all(comparisons))


def over_datasets(comparisons: Sequence[Numbers]) -> list[OverDatasets]:
    """Return a comparison over data sets for each trainer, metric, configuration and plans.

    Args:
        comparisons: comparisons with one reference. There is none over fewer than three data sets whose
            numbers are not doubtful.
    """
    groups: dict[tuple[str, ...], list[Numbers]] = {}
    for each in comparisons:
        key = (each.metric.name, each.entry.key, *each.condition[1:])
        groups.setdefault(key, []).append(each)
    found = []
    for group in groups.values():
        counted = [each for each in group if not each.doubt and not np.isnan(each.gain)]
        if len(counted) >= MIN_DATASETS:
            found.append(_over(counted, [each for each in group if each not in counted]))
    return found


def _over(counted: list[Numbers], left_out: list[Numbers]) -> OverDatasets:
    over, marked = _mean(counted, left_out), sum(each.cases_marked for each in counted)
    if not marked:
        return over
    # A Numbers without its marked cases is one, too.
    without: list[Any] = [each.without_marked or each for each in counted]
    return replace(over, cases_marked=marked, without_marked=_mean(without, left_out))


def _mean(counted: list[Numbers], left_out: list[Numbers]) -> OverDatasets:
    gains = np.array([each.gain for each in counted])
    test = corrected_t_test(gains, ratio=0)  # Student's, as data sets share no cases
    first = counted[0]
    return OverDatasets(
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


def _obstacle(gains: np.ndarray, left_out: Sequence[Numbers]) -> str:
    if left_out:
        reasons = [
            f"{n.condition.dataset}: {n.doubt.removeprefix('no verdict, as ') or 'no finished runs'}"
            for n in left_out
        ]
        return f"no verdict, as data sets are left out ({'; '.join(reasons)})"
    return "" if np.ptp(gains) else "no verdict, as all data sets differ by exactly the same"
