"""Sweeps: the runs of a table and a figure, in a YAML file, and the mean and interval over seeds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import pydantic
from pydantic import ConfigDict, Field
from scipy import stats

from nnunet_cpr.figures import new_figure
from nnunet_cpr.files import finite_number
from nnunet_cpr.names import WrongName
from nnunet_cpr.names.run_name import RunName, parse_run_name
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.vision.tasks import find_task
from nnunet_cpr.vision.training import read_result, run_folder
from nnunet_cpr.yaml_files import number_ranges, read_yaml


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Sweep:
    """Runs of one task with several methods, settings and seeds.

    Attributes:
        task: name of the task.
        methods: names of the runs without a seed, a setting each, by their method.
        seeds: seeds of every setting, also as ``1-3``.
        metric: metric of the table and the figure, in percent.

    Example:
        >>> methods = {"SGD": ["SGD", "SGD_wd0p01"], "CPR": ["SGDCPR"]}
        >>> [str(run) for run in Sweep(task="digits", methods=methods, seeds=[1, 2]).runs()]
        ... # doctest: +NORMALIZE_WHITESPACE
        ['SGD_seed1', 'SGD_wd0p01_seed1', 'SGDCPR_seed1',
         'SGD_seed2', 'SGD_wd0p01_seed2', 'SGDCPR_seed2']
    """

    task: str
    methods: Annotated[dict[str, list[str]], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), number_ranges("seed")] = (
        Field(default_factory=lambda: [1, 2, 3])
    )
    metric: str = "accuracy"

    def settings(self) -> list[tuple[str, RunName]]:
        """Return the method and the name without a seed of each setting.

        Raises:
            WrongName: it is not the name of a run, or it has a seed.
        """
        settings = [
            (method, parse_run_name(name)) for method in self.methods for name in self.methods[method]
        ]
        for _, name in settings:
            if name.seed is not None:
                raise WrongName(f"{name}: expected a name without a seed", "use seeds or --seeds")
        return settings

    def runs(self) -> list[RunName]:
        """Return every run once, those of the first seed first.

        Raises:
            WrongName: see :meth:`settings`.
        """
        names = [name for _, name in self.settings()]
        runs = [dataclasses.replace(name, seed=seed) for seed in self.seeds for name in names]
        return list(dict.fromkeys(runs))


def load_sweep(path: Path) -> Sweep:
    """Read a sweep from a YAML file.

    Raises:
        Refusal: the file is not a sweep.
        OSError: the file cannot be read.
    """
    try:
        return read_yaml(path, Sweep)
    except ValueError as error:
        raise Refusal(str(error)) from error


CONFIDENCE = 0.95
"""Level of the intervals."""


def read_results(sweep: Sweep, results: Path) -> pd.DataFrame:
    """Return a row for each run of a sweep, finished or not.

    Args:
        sweep: the sweep.
        results: folder of the runs' folders.

    Returns:
        ``method``, ``run`` (the name without a seed), ``seed``, ``diverged`` (the step; NaN for other
        runs) and the metrics of ``result.json``, NaN where they are missing or not finite.

    Raises:
        OSError: a result is damaged.
    """
    task = find_task(sweep.task)
    rows = []
    for method, name in sweep.settings():
        for seed in sweep.seeds:
            folder = run_folder(results, task, dataclasses.replace(name, seed=seed))
            result = {key: finite_number(value) for key, value in (read_result(folder) or {}).items()}
            setting = {"method": method, "run": str(name), "seed": seed}
            rows.append({sweep.metric: None, "diverged": None} | result | setting)
    table = pd.DataFrame(rows)
    labels = ["method", "run", "seed"]
    return pd.concat([table[labels], table.drop(columns=labels).astype(float)], axis=1)


def summarize(sweep: Sweep, results: Path) -> pd.DataFrame:
    """Return the mean of a sweep's metric over the seeds for each setting.

    Args:
        sweep: the sweep.
        results: folder of the runs' folders.

    Returns:
        A row for each setting: ``method``, ``run`` (the name without a seed), ``n``, the number of
        finished runs, ``mean`` and ``std`` of the metric, ``low`` and ``high`` of the mean's 95 %
        interval (Student's t), and ``diverged``, the number of diverged runs.

    Raises:
        OSError: a result is damaged.
    """
    runs = read_results(sweep, results).groupby(["method", "run"], sort=False)
    table = runs[sweep.metric].agg(n="count", mean="mean", std="std")
    factor = stats.t.ppf((1 + CONFIDENCE) / 2, (table["n"] - 1).clip(lower=1))
    half = table["std"] * factor / np.sqrt(table["n"])  # NaN for fewer than two runs
    table = table.assign(low=table["mean"] - half, high=table["mean"] + half)
    return table.assign(diverged=runs["diverged"].count()).reset_index()


def draw_summary(table: pd.DataFrame, metric: str, path: Path) -> None:
    """Draw the mean and its interval of each setting, one color for each method.

    The number of finished runs stands beside settings with fewer runs than others.

    Args:
        table: the table of :func:`summarize`.
        metric: label of the axis.
        path: figure to write; its suffix gives the format.

    Raises:
        OSError: the figure cannot be written.
    """
    with new_figure(path, (8, 1.2 + 0.19 * len(table))) as figure:
        axes = figure.subplots()
        for method, rows in table.groupby("method", sort=False):
            half = (rows["high"] - rows["mean"]).fillna(0)
            axes.errorbar(rows["mean"], rows.index, xerr=half, fmt="o", markersize=4, label=method)
        labels = [_label(row, table["n"].max()) for _, row in table.iterrows()]
        axes.set_yticks(table.index, labels, fontsize=7)
        axes.set_ylim(len(table) - 0.5, -0.5)
        axes.grid(axis="x", alpha=0.3)
        axes.set_xlabel(f"{metric.replace('_', ' ')} in percent, mean and 95 % interval over the seeds")
        figure.legend(loc="outside upper center", ncols=3, fontsize=8)


def _label(row: pd.Series, runs: int) -> str:
    """Return the name of a setting, with the number of its runs if some of them are missing."""
    missing = "" if row["n"] == runs else f", n = {row['n']}"
    return f"{row['run']}{missing}{', diverged' if row['diverged'] else ''}"
