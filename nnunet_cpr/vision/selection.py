"""Comparison of methods, each with the setting that is best on other data than the comparison's."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import ttest_ind

from nnunet_cpr._files import finite_number
from nnunet_cpr.names.run_name import RunName
from nnunet_cpr.vision.folder import read_result, run_folder
from nnunet_cpr.vision.sweeps import Sweep
from nnunet_cpr.vision.tasks import TASKS

COLUMNS = [
    *("method", "setting", "run", "selection", "n", "mean", "std"),
    *("compared_with", "difference", "low", "high", "p"),
]


class _Setting(NamedTuple):
    """Results of one setting of a method.

    Attributes:
        label: row, and column if the method has several.
        reference: the method that this one is compared with, an empty text for the first method.
        selection: mean of the task's selection metric, NaN without results.
        values: the task's metric of each finished run.
    """

    label: str
    reference: str
    run: RunName | None
    selection: float
    values: list[float]


def compare_methods(sweep: Sweep, results: Path) -> pd.DataFrame:
    """Compare the methods of a sweep by the task's metric on data that chose no setting.

    Of each method (:attr:`~nnunet_cpr.vision.sweeps.Panel.methods`) the setting with the best mean of
    the task's selection metric over the seeds is taken, of those with the most finished runs.

    Args:
        sweep: the sweep, whose task has a selection metric.
        results: folder of the runs' folders.

    Returns:
        A row for each method: ``method``; ``setting`` and ``run``, the chosen one; ``selection``, the
        mean of the selection metric; ``n``, ``mean`` and ``std`` of the metric; ``compared_with``, the
        method of the panel's ``compared_with``, or else the first; ``difference`` of the mean from that
        method's, and its 95 % interval from ``low`` to ``high`` (Welch); and ``p`` with Bonferroni's
        correction for all comparisons. Missing numbers are NaN. A setting with a diverged run, or with
        fewer finished runs than another, is not chosen; ``setting`` is "none" if none can be.

    Raises:
        OSError: a result is damaged.
    """
    chosen = {method: _choose(settings) for method, settings in _settings(sweep, results).items()}
    first = next(iter(chosen))
    references = {method: setting.reference or first for method, setting in chosen.items()}
    tests = sum(method != reference for method, reference in references.items())
    rows = []
    for method, setting in chosen.items():
        reference = references[method]
        known = np.array(setting.values)
        std = float(known.std(ddof=1)) if len(known) > 1 else math.nan
        mean = float(known.mean()) if len(known) else math.nan
        own = (method, setting.label, str(setting.run or ""), setting.selection, len(known), mean, std)
        difference = _difference(setting, chosen[reference], tests)
        rows.append((*own, "" if method == reference else reference, *difference))
    return pd.DataFrame(rows, columns=COLUMNS)


def _settings(sweep: Sweep, results: Path) -> dict[str, list[_Setting]]:
    """Return the settings of each method."""
    task = TASKS[sweep.task]
    assert task.selection is not None
    panels = {panel.title: panel for panel in sweep.panels}
    settings: dict[str, list[_Setting]] = {}
    for panel in sweep.panels:
        compared = panels.get(panel.compared_with)
        for row, column, name in panel.cells():
            runs = [dataclasses.replace(name, seed=seed) for seed in sweep.seeds]
            found = [read_result(run_folder(results, task, run)) for run in runs]
            finished = [r for r in found if r is not None and "diverged" not in r]
            values = [v for r in finished if (v := finite_number(r.get(task.metric))) is not None]
            scores = [v for r in finished if (v := finite_number(r.get(task.selection))) is not None]
            is_complete = len(scores) == sum(r is not None for r in found) > 0
            score = float(np.mean(scores)) if is_complete else math.nan
            label = row if panel.methods == "columns" else ", ".join(filter(None, (row, column)))
            reference = compared.method_of("", column) if compared else ""
            setting = _Setting(label, reference, name, score, values)
            settings.setdefault(panel.method_of(row, column), []).append(setting)
    return settings


def _choose(settings: list[_Setting]) -> _Setting:
    """Return the setting with the best selection metric of those with the most finished runs."""
    known = [setting for setting in settings if not math.isnan(setting.selection)]
    if not known:
        return settings[0]._replace(label="none", run=None, values=[])
    most = max(len(setting.values) for setting in known)
    return max((s for s in known if len(s.values) == most), key=lambda s: s.selection)


def _difference(setting: _Setting, reference: _Setting, tests: int) -> tuple[float, ...]:
    """Return the difference of two means, its interval and its corrected p."""
    if setting is reference or min(len(setting.values), len(reference.values)) < 2:
        return (math.nan,) * 4
    test = ttest_ind(setting.values, reference.values, equal_var=False)
    interval = test.confidence_interval(0.95)
    difference = float(np.mean(setting.values) - np.mean(reference.values))
    return difference, float(interval.low), float(interval.high), min(1.0, float(test.pvalue) * tests)
