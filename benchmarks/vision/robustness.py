"""Draw the metric over the weight decay for several learning rates or lengths of training.

    python -m benchmarks.vision.robustness cifar10.csv cifar10-steps.csv --task cifar10

The files are the tables that ``nnunet-cpr vision sweep`` writes, each drawn in a column of axes
(:mod:`benchmarks.weight_decay_curves`), with the standard deviation over the seeds.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pandas as pd

from benchmarks.weight_decay_curves import COLUMNS, check, draw
from nnunet_cpr.names.run_name import parse_run_name
from nnunet_cpr.vision.tasks import TASKS


def read(file: Path, task: str) -> pd.DataFrame:
    """Return the finished runs of a sweep with weight decay or CPR's default.

    Returns:
        The columns of :data:`~benchmarks.weight_decay_curves.COLUMNS`.

    Raises:
        ValueError: both the learning rate and the number of steps of an optimizer vary.
    """
    rows = []
    for _, row in pd.read_csv(file).drop_duplicates("run").iterrows():  # a run may be in two methods
        name = parse_run_name(row["run"])
        others = (name.baseline, name.kappa, name.regularizer, name.mu)
        if any(value is not None for value in others) or name.adaptive or math.isnan(row["mean"]):
            continue
        whole = TASKS[task].complete(name)
        decay = None if name.defaults.cpr else whole.weight_decay
        rows.append((name.defaults.optimizer, whole.lr, whole.steps, decay, row["mean"], row["std"]))
    table = pd.DataFrame(rows, columns=COLUMNS)
    check(table, file)
    return table


def main() -> None:
    """Read the tables and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="+", type=Path, help="tables of sweeps, CSV")
    parser.add_argument("--task", required=True, choices=sorted(TASKS), help="task of the sweeps")
    parser.add_argument("--figure", type=Path, default=Path("robustness.png"))
    arguments = parser.parse_args()
    tables = [read(file, arguments.task) for file in arguments.tables]
    draw(tables, "accuracy in percent", arguments.figure)


if __name__ == "__main__":
    main()
