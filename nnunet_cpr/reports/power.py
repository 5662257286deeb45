"""Differences that a study of a given size can find, by simulated studies.

Adding an effect to all differences shifts their mean, the intervals of both t-tests and the bootstrap's,
and changes no width. So each simulated study has one smallest effect that its report would call better,
and the 80 % quantile of these is the effect that is found in 8 of 10 studies. The means of the main
table are left out; of several comparisons only one has an effect, so Holm's correction multiplies its p
by their number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nnunet_cpr.refusals import Refusal, counted
from nnunet_cpr.reports import statistics
from nnunet_cpr.reports.metrics import METRICS
from nnunet_cpr.reports.over_datasets import MIN_DATASETS
from nnunet_cpr.reports.pairing import pair_runs
from nnunet_cpr.reports.results import MIN_FOLDS, MIN_SEEDS, StudyResults
from nnunet_cpr.reports.statistics import LEVEL

CASES_PER_FOLD = 36
_STUDIES = 300
_STUDIES_OVER = 10_000


@dataclass(frozen=True)
class Deviations:
    """Standard deviations of a trainer's Dice in points, drawn for each trainer.

    Attributes:
        title: name in tables.
        case: between cases, the same in all trainings of the trainer.
        training: between trainings.
        fold: between folds, the same in all seeds.
        seed: between seeds, the same in all folds.
        residual: between cases of one training.
    """

    title: str
    case: float
    training: float
    fold: float
    seed: float
    residual: float


ASSUMED = (
    Deviations("cases and trainings", case=1.0, training=0.35, fold=0, seed=0, residual=2),
    Deviations("cases, folds, seeds", case=0.7, training=0.25, fold=0.15, seed=0.15, residual=1),
)
"""Two of the scenarios in which docs/concepts/study-statistics.md simulates reports."""

OF_DATASETS = 0.8
"""Deviation of a trainer between these ten data sets."""


class Size(NamedTuple):
    """Size of a study.

    Attributes:
        folds, seeds: their numbers.
        cases: validation cases of a fold.
        comparisons: number of comparisons on each data set.
        datasets: number of data sets.
        ratio: test cases of a fold per other case.
    """

    folds: int
    seeds: int
    cases: int = CASES_PER_FOLD
    comparisons: int = 1
    datasets: int = 1
    ratio: float = 1 / 4

    @property
    def family(self) -> int:
        """Number of comparisons in Holm's correction, on the data sets."""
        return self.comparisons * self.datasets


def possible_size(size: Size) -> Size:
    """Return the size with as many folds and seeds as a verdict needs, with one fold nnU-Net's five."""
    folds = size.folds if size.folds >= MIN_FOLDS else 5
    return size._replace(folds=folds, seeds=max(size.seeds, MIN_SEEDS))


@functools.cache
def smallest_effect(size: Size, deviations: Deviations) -> float:
    """Return the difference of two trainers, in points, that is found in 80 % of simulated studies.

    The random numbers are the same in every call.

    Args:
        size: size of the studies, :func:`possible_size` or more.
        deviations: variation of both trainers.

    Example:
        >>> smallest_effect(Size(5, 3), ASSUMED[0]) > smallest_effect(Size(5, 5), ASSUMED[0])
        True
    """
    rng = np.random.default_rng(0)
    return float(np.quantile([_found_from(size, deviations, rng) for _ in range(_STUDIES)], 0.8))


def smallest_effect_over(size: Size, deviations: Deviations) -> float:
    """Return the mean difference over data sets, in points, that is found in 80 % of studies.

    Args:
        size: size of the studies, of :data:`MIN_DATASETS` data sets or more.
        deviations: variation of both trainers; that between data sets is :data:`OF_DATASETS`.

    Example:
        >>> smallest_effect_over(Size(5, 1, datasets=3), ASSUMED[0]) > 1
        True
    """
    d, runs = deviations, size.folds * size.seeds
    of_folds = (d.fold**2 + d.case**2 / size.cases) / size.folds
    of_runs = (d.training**2 + d.residual**2 / size.cases) / runs
    variance = OF_DATASETS**2 + of_folds + d.seed**2 / size.seeds + of_runs
    deviation = math.sqrt(2 * variance)  # of the difference of two trainers
    gains = np.random.default_rng(0).normal(0, deviation, (_STUDIES_OVER, size.datasets))
    tests = [statistics.corrected_t_test(each, ratio=0) for each in gains]
    found = [test.one_sided_reach(LEVEL / 2 / size.comparisons) - test.mean for test in tests]
    return float(np.quantile(found, 0.8))


def answer(size: Size, deviations: Deviations) -> str:
    """Return what studies of a size find, in words.

    Example:
        >>> answer(Size(1, 2), ASSUMED[0])
        'with 1 fold and 2 seeds there is no verdict on a data set (2 and 3 are needed)'
    """
    given = f"with {counted(size.folds, 'fold')} and {counted(size.seeds, 'seed')}"
    if size.datasets >= MIN_DATASETS:
        over = to_digits(smallest_effect_over(size, deviations))
        sets = f"over {size.datasets} data sets {given}"
        return f"{sets}, 8 of 10 studies find a mean difference of {over} points"
    if size != possible_size(size):
        return f"{given} there is no verdict on a data set ({MIN_FOLDS} and {MIN_SEEDS} are needed)"
    found = to_digits(smallest_effect(size, deviations))
    return f"{given}, 8 of 10 studies find a difference of {found} points"


def describe(size: Size, deviations: Deviations) -> str:
    """Return a sentence with the smallest effect, and that of a larger study.

    Example:
        >>> describe(Size(5, 3), ASSUMED[0]).partition(" find")[0]
        'with 5 folds and 3 seeds, 8 of 10 studies'
    """
    said = answer(size, deviations)
    if size.datasets >= MIN_DATASETS:
        on_one = size._replace(datasets=1, comparisons=possible_size(size).family)
        return f"{said}; on one, {describe(on_one, deviations)}"
    if size != possible_size(size):
        return f"{said}; {describe(possible_size(size), deviations)}"
    larger = [size._replace(seeds=size.seeds + 2), size._replace(folds=size.folds + 1)]
    seeds, fold = (to_digits(smallest_effect(each, deviations)) for each in larger)
    text = f"{said}; 2 seeds more: {seeds}"
    return f"{text}, a third fold: {fold}" if size.folds == MIN_FOLDS else text


def to_digits(effect: float) -> str:
    """Return an effect with the two digits that simulations tell."""
    return str(float(f"{effect:.2g}"))


def _found_from(size: Size, deviations: Deviations, rng: np.random.Generator) -> float:
    """Return the smallest effect that one simulated study calls better."""
    shape = (size.folds, size.seeds, size.cases)

    def draw(deviation: float, *fixed: int) -> np.ndarray:
        """Return a component of the differences that is the same along the fixed axes."""
        lengths = [1 if axis in fixed else length for axis, length in enumerate(shape)]
        return rng.normal(0, math.sqrt(2) * deviation, lengths)  # of the difference of two trainers

    differences = (
        draw(deviations.case, 1)
        + draw(deviations.training, 2)
        + draw(deviations.fold, 1, 2)
        + draw(deviations.seed, 0, 2)
        + draw(deviations.residual)
    )
    trainings = statistics.training_means(list(differences))
    tests = (statistics.corrected_t_test(trainings, size.ratio), statistics.fold_seed_test(trainings))
    reach = max(test.one_sided_reach(LEVEL / 2 / size.family) for test in tests)
    low, _ = statistics.crossed_bootstrap(list(differences), resamples=999)
    return max(reach - float(trainings.mean()), -low)


def deviations_of(results: StudyResults) -> Deviations:
    """Return the deviations of finished runs, from differences to the reference in Dice.

    Of several trainers it is the median, as one may have failed.

    Args:
        results: results of a study.

    Raises:
        Refusal: no two trainers have finished two folds with two seeds.
    """
    variances = []
    for condition in results.by_condition():
        reference = condition.study.entry(condition.study.reference)
        for entry in condition.study.trainers:
            pairs = pair_runs(condition, METRICS["dice"], entry, reference)
            if entry != reference and min(len(pairs.folds), len(pairs.seeds)) >= 2:
                complete = [fold.dropna(axis=1).to_numpy() for fold in pairs.differences]
                if min(fold.shape[1] for fold in complete) >= 2:
                    variances.append(_components(complete))
    if not variances:
        raise Refusal(
            f"study {results.study.name}: expected two trainers with two folds, two seeds and two "
            "cases a fold that both have finished, got fewer",
            "choose another study for --like",
        )
    of_trainer = np.sqrt(np.median(variances, axis=0) / 2)
    return Deviations(f"study {results.study.name}", *map(float, of_trainer))


def _components(differences: Sequence[np.ndarray]) -> np.ndarray:
    """Return the variances between cases, trainings, folds and seeds, and the residual one.

    They are the moment estimates of the crossed random-effects analysis of variance; negative ones
    count as 0.

    Args:
        differences: for each fold an array [seeds, cases] without NaN.
    """
    folds, seeds = len(differences), len(differences[0])
    trainings = statistics.training_means(differences)
    cases = float(np.mean([fold.shape[1] for fold in differences]))
    rests = [_double_centred(fold) for fold in differences]
    freedom = (seeds - 1) * sum(rest.shape[1] - 1 for rest in rests)
    residual = sum(float((rest**2).sum()) for rest in rests) / freedom
    case = float(np.mean([fold.mean(axis=0).var(ddof=1) for fold in differences])) - residual / seeds
    of_trainings = float((_double_centred(trainings) ** 2).sum()) / ((folds - 1) * (seeds - 1))
    training = of_trainings - residual / cases
    seed = float(trainings.mean(axis=0).var(ddof=1)) - of_trainings / folds
    fold = float(trainings.mean(axis=1).var(ddof=1)) - of_trainings / seeds - max(case, 0) / cases
    return np.maximum([case, training, fold, seed, residual], 0)


def _double_centred(values: np.ndarray) -> np.ndarray:
    """Return values without the means of their rows and columns."""
    rows, columns = values.mean(axis=1, keepdims=True), values.mean(axis=0, keepdims=True)
    return np.asarray(values - rows - columns + values.mean())
