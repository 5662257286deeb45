"""Dice over the weight decay for several learning rates or lengths of training, from finished studies.

    python -m benchmarks.real_data.rates_and_lengths studies/{rates,long}_sgd.yaml

Draws each study in axes of its own: the mean of each setting over folds and seeds, and CPR's default
as a dashed line. Prints the means, and writes them beside the figure as CSV.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.real_data.robustness import DEEPEST, DEFAULT_WEIGHT_DECAY
from benchmarks.real_data.trainings import read_trainings
from benchmarks.weight_decay_curves import COLUMNS, check, draw
from nnunet_cpr.names.trainer_name import TrainerName


def describe(name: TrainerName, label: str) -> dict[str, Any]:
    """Return the first of :data:`~benchmarks.weight_decay_curves.COLUMNS` for a trainer."""
    if name.kappa is not None or name.lr is None:
        raise ValueError(f"{name}: expected weight decay or CPR's default, with a learning rate")
    decay = DEFAULT_WEIGHT_DECAY if name.weight_decay is None else name.weight_decay
    values = (name.defaults.optimizer, name.lr, name.training.steps)
    return dict(zip(COLUMNS, (*values, np.nan if name.defaults.cpr else decay)))


def read(study: str, results: Path) -> pd.DataFrame:
    """Return the mean Dice of each setting over folds and seeds, in percent.

    Raises:
        ValueError: a setting lacks folds or seeds that others have.
    """
    trainings = read_trainings(study, results, describe)
    groups = trainings.groupby(COLUMNS[:4], dropna=False)["dice"]
    if groups.count().nunique() != 1:
        raise ValueError(f"{study}: expected all trainings to be finished; run it again")
    table = groups.mean().rename("mean").reset_index().assign(std=np.nan)
    check(table, study)
    return table


def main() -> None:
    """Read the studies, draw the figure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("studies", nargs="+", help="study files")
    parser.add_argument("--figure", type=Path, default=Path("rates_and_lengths.png"))
    parser.add_argument(
        "--deepest", type=float, default=DEEPEST, help="points below the best mean that are drawn"
    )
    arguments = parser.parse_args()
    results = Path(os.environ["nnUNet_results"])
    tables = [read(study, results) for study in arguments.studies]
    whole = pd.concat(tables).drop(columns="std")
    whole.to_csv(arguments.figure.with_suffix(".csv"), index=False, float_format="%.6g")
    draw(tables, "foreground Dice in percent", arguments.figure, arguments.deepest)
    wide = whole.drop_duplicates().pivot(index=COLUMNS[:3], columns="decay", values="mean")
    print(wide.rename(columns=lambda decay: "CPR" if np.isnan(decay) else f"{decay:g}").round(2))


if __name__ == "__main__":
    main()
