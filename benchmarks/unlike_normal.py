"""False claims of reports whose results are unlike the normal distribution that their tests assume.

    OMP_NUM_THREADS=1 python -m benchmarks.unlike_normal

prints, for each way in which results differ from it, the percentage of simulated studies that claim
something false: a difference where the trainers are equal, and that a trainer is equivalent or
non-inferior which is worse by exactly the margin. Of several data sets those claims count that are over
all of them. :mod:`benchmarks.study_statistics` has normal results.

A trainer's Dice is drawn on the scale of the logit, where it is bounded by 0 and 1. It has a difficulty
of the case, which the trainers share, and deviations of the trainer in a case, of a training, of a fold,
of a seed, and of a case in one training.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from nnunet_cpr.reports.comparison import Comparison, Verdict
from nnunet_cpr.reports.over_datasets import judge_scopes
from nnunet_cpr.reports.pairing import compare_with
from nnunet_cpr.reports.reading import CASES, EPOCHS
from nnunet_cpr.reports.results import RECORDED, SplitRatio, StudyResults
from nnunet_cpr.reports.selection import choose_compared
from nnunet_cpr.studies.study import Study, TrainerEntry

MARGIN = 1.0


@dataclass(frozen=True)
class Unlike:
    """Results that are unlike a normal distribution.

    Attributes:
        title: name in the table.
        cases: cases of each fold.
        seeds, trainers, structures, datasets: their numbers.
        of_case, of_training, of_fold, of_seed, of_result: deviations of a trainer, in logits.
        tails: degrees of freedom of Student's distribution of ``of_case``; 0 for a normal one.
        skew: True for an exponential distribution of ``of_case``.
        failing: share of cases that a trainer fails in all trainings, with a Dice of 0.
        absent: share of absent structures.
        marked: share of these that a trainer marks.
        worse_by_failing: True if a worse trainer is worse only in that it fails more cases.
    """

    title: str
    cases: tuple[int, ...] = (20,) * 5
    seeds: int = 3
    trainers: int = 2
    structures: int = 1
    datasets: int = 1
    of_case: float = 0.05
    of_training: float = 0.02
    of_fold: float = 0.0
    of_seed: float = 0.0
    of_result: float = 0.1
    tails: int = 0
    skew: bool = False
    failing: float = 0.0
    absent: float = 0.0
    marked: float = 0.0
    worse_by_failing: bool = False


KINDS = (
    Unlike("skewed gains", of_case=0.3, skew=True),
    Unlike("heavy tails", of_case=0.3, tails=3),
    Unlike("failed cases", failing=0.02),
    Unlike("absent structures", structures=3, absent=0.3, marked=0.3),
    Unlike("unequal folds", cases=(4, 8, 16, 40, 112)),
    Unlike("four cases a fold", cases=(4,) * 5),
    Unlike("seeds", cases=(20,) * 3, of_seed=0.03, of_training=0.005),
    Unlike("folds", of_fold=0.03, of_training=0.005),
    Unlike("ten trainers", cases=(12,) * 3, trainers=10, of_seed=0.03, of_training=0.005),
    Unlike("three data sets", cases=(8,) * 3, datasets=3, of_seed=0.03, of_case=0.2, skew=True),
    Unlike("worse by failing", of_case=0.02, of_result=0.05, cases=(36,) * 5, worse_by_failing=True),
)


def simulate(kind: Unlike, number: int, loss: float = 0.0) -> StudyResults:
    """Return a simulated study.

    Args:
        kind: its variation.
        number: number of the study, from which its random numbers come.
        loss: points by which all other trainers are worse than the reference in the mean.
    """
    rng = np.random.default_rng([number, *kind.title.encode()])
    names = ["nnUNetTrainerSGD", *(f"nnUNetTrainerCPR_ws{1000 + i}" for i in range(1, kind.trainers))]
    study = Study(
        "simulated",
        tuple(f"Dataset{i:03}_A" for i in range(1, kind.datasets + 1)),
        tuple(map(TrainerEntry, names)),
        folds=tuple(range(len(kind.cases))),
        seeds=tuple(range(kind.seeds)),
    ).changed(margin=MARGIN)
    parts = []
    for dataset in study.datasets:
        of_seeds = rng.normal(0, 1, (kind.trainers, kind.seeds, 1, 1))  # the same in all folds
        for fold, cases in enumerate(kind.cases):
            values = _draw(kind, rng, cases, of_seeds, loss)
            trainer, seed, case, structure = np.indices(values.shape).reshape(4, -1)
            part = pd.DataFrame(
                {"trainer": np.array(names)[trainer], "seed": seed, "dice": values.ravel()}
            )
            part["case"] = [f"case_{fold}_{each:03}" for each in case]
            part["class"] = [f"structure {each}" for each in structure]
            parts.append(part.assign(dataset=dataset, fold=fold))
    place = {"configuration": "3d_fullres", "plans": "nnUNetPlans", "empty": ""}
    frame = pd.concat(parts, ignore_index=True).assign(**place).reindex(columns=CASES)
    ratio = float(np.mean([n / (sum(kind.cases) - n) for n in kind.cases]))
    ratios = dict.fromkeys(study.datasets, SplitRatio(ratio, RECORDED))
    return StudyResults(study, Path(), frame, pd.DataFrame(columns=EPOCHS), [], [], ratios)


def _draw(
    kind: Unlike, rng: np.random.Generator, cases: int, of_seeds: np.ndarray, loss: float
) -> np.ndarray:
    """Return the Dice of a fold, [trainers, seeds, cases, structures], NaN for an absent structure."""
    shape = (kind.trainers, kind.seeds, cases, kind.structures)
    of_case = (kind.trainers, 1, cases, kind.structures)
    if kind.skew:
        interaction = rng.exponential(1, of_case) - 1
    elif kind.tails:
        interaction = rng.standard_t(kind.tails, of_case) / np.sqrt(kind.tails / (kind.tails - 2))
    else:
        interaction = rng.normal(0, 1, of_case)
    logit = (
        rng.normal(2, 0.5, (1, 1, *shape[2:]))
        + kind.of_case * interaction
        + kind.of_training * rng.normal(0, 1, (*shape[:2], 1, 1))
        + kind.of_fold * rng.normal(0, 1, (kind.trainers, 1, 1, 1))
        + kind.of_seed * of_seeds
        + kind.of_result * rng.normal(0, 1, shape)
    )
    dice = 1 / (1 + np.exp(-logit))
    failing = np.full(kind.trainers, kind.failing)
    if kind.worse_by_failing:
        failing[1:] += loss / 100 / dice.mean()
    else:
        dice[1:] -= loss / 100
    fails = rng.random((kind.trainers, cases)) < failing[:, None]
    dice = np.where(fails[:, None, :, None], 0, dice)
    absent = rng.random(shape[2:]) < kind.absent
    marks = rng.random(shape) < kind.marked
    return np.where(absent, np.where(marks, 0.0, np.nan), dice)


def _of_scope(results: StudyResults) -> list[Comparison]:
    """Return the comparisons over data sets, if there are any, else those on the data set."""
    compared = [choose_compared(each) for each in results.by_condition()]
    comparisons = judge_scopes(compare_with(compared, results.study.reference))
    return [each for each in comparisons if each.datasets] or comparisons


def false_claims(kind: Unlike, studies: int) -> Counter[str]:
    """Count the studies that claim a difference of equal trainers, and hide a loss of the margin."""
    counts: Counter[str] = Counter()
    for number in range(studies):
        equal = _of_scope(simulate(kind, number))
        counts["difference"] += any(each.verdict in (Verdict.BETTER, Verdict.WORSE) for each in equal)
        worse = _of_scope(simulate(kind, number, loss=MARGIN))
        counts["hidden loss"] += any(each.is_non_inferior for each in worse)
    return counts


def main() -> None:
    """Print the table of docs/concepts/study-statistics.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=400)
    studies = parser.parse_args().studies
    print("| results | equal, called different | worse, called equivalent or not worse |")
    print("| --- | --- | --- |")
    for kind in KINDS:
        counts = false_claims(kind, studies)
        shown = [f"{100 * counts[claim] / studies:.1f}" for claim in ("difference", "hidden loss")]
        print(f"| {kind.title} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
