"""Verdicts: what the numbers of comparisons show.

One table (:func:`judge`) decides. Everything that a report says of a comparison, in words, figures and
CSV files, follows from its verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from nnunet_cpr.reports.numbers import Gain
from nnunet_cpr.reports.statistics import LEVEL, holm


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
