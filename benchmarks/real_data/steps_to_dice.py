"""Steps that each optimizer needs for the Dice that nnU-Net's SGD reaches, from a finished study.

    python -m benchmarks.real_data.steps_to_dice studies/lengths.yaml --figure steps_to_dice.png

A study trains every optimizer with several numbers of steps, each with its whole schedule. Label the
trainers of one optimizer alike up to a comma: ``Muon, 500 steps``. Prints the Dice and the steps, and
writes the Dice of each training beside the figure as CSV.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from benchmarks.real_data.trainings import read_trainings
from nnunet_cpr.figures import new_figure
from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.studies.study_file import load

DEEPEST = 8.0
"""Points below the best training at which the vertical axis ends."""


def describe(name: TrainerName, label: str) -> dict[str, Any]:
    """Return ``optimizer``, the label up to a comma, and ``steps``."""
    return {"optimizer": label.partition(",")[0], "steps": name.training.steps}


def steps_needed(lengths: np.ndarray, dice: np.ndarray, goal: float) -> float:
    """Return the training length at which the mean Dice reaches ``goal``, on a logarithmic scale.

    Returns:
        Interpolated between the lengths; infinite if the longest training does not reach it, and the
        shortest length if that does.

    Example:
        >>> float(steps_needed(np.array([100, 1000]), np.array([50.0, 60.0]), 55.0).round())
        316.0
    """
    reached = np.flatnonzero(dice >= goal)
    if not len(reached):
        return np.inf
    last = reached[0]
    if last == 0:
        return float(lengths[0])
    share = (goal - dice[last - 1]) / (dice[last] - dice[last - 1])
    low, high = np.log(lengths[last - 1 : last + 1])
    return float(np.exp(low + share * (high - low)))


def tabulate(trainings: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Return the steps that each optimizer needs for the mean Dice of ``reference`` at each length.

    Returns:
        ``goal``, the length of the reference's trainings; ``optimizer``; ``steps``, from the mean Dice
        at each length; ``fewest`` and ``most``, from the best and the worst training at each length.
    """
    groups = trainings.groupby(["optimizer", "steps"], sort=False)["dice"]
    columns = {"steps": groups.mean(), "fewest": groups.max(), "most": groups.min()}
    rows = []
    for goal, dice in columns["steps"][reference].sort_index().items():
        for optimizer in trainings["optimizer"].unique():
            row: dict[str, Any] = {"goal": goal, "optimizer": optimizer}
            for column, values in columns.items():
                own = values[optimizer].sort_index()
                row[column] = steps_needed(own.index.to_numpy(float), own.to_numpy(float), float(dice))
            rows.append(row)
    return pd.DataFrame(rows)


def draw(trainings: pd.DataFrame, path: Path) -> None:
    """Draw the Dice of every training over its number of steps, and the means."""
    with new_figure(path, (7, 4.5)) as figure:
        axes = figure.add_subplot()
        for number, (optimizer, rows) in enumerate(trainings.groupby("optimizer", sort=False)):
            means = rows.groupby("steps")["dice"].mean()
            axes.plot(means.index, means, "-", color=f"C{number}", label=optimizer)
            axes.plot(rows["steps"], rows["dice"], "o", color=f"C{number}", markersize=4, alpha=0.6)
        _limit(axes, trainings)
        lengths = sorted(trainings["steps"].unique())
        axes.set_xscale("log")
        axes.set_xticks(lengths, [f"{steps:,}" for steps in lengths], minor=False)
        axes.minorticks_off()
        axes.set_xlabel("optimizer steps of the training")
        axes.set_ylabel("foreground Dice in percent")
        axes.legend()


def _limit(axes: Axes, trainings: pd.DataFrame) -> None:
    """End the vertical axis at :data:`DEEPEST`, and write the means below it at its lower border."""
    lowest = trainings["dice"].max() - DEEPEST
    if trainings["dice"].min() >= lowest:
        return
    axes.set_ylim(lowest, trainings["dice"].max() + 0.5)
    means = trainings.groupby(["optimizer", "steps"], sort=False)["dice"].mean()
    for (optimizer, steps), mean in means[means < lowest].items():
        axes.annotate(
            f"{optimizer}: {mean:.0f} ↓",
            (steps, 0),
            (-4, 5),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
        )


def main() -> None:
    """Read the study, draw the figure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study", help="study file")
    parser.add_argument("--reference", help="label of the optimizer to reach; the study's by default")
    parser.add_argument("--figure", type=Path, default=Path("steps_to_dice.png"))
    arguments = parser.parse_args()
    trainings = read_trainings(arguments.study, Path(os.environ["nnUNet_results"]), describe)
    study, known = load(arguments.study), list(trainings["optimizer"].unique())
    reference = arguments.reference or study.entry(study.reference).title.partition(",")[0]
    if reference not in known:
        parser.error(f"--reference: expected one of {', '.join(known)}, got {reference}")
    trainings.to_csv(arguments.figure.with_suffix(".csv"), index=False, float_format="%.4f")
    draw(trainings, arguments.figure)
    dice = trainings.groupby(["optimizer", "steps"], sort=False)["dice"].agg(["mean", "std"])
    print(dice.unstack("steps").round(2).to_string())
    print(f"Steps for the mean Dice of {reference} at each length (goal):")
    print(tabulate(trainings, reference).round().to_string(index=False))


if __name__ == "__main__":
    main()
