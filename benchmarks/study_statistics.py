"""False claims and power of a study's verdicts, in simulated studies whose truth is known.

    OMP_NUM_THREADS=1 python -m benchmarks.study_statistics
    OMP_NUM_THREADS=1 python -m benchmarks.study_statistics --non-inferiority

The first table has the percentage of reports that claim a difference, without a true difference and
with one of the given points. The second has the percentage of those that show non-inferiority of a
trainer that is worse by exactly the margin.

Every simulated study goes the way of a real one from the cases' Dice to the verdict. A trainer's Dice is
85 + case + fold (both the same for all trainers) + the components of :class:`Scenario`, drawn for each
trainer.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from nnunet_cpr.reports.non_inferiority import non_inferiorities
from nnunet_cpr.reports.results import CASES, EPOCHS, MEASURED, Results
from nnunet_cpr.reports.verdicts import compare_all
from nnunet_cpr.studies.definition import DEFAULT_MARGIN, Study, TrainerEntry

CASES_PER_FOLD = 36
TRAINERS = ("nnUNetTrainerSGD", "nnUNetTrainerCPR")


@dataclass(frozen=True)
class Scenario:
    """Standard deviations of a trainer's Dice in points, drawn for each trainer.

    Attributes:
        title: name in the table.
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


SCENARIOS = (
    Scenario("trainings", case=0.2, training=0.35, fold=0, seed=0, residual=1),
    Scenario("cases", case=2.0, training=0.05, fold=0, seed=0, residual=1),
    Scenario("cases and trainings", case=1.0, training=0.35, fold=0, seed=0, residual=2),
    Scenario("cases, folds, seeds", case=0.7, training=0.25, fold=0.15, seed=0.15, residual=1),
    Scenario("seeds", case=0.3, training=0.1, fold=0, seed=0.35, residual=1),
    Scenario("folds", case=0.3, training=0.1, fold=0.35, seed=0, residual=1),
)


def simulate(
    scenario: Scenario,
    folds: int,
    seeds: int,
    effect: float,
    studies: int,
    trainers: int = 2,
) -> Iterator[Results]:
    """Yield simulated studies.

    Args:
        scenario: variance components.
        folds, seeds: size of each study.
        effect: true difference of all other trainers to the reference, in points.
        studies: number of studies.
        trainers: number of trainers; the first is the reference.
    """
    names = [TRAINERS[0], *(f"{TRAINERS[1]}_ws{1000 + i}" for i in range(1, trainers))]
    study = Study(
        "simulated",
        ("Dataset001_A",),
        tuple(map(TrainerEntry, names)),
        folds=tuple(range(folds)),
        seeds=tuple(range(seeds)),
    )
    shape = (trainers, folds, seeds, CASES_PER_FOLD)
    index = np.indices(shape).reshape(4, -1)
    frame = pd.DataFrame(
        {
            **{"dataset": "Dataset001_A", "configuration": "3d_fullres", "plans": "nnUNetPlans"},
            "trainer": np.array(names)[index[0]],
            "fold": index[1],
            "seed": index[2],
            "case": [f"case_{fold}_{case:02}" for fold, case in zip(index[1], index[3])],
            "class": "organ",
        }
    )
    rng = np.random.default_rng([folds, seeds, trainers, round(1000 * abs(effect))])

    def draw(deviation: float, *fixed: int) -> np.ndarray:
        """Return a component that is the same along the fixed axes."""
        size = [1 if axis in fixed else length for axis, length in enumerate(shape)]
        return rng.normal(0, deviation, size)

    for _ in range(studies):
        dice = (
            85
            + draw(8, 0, 2)
            + draw(1, 0, 2, 3)
            + draw(scenario.case, 2)
            + draw(scenario.training, 3)
            + draw(scenario.fold, 2, 3)
            + draw(scenario.seed, 1, 3)
            + draw(scenario.residual)
        )
        dice[1:] += effect
        # Not cut off at 100, so that the true difference stays the effect.
        cases = frame.assign(dice=dice.ravel() / 100)[CASES]
        yield Results(
            study,
            Path(),
            cases,
            pd.DataFrame(columns=EPOCHS),
            pd.DataFrame(columns=MEASURED),
            {},
            [],
            {"Dataset001_A": 1 / 4},
        )


def verdicts(results: Iterator[Results]) -> Counter[str]:
    """Count the reports by their strongest claim: a difference, equivalence, or none."""
    counts: Counter[str] = Counter()
    for each in results:
        found = {comparison.verdict for comparison in compare_all(each)}
        claim = "difference" if found & {"better", "worse"} else "equivalent"
        counts[claim if found != {"undecided"} else "undecided"] += 1
        counts["reports"] += 1
    return counts


def shown(results: Iterator[Results]) -> int:
    """Count the reports that show non-inferiority of some trainer."""
    return sum(any(found.is_shown for found in non_inferiorities(each)) for each in results)


def main() -> None:
    """Print a table of docs/concepts/study-statistics.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--power-studies", type=int, default=200)
    parser.add_argument("--folds", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--effects", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--scenarios", nargs="+", default=[each.title for each in SCENARIOS])
    parser.add_argument("--non-inferiority", action="store_true")
    options = parser.parse_args()
    effects = [] if options.non_inferiority else options.effects
    first = "non-inferior" if options.non_inferiority else "no difference"
    heading = ["variation", "folds", "seeds", first, *(f"{effect:g}" for effect in effects)]
    print(f"| {' | '.join(heading)} |\n|{' --- |' * len(heading)}")
    for scenario in SCENARIOS:
        if scenario.title not in options.scenarios:
            continue
        for folds in options.folds:
            for seeds in options.seeds:
                row = [scenario.title, str(folds), str(seeds)]
                if options.non_inferiority:
                    worse = simulate(scenario, folds, seeds, -DEFAULT_MARGIN, options.studies)
                    row.append(f"{100 * shown(worse) / options.studies:.1f}")
                for effect in [] if options.non_inferiority else (0.0, *effects):
                    studies = options.power_studies if effect else options.studies
                    counts = verdicts(simulate(scenario, folds, seeds, effect, studies))
                    row.append(f"{100 * counts['difference'] / studies:.1f}")
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
