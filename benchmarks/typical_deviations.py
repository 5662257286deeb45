"""Deviations of published trainings, for ``study plan``.

    python -m benchmarks.typical_deviations FOLDER

FOLDER is that of ``benchmarks.published.unpack``. nnU-Net's default network and its residual encoder L
count as two trainers, and the deviations are medians over data sets.

With one training a fold, the deviation of a case and that of a case in one training cannot be told
apart; the shares are those of ACDC in ``power.MEASURED``.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

from nnunet_cpr.reports.power import MEASURED
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.reports.results import case_means
from nnunet_cpr.studies.study import Study, TrainerEntry

PLANS = ("nnUNetPlans", "nnUNetResEncUNetLPlans")
PUBLISHED = {
    "organs": ("002_Heart", "004_Hippocampus", "005_Prostate", "009_Spleen"),
    "lesions": (
        *("001_BrainTumour", "003_Liver", "006_Lung"),
        *("007_Pancreas", "008_HepaticVessel", "010_Colon"),
    ),
}


def differences(dataset: str, folder: Path) -> list[np.ndarray]:
    """Return the differences of both networks in points, for each fold those of its cases."""
    study = Study("published", (f"Dataset{dataset}",), (TrainerEntry("nnUNetTrainer"),), plans=PLANS)
    means = case_means(read_results(study, folder).cases)
    dice = means.pivot(index=["fold", "case"], columns="plans", values="dice").dropna()
    return [100 * (fold[PLANS[1]] - fold[PLANS[0]]).to_numpy() for _, fold in dice.groupby("fold")]


def variances(folds: list[np.ndarray]) -> tuple[float, float]:
    """Return the variances of a trainer between the cases and between the trainings of a data set."""
    of_cases = np.array([fold.var(ddof=1) for fold in folds])
    of_means = np.array([fold.mean() for fold in folds]).var(ddof=1)
    of_trainings = of_means - np.mean(of_cases / [len(fold) for fold in folds])
    return float(of_cases.mean() / 2), float(of_trainings / 2)


def main() -> None:
    """Print the deviations as they stand in ``nnunet_cpr/reports/power.py``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    found = {title: [differences(name, folder) for name in names] for title, names in PUBLISHED.items()}
    share = MEASURED[0].case ** 2 / (MEASURED[0].case ** 2 + MEASURED[0].residual ** 2)
    for title, datasets in found.items():
        case, training = np.median([variances(folds) for folds in datasets], axis=0)
        parts = math.sqrt(share * case), math.sqrt(max(training, 0)), math.sqrt((1 - share) * case)
        named = zip(("case", "training", "residual"), parts)
        print(f"{title}: " + ", ".join(f"{name}={value:.2f}" for name, value in named))
    print(f"OF_DATASETS = {between([folds for datasets in found.values() for folds in datasets]):.2f}")


def between(datasets: list[list[np.ndarray]]) -> float:
    """Return a trainer's deviation between data sets, by Paule and Mandel (1982).

    The mean differences of the data sets vary by it and by the errors that their trainings give them.
    """
    trainings = np.array([[fold.mean() for fold in folds] for folds in datasets])
    means, errors = trainings.mean(axis=1), trainings.var(axis=1, ddof=1) / trainings.shape[1]

    def excess(variance: float) -> float:
        weights = 1 / (errors + variance)
        rests = means - np.average(means, weights=weights)
        return float((weights * rests**2).sum()) - len(means) + 1

    return math.sqrt(brentq(excess, 0, 100) / 2)


if __name__ == "__main__":
    main()
