"""Ask how often a report's verdict is wrong, for its readers: ``python -m benchmarks.study_statistics``.

    OMP_NUM_THREADS=1 python -m benchmarks.study_statistics
    OMP_NUM_THREADS=1 python -m benchmarks.study_statistics --non-inferiority
    OMP_NUM_THREADS=1 python -m benchmarks.study_statistics --parts
    OMP_NUM_THREADS=1 python -m benchmarks.study_statistics --claims --margin 1 --comparisons 1 10
    OMP_NUM_THREADS=1 python -m benchmarks.study_statistics --datasets 3 5 10

The first table has the percentage of reports that claim a difference, without a true difference and
with one of the given points. The second has the percentage of those that show non-inferiority of a
trainer that is worse by exactly the margin. The third has the percentage without a true difference, and
with one of 1.2 points, if the claim needed some of its three tests only. The fourth has the percentage
of reports with a false claim: of a difference, of equivalence or non-inferiority, and of either, where
the trainers are equal, better by exactly the margin, or worse by it; and the number of contradictions.
The fifth has the percentage that claim a difference over data sets, whose differences vary by
:data:`OVER_DATASETS` points around 0 and around the given points.

Every simulated study goes the way of a real one from the cases' Dice to the verdict. A trainer's Dice is
85 + case + fold (both the same for all trainers) + the components of
:class:`~nnunet_cpr.reports.power.Deviations`, drawn for each trainer.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from nnunet_cpr.reports.comparison import Comparison, Verdict, judge
from nnunet_cpr.reports.comparison_tables import comparison_table
from nnunet_cpr.reports.over_datasets import judge_scopes
from nnunet_cpr.reports.pairing import compare_with
from nnunet_cpr.reports.power import ASSUMED, CASES_PER_FOLD, Deviations
from nnunet_cpr.reports.reading import CASES, EPOCHS
from nnunet_cpr.reports.results import RECORDED, SplitRatio, StudyResults
from nnunet_cpr.reports.selection import choose_compared
from nnunet_cpr.reports.statistics import LEVEL
from nnunet_cpr.reports.words import sentence
from nnunet_cpr.studies.study import DEFAULT_MARGIN, Study, TrainerEntry

TRAINERS = ("nnUNetTrainerSGD", "nnUNetTrainerCPR")
SCENARIOS = (
    Deviations("trainings", case=0.2, training=0.35, fold=0, seed=0, residual=1),
    Deviations("cases", case=2.0, training=0.05, fold=0, seed=0, residual=1),
    *ASSUMED,
    Deviations("seeds", case=0.3, training=0.1, fold=0, seed=0.35, residual=1),
    Deviations("folds", case=0.3, training=0.1, fold=0.35, seed=0, residual=1),
)


def simulate(
    scenario: Deviations,
    folds: int,
    seeds: int,
    effect: float,
    studies: int,
    trainers: int = 2,
    margin: float = DEFAULT_MARGIN,
    stream: int = 0,
) -> Iterator[StudyResults]:
    """Yield simulated studies.

    Args:
        scenario: variance components.
        folds, seeds: size of each study.
        effect: true difference of all other trainers to the reference, in points.
        studies: number of studies.
        trainers: number of trainers; the first is the reference.
        margin: margin of the study in points.
        stream: another one gives other random numbers.
    """
    names = [TRAINERS[0], *(f"{TRAINERS[1]}_ws{1000 + i}" for i in range(1, trainers))]
    study = Study(
        "simulated",
        ("Dataset001_A",),
        tuple(map(TrainerEntry, names)),
        folds=tuple(range(folds)),
        seeds=tuple(range(seeds)),
    ).changed(margin=margin)
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
    keys = [folds, seeds, trainers, round(1000 * abs(effect))]
    rng = np.random.default_rng([*keys, stream] if stream else keys)

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
        cases = frame.assign(dice=dice.ravel() / 100, empty="").reindex(columns=CASES)
        yield StudyResults(
            study,
            Path(),
            cases,
            pd.DataFrame(columns=EPOCHS),
            [],
            [],
            {"Dataset001_A": SplitRatio(1 / 4, RECORDED)},
        )


def compare(results: StudyResults) -> list[Comparison]:
    """Return the comparisons of a report."""
    compared = choose_compared(*results.by_condition())
    return judge(compare_with([compared], results.study.reference))


def verdicts(results: Iterator[StudyResults]) -> Counter[str]:
    """Count the reports by their strongest claim: a difference, equivalence, or none."""
    counts: Counter[str] = Counter()
    for each in results:
        found = {comparison.verdict for comparison in compare(each)}
        claim = "difference" if found & {"better", "worse"} else "equivalent"
        counts[claim if found & {"better", "worse", "equivalent"} else "undecided"] += 1
        counts["reports"] += 1
    return counts


def false_claims(results: Iterator[StudyResults], effect: float) -> Counter[str]:
    """Count the reports with a false claim of each kind, and those that contradict themselves.

    Args:
        results: simulated studies.
        effect: true difference of all trainers to the reference: 0, the margin, or minus the margin.
    """
    false_verdicts = {"worse"} if effect > 0 else {"better"} if effect < 0 else {"better", "worse"}
    counts: Counter[str] = Counter()
    for each in results:
        judged = compare(each)
        differs = any(comparison.verdict.value in false_verdicts for comparison in judged)
        is_near = any(
            (effect != 0 and comparison.verdict is Verdict.EQUIVALENT)
            or (effect < 0 and comparison.is_non_inferior)
            for comparison in judged
        )
        counts["difference"] += differs
        counts["equivalent or non-inferior"] += is_near
        counts["either"] += differs or is_near
        counts["contradictions"] += any(map(contradicts_itself, judged))
    return counts


def contradicts_itself(judged: Comparison) -> bool:
    """Return True if numbers, verdict and words of a comparison do not say the same."""
    n, words = judged, sentence(judged)
    low, high = n.interval
    is_equivalent, is_different = (
        judged.verdict is Verdict.EQUIVALENT,
        judged.verdict in (Verdict.BETTER, Verdict.WORSE),
    )
    row = comparison_table([judged]).iloc[0]
    return any(
        (
            (low > 0 or high < 0) and n.p.difference > LEVEL,
            is_equivalent and not (-n.margin < low and high < n.margin),
            judged.verdict is Verdict.NON_INFERIOR and low <= -n.margin,
            (is_equivalent or judged.verdict is Verdict.BETTER) and not judged.is_non_inferior,
            is_different and not (low > 0 or high < 0),
            is_different and (n.gain > 0) != (judged.verdict is Verdict.BETTER),
            is_equivalent != ("; equivalent within" in words),
            ("not statistically significant" in words and is_different),
            row["sentence"] != words or row["verdict"] != judged.verdict.value,
            (row["interval_low"] > 0 or row["interval_high"] < 0) and row["p"] > LEVEL,
        )
    )


def shown(results: Iterator[StudyResults]) -> int:
    """Count the reports that show non-inferiority of some trainer."""
    return sum(any(comparison.is_non_inferior for comparison in compare(each)) for each in results)


KINDS_OF_TRUTH = {"equal": 0, "better": 1, "worse": -1}
"""True differences of the table of false claims, in margins."""

PARTS = {
    "t-test": ("t",),
    "folds and seeds": ("crossed",),
    "both": ("t", "crossed"),
    "both and bootstrap": ("t", "crossed", "bootstrap"),
}
"""Tests that agree before a difference is claimed; the last is the rule of the reports."""


def claims_by_parts(results: Iterator[StudyResults]) -> Counter[str]:
    """Count the reports of two trainers that would claim a difference with each of :data:`PARTS`."""
    counts: Counter[str] = Counter()
    for each in results:
        (judged,) = compare(each)
        agrees = {
            "t": judged.tests[0].p < LEVEL,
            "crossed": judged.tests[1].p < LEVEL,
            "bootstrap": judged.bootstrap[0] > 0 or judged.bootstrap[1] < 0,
        }
        counts.update(name for name, tests in PARTS.items() if all(agrees[test] for test in tests))
    return counts


def claims_over_datasets(
    datasets: int, seeds: int, deviation: float, effect: float, studies: int
) -> int:
    """Count the studies that claim a difference over data sets, each with another kind of variation.

    Args:
        datasets: number of data sets.
        seeds: number of seeds.
        deviation: standard deviation of the true differences of the data sets, in points.
        effect: their mean, in points.
        studies: number of studies.
    """
    rng = np.random.default_rng([datasets, seeds, round(1000 * effect)])
    count = 0
    for study in range(studies):
        comparisons = []
        for dataset in range(datasets):
            scenario = SCENARIOS[(study + dataset) % len(SCENARIOS)]
            of_dataset = effect + deviation * rng.standard_normal()
            stream = 1 + study * datasets + dataset
            (results,) = simulate(scenario, 5, seeds, of_dataset, 1, stream=stream)
            (one,) = compare(results)
            condition = one.condition._replace(dataset=f"Dataset{dataset}")
            comparisons.append(replace(one, condition=condition))
        over = judge_scopes(comparisons)[0]
        count += over.verdict in (Verdict.BETTER, Verdict.WORSE)
    return count


OVER_DATASETS = (0.0, 0.5)
"""Standard deviations of the true differences of data sets, in points."""


def print_over_datasets(options: argparse.Namespace) -> None:
    """Print the table of claims over data sets."""
    heading = ["data sets", "seeds", "deviation", "no difference", *map(str, options.effects)]
    print(f"| {' | '.join(heading)} |\n|{' --- |' * len(heading)}", flush=True)
    for datasets, seeds, deviation in product(options.datasets, options.seeds, OVER_DATASETS):
        row = [str(datasets), str(seeds), str(deviation)]
        for effect in (0.0, *options.effects):
            studies = options.power_studies if effect else options.studies
            count = claims_over_datasets(datasets, seeds, deviation, effect, studies)
            row.append(f"{100 * count / studies:.1f}")
        print(f"| {' | '.join(row)} |", flush=True)


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
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--claims", action="store_true")
    parser.add_argument("--comparisons", type=int, nargs="+", default=[1])
    parser.add_argument("--margin", type=float, default=1.0)
    parser.add_argument("--datasets", type=int, nargs="+", default=[])
    options = parser.parse_args()
    if options.datasets:
        print_over_datasets(options)
        return
    if options.claims:
        print_claims(options)
        return
    heading = ["non-inferior"] if options.non_inferiority else ["no difference"]
    heading += [] if options.non_inferiority else [f"{effect:g}" for effect in options.effects]
    if options.parts:
        heading = list(PARTS)
    heading = ["variation", "folds", "seeds", *heading]
    print(f"| {' | '.join(heading)} |\n|{' --- |' * len(heading)}")
    for scenario in SCENARIOS:
        if scenario.title not in options.scenarios:
            continue
        for folds, seeds in product(options.folds, options.seeds):
            row = _row(scenario, folds, seeds, options)
            print(f"| {' | '.join([scenario.title, str(folds), str(seeds), *row])} |", flush=True)


def print_claims(options: argparse.Namespace) -> None:
    """Print the table of false claims."""
    heading = ["variation", "folds", "seeds", "comparisons", *KINDS_OF_TRUTH, "contradictions"]
    print(f"| {' | '.join(heading)} |\n|{' --- |' * len(heading)}", flush=True)
    for scenario in SCENARIOS:
        if scenario.title not in options.scenarios:
            continue
        for folds, seeds, number in product(options.folds, options.seeds, options.comparisons):
            row, contradictions = [scenario.title, str(folds), str(seeds), str(number)], 0
            for sign in KINDS_OF_TRUTH.values():
                effect = sign * options.margin
                sizes = options.studies, number + 1, options.margin
                studies = simulate(scenario, folds, seeds, effect, *sizes)
                counts = false_claims(studies, effect)
                contradictions += counts["contradictions"]
                kinds = ("difference", "equivalent or non-inferior", "either")
                row.append(" / ".join(f"{100 * counts[kind] / options.studies:.1f}" for kind in kinds))
            print(f"| {' | '.join([*row, str(contradictions)])} |", flush=True)


def _row(scenario: Deviations, folds: int, seeds: int, options: argparse.Namespace) -> list[str]:
    """Return the percentages of one kind of study."""
    studies, power_studies = options.studies, options.power_studies
    if options.non_inferiority:
        worse = simulate(scenario, folds, seeds, -DEFAULT_MARGIN, studies)
        return [f"{100 * shown(worse) / studies:.1f}"]
    if options.parts:
        false = claims_by_parts(simulate(scenario, folds, seeds, 0, studies))
        true = claims_by_parts(simulate(scenario, folds, seeds, 1.2, power_studies))
        return [f"{100 * false[p] / studies:.1f} / {100 * true[p] / power_studies:.1f}" for p in PARTS]
    counts = [verdicts(simulate(scenario, folds, seeds, 0, studies))["difference"] / studies]
    for effect in options.effects:
        found = verdicts(simulate(scenario, folds, seeds, effect, power_studies))
        counts.append(found["difference"] / power_studies)
    return [f"{100 * count:.1f}" for count in counts]


if __name__ == "__main__":
    main()
