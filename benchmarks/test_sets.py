"""False claims and power of the test for test sets, whose cases every run of a study predicts.

    OMP_NUM_THREADS=1 python -m benchmarks.test_sets

prints the percentage of simulated studies that claim a difference of two trainers which are equal, and
of those that find one of :data:`GAIN` points, by both tests of a claim,
:func:`~nnunet_cpr.reports.statistics.crossed_test` and
:func:`~nnunet_cpr.reports.statistics.seed_test`. The claim is about trainers with these training
cases, of which each fold has its own, and new test cases. So the deviations of the folds are the same in
all studies in which they matter: they sum to 0.

A difference is the sum of the gain and the deviations of its fold, of its run, of its case, and of its
case in its run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from nnunet_cpr.reports.statistics import LEVEL, crossed_test, seed_test

GAIN = 0.5
"""True difference in points, for the power."""
SIZES = ((1, 2), (1, 3), (3, 2), (3, 3), (5, 2), (5, 3))
"""Folds and seeds."""
CASES = (20, 40, 60)


@dataclass(frozen=True)
class Kind:
    """Variation of the differences of a case between two trainers, in points of Dice.

    Attributes:
        title: name in the table.
        of_fold, of_run, of_case, of_result: standard deviations.
        tails: degrees of freedom of Student's distribution of cases and results; 0 for a normal one.
        failing: share of cases that the better trainer fails, each with a loss of :data:`FAILURE`
            points, for which all its other cases make up exactly.
    """

    title: str
    of_fold: float
    of_run: float
    of_case: float
    of_result: float
    tails: int = 0
    failing: float = 0.0


FAILURE = 60.0
KINDS = (
    Kind("cases and runs", 0.3, 0.3, 1.0, 1.0),
    Kind("runs", 0.0, 0.5, 0.2, 0.5),
    Kind("cases and folds", 0.5, 0.1, 3.0, 2.0),
    Kind("heavy tails", 0.3, 0.3, 1.0, 1.0, tails=3),
)
"""Kinds for which false claims must be rare."""
RARE_FAILURES = Kind("rare failures", 0.3, 0.3, 1.0, 1.0, failing=0.01)
"""Kind that deceives every test of means: few test sets have a failure at all."""


def draw(
    kind: Kind, rng: np.random.Generator, folds: int, seeds: int, cases: int, gain: float = 0.0
) -> np.ndarray:
    """Return the differences of a study, [folds, seeds, cases], with a mean of ``gain`` points."""
    of_folds = rng.normal(0, kind.of_fold, (folds, 1, 1))
    differences = (
        gain
        + (of_folds - of_folds.mean())
        + rng.normal(0, kind.of_run, (folds, seeds, 1))
        + kind.of_case * _standard(kind, rng, (1, 1, cases))
        + kind.of_result * _standard(kind, rng, (folds, seeds, cases))
    )
    fails = rng.random(cases) < kind.failing
    return differences + FAILURE * (kind.failing - fails)


def _standard(kind: Kind, rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Return values with mean 0 and variance 1."""
    if kind.tails:
        return rng.standard_t(kind.tails, shape) / np.sqrt(kind.tails / (kind.tails - 2))
    return rng.normal(0, 1, shape)


def claims(kind: Kind, folds: int, seeds: int, cases: int, studies: int, gain: float = 0.0) -> float:
    """Return the percentage of simulated studies that claim a difference."""
    rng = np.random.default_rng([folds, seeds, cases, *kind.title.encode()])
    studied = (draw(kind, rng, folds, seeds, cases, gain) for _ in range(studies))
    p = [max(crossed_test(each).p, seed_test(each.mean(axis=2)).p) for each in studied]
    return 100 * float(np.mean(np.array(p) <= LEVEL))


def main() -> None:
    """Print a row for each kind of differences and size of a study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=20_000)
    parser.add_argument("--power-studies", type=int, default=4000)
    options = parser.parse_args()
    heading = ["differences vary between", "folds x seeds", *(f"{n} cases" for n in CASES), "power"]
    print(f"| {' | '.join(heading)} |\n|{' --- |' * len(heading)}")
    for kind, (folds, seeds) in product((*KINDS, RARE_FAILURES), SIZES):
        row = [claims(kind, folds, seeds, cases, options.studies) for cases in CASES]
        row.append(claims(kind, folds, seeds, CASES[-1], options.power_studies, GAIN))
        numbers = " | ".join(f"{number:.1f}" for number in row)
        print(f"| {kind.title} | {folds} x {seeds} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
