"""Results of a study and of each of its conditions, as tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress, product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from nnunet_cpr.reports.metrics import METRICS, Metric
from nnunet_cpr.studies.study import Run, Study


class Condition(NamedTuple):
    """Data set, configuration and plans: the trainers of one condition are compared with each other."""

    dataset: str
    configuration: str
    plans: str


class SplitRatio(NamedTuple):
    """Test cases of a fold per other case, the mean over the folds of a data set.

    Attributes:
        value: the ratio.
        source: the splits that the study has recorded, or an assumption.
    """

    value: float
    source: str


RECORDED, ASSUMED = "recorded splits", "assumed"
NOT_FOUND, FALSELY_FOUND = "not found", "falsely found"
"""Kinds of a class that only the truth or only the prediction has: its HD95 is the image's diagonal."""
CONDITION = list(Condition._fields)
RUN = [*CONDITION, "trainer", "fold", "seed"]
"""Columns that identify a run; ``seed`` is :data:`UNSEEDED` in a study without seeds."""
UNSEEDED = -1
INCOMPLETE = "{} has runs that were not validated on all cases of their fold"
"""Reason of a flaw for which the main table has a mark."""
MIN_SEEDS = 3
"""Minimum number of seeds for a verdict, which is about methods instead of trainings."""
MIN_FOLDS = 2
"""Minimum number of folds for a verdict."""


FAILED = 0.1
"""Dice of a case below which it counts as failed, the mean over its classes in any run."""


class Flaw(NamedTuple):
    """Flaw of a run that makes its result unfit for a verdict.

    Attributes:
        run: the run.
        warning: the flaw in words.
        reason: why its trainer, whose title replaces ``{}``, has no verdict.
    """

    run: Run
    warning: str
    reason: str


@dataclass(frozen=True)
class StudyResults:
    """Results of all runs of a study.

    Attributes:
        study: the study.
        folder: nnU-Net's ``nnUNet_results``.
        cases: one row for each class of each validation case of each finished run, with a column for
            each metric of :data:`~nnunet_cpr.reports.metrics.METRICS` that was read; NaN where the
            class is in neither the truth nor the prediction; ``empty`` is :data:`NOT_FOUND` or
            :data:`FALSELY_FOUND` where it is in one of the two, otherwise "". ``trainer`` is the
            trainer's name in the study, ``seed`` is :data:`UNSEEDED` in a study without seeds.
        epochs: one row for each epoch in the training logs, of unfinished runs too; ``pseudo_dice``
            is the mean over the classes, in [0, 1].
        flaws: what makes runs unfit for a verdict.
        notes: one line for each file or metric that is missing or unreadable.
        ratios: test cases of a fold per other case, by data set.
    """

    study: Study
    folder: Path
    cases: pd.DataFrame
    epochs: pd.DataFrame
    flaws: list[Flaw]
    notes: list[str]
    ratios: dict[str, SplitRatio]

    def by_condition(self) -> list[ConditionResults]:
        """Return the results of each data set, configuration and plans, in the study's order."""
        study = self.study
        is_said = [True, len(study.configurations) > 1, len(study.plans) > 1]
        return [
            ConditionResults(
                study=study,
                folder=self.folder,
                condition=Condition(*condition),
                title=", ".join(compress(condition, is_said)),
                cases=self.cases[(self.cases[CONDITION] == list(condition)).all(axis=1)],
                epochs=self.epochs[(self.epochs[CONDITION] == list(condition)).all(axis=1)],
                flaws=[
                    flaw
                    for flaw in self.flaws
                    if study.run(*condition, flaw.run.fold, flaw.run.entry, flaw.run.seed) == flaw.run
                ],
                ratio=self.ratios[condition[0]],
            )
            for condition in study.conditions
        ]


@dataclass(frozen=True)
class ConditionResults:
    """Results of one data set, configuration and plans.

    Attributes:
        study: the whole study.
        folder: nnU-Net's ``nnUNet_results``.
        condition: data set, configuration and plans.
        title: the data set's name, with configuration and plans if the study has several.
        cases, epochs, flaws: those of :class:`StudyResults` in this condition.
        ratio: test cases of a fold per other case.
    """

    study: Study
    folder: Path
    condition: Condition
    title: str
    cases: pd.DataFrame
    epochs: pd.DataFrame
    flaws: list[Flaw]
    ratio: SplitRatio

    @property
    def metrics(self) -> list[Metric]:
        """Metrics of the study that have been read or computed."""
        return [METRICS[name] for name in self.study.metrics if name in self.cases]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the study, or :data:`UNSEEDED`."""
        return list(self.study.seeds) or [UNSEEDED]

    @property
    def planned_runs(self) -> int:
        """Number of runs of each trainer."""
        return len(self.study.folds) * len(self.seeds)

    def run(self, fold: int, trainer: str, seed: int) -> Run:
        """Return a run."""
        return self.study.run(*self.condition, fold, trainer, None if seed == UNSEEDED else seed)

    def finished_runs(self, trainer: str) -> list[tuple[int, int]]:
        """Return fold and seed of the runs that have been validated, in the study's order."""
        mine = self.cases.loc[self.cases["trainer"] == trainer, ["fold", "seed"]].drop_duplicates()
        finished = set(mine.itertuples(index=False, name=None))
        return [run for run in product(self.study.folds, self.seeds) if run in finished]

    def incomplete_runs(self, trainer: str) -> int:
        """Return the number of validated runs that lack cases of their fold."""
        return sum(flaw.reason == INCOMPLETE and flaw.run.entry == trainer for flaw in self.flaws)

    def largest_rectangle(self, runs: Collection[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Return folds and seeds all of whose runs are given, as many runs as possible.

        Folds and seeds that are enough for a verdict come first, even if others have more runs.

        Args:
            runs: fold and seed of each run.
        """
        seeds_of = {f: frozenset(s for fold, s in runs if fold == f) for f in self.study.folds}
        # The seeds of the largest rectangle are those that some folds have in common.
        common: set[frozenset[int]] = set()
        for seeds in seeds_of.values():
            common |= {seeds, *(seeds & others for others in common)}
        rectangles = [
            (
                [fold for fold, seeds in seeds_of.items() if chosen <= seeds],
                [seed for seed in self.seeds if seed in chosen],
            )
            for chosen in common - {frozenset()}
        ]
        return min(rectangles, key=_preference, default=([], []))


def _preference(rectangle: tuple[list[int], list[int]]) -> tuple[Any, ...]:
    folds, seeds = rectangle
    has_verdict = len(folds) >= MIN_FOLDS and len(seeds) >= MIN_SEEDS
    return not has_verdict, -len(folds) * len(seeds), len(folds), folds


def run_means(cases: pd.DataFrame, metric: str = "dice") -> pd.DataFrame:
    """Return nnU-Net's foreground mean of each run: the mean of the classes' means.

    Classes without a value in the run are ignored.

    Returns:
        The columns of :data:`RUN`, and the metric in its unit in ``cases``.
    """
    return class_means(cases, metric).groupby(RUN, sort=False)[metric].mean().reset_index()


def class_means(cases: pd.DataFrame, metric: str = "dice") -> pd.DataFrame:
    """Return the mean of each class in each run, over the cases where it is defined."""
    return cases.groupby([*RUN, "class"], sort=False)[metric].mean().reset_index()


def failed_cases(cases: pd.DataFrame) -> pd.MultiIndex:
    """Return trainer, fold and case of the cases that failed in any of the trainer's runs."""
    dice = cases.groupby(["trainer", "fold", "case", "seed"], sort=False)["dice"].mean()
    failed = (dice < FAILED).groupby(["trainer", "fold", "case"], sort=False).any()
    return failed.index[failed]


def unique(values: Sequence[Any] | pd.Series) -> list[Any]:
    """Return the unique values in the order of their first appearance."""
    return list(dict.fromkeys(values))
