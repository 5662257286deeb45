"""Results of a study's runs, read from nnU-Net's folders into tables."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nnunet_cpr._files import read_json
from nnunet_cpr.nnunet.fold_files import LOG_COLUMNS, read_logs
from nnunet_cpr.nnunet.history import CSV_NAME, has_bounds
from nnunet_cpr.reports.metrics import METRICS, Metric
from nnunet_cpr.studies.definition import Run, Study, StudyError


class ReportError(StudyError):
    """No results to report; the message is one line."""


class Setting(NamedTuple):
    """Data set, configuration and plans: the trainers of one setting are compared with each other."""

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
SETTING = list(Setting._fields)
RUN = [*SETTING, "trainer", "fold", "seed"]
"""Columns that identify a run; ``seed`` is :data:`UNSEEDED` in a study without seeds."""
CASES = [*SETTING, "fold", "seed", "case", "class", "trainer", "dice"]
EPOCHS = [*SETTING, "fold", "seed", "trainer", *LOG_COLUMNS]
UNSEEDED = -1
MIN_SEEDS = 3
"""Minimum number of seeds for a verdict, which is about methods instead of trainings."""
MIN_FOLDS = 2
"""Minimum number of folds for a verdict."""
DAMAGE = (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)
"""Errors that a damaged ``summary.json`` can raise."""


@dataclass(frozen=True)
class Results:
    """Content of a report, of all settings of a study or, as a part, of one.

    Attributes:
        study: the study.
        folder: nnU-Net's ``nnUNet_results``.
        cases: one row for each class of each validation case of each finished run, with a column for
            each metric of :data:`~nnunet_cpr.reports.metrics.METRICS` that was read; NaN where the
            class is in neither the truth nor the prediction. ``trainer`` is the trainer's name in the
            study, ``seed`` is :data:`UNSEEDED` in a study without seeds.
        epochs: one row for each epoch in the training logs, of unfinished runs too; ``pseudo_dice``
            is the mean over the classes, in [0, 1].
        unbounded: runs with CPR whose bounds were never set.
        notes: one line for each file or metric that is missing or unreadable.
        ratios: test cases of a fold per other case, by data set.
        title: of a part, the data set's name, with configuration and plans if there are several.
    """

    study: Study
    folder: Path
    cases: pd.DataFrame
    epochs: pd.DataFrame
    unbounded: list[Run]
    notes: list[str]
    ratios: dict[str, SplitRatio]
    title: str = ""

    def parts(self) -> list[Results]:
        """Return the results of each data set, configuration and plans, in the study's order."""
        study, parts = self.study, []
        is_said = [True, len(study.configurations) > 1, len(study.plans) > 1]
        for setting in product(study.datasets, study.configurations, study.plans):
            datasets, configurations, plans = ((name,) for name in setting)
            part = replace(
                self,
                study=replace(study, datasets=datasets, configurations=configurations, plans=plans),
                cases=self.cases[(self.cases[SETTING] == list(setting)).all(axis=1)],
                epochs=self.epochs[(self.epochs[SETTING] == list(setting)).all(axis=1)],
                unbounded=[
                    run
                    for run in self.unbounded
                    if (run.dataset, run.configuration, run.plans) == setting
                ],
                title=", ".join(name for name, said in zip(setting, is_said) if said),
            )
            parts.append(part)
        return parts

    @property
    def setting(self) -> Setting:
        """Data set, configuration and plans of a part."""
        return Setting(self.study.datasets[0], self.study.configurations[0], self.study.plans[0])

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
        """Number of runs of each trainer in each setting."""
        return len(self.study.folds) * len(self.seeds)

    def run(self, fold: int, trainer: str, seed: int) -> Run:
        """Return a run of a part."""
        return self.study.run(*self.setting, fold, trainer, None if seed == UNSEEDED else seed)

    def finished_runs(self, trainer: str) -> list[tuple[int, int]]:
        """Return fold and seed of the runs of a part that have been validated, in the study's order."""
        runs = product(self.study.folds, self.seeds)
        return [(fold, seed) for fold, seed in runs if (trainer, fold, seed) in self._finished_runs]

    @cached_property
    def _finished_runs(self) -> set[tuple[Any, ...]]:
        runs = self.cases[["trainer", "fold", "seed"]].drop_duplicates()
        return set(runs.itertuples(index=False, name=None))

    def largest_rectangle(self, runs: Collection[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Return folds and seeds all of whose runs are given, as many runs as possible.

        Folds and seeds that are enough for a verdict come first, even if others have more runs.

        Args:
            runs: fold and seed of each run.
        """
        seeds_of = [{seed for f, seed in runs if f == fold} for fold in self.study.folds]
        # The seeds of the largest rectangle are those that some folds have in common.
        common: set[frozenset[int]] = set()
        for seeds in map(frozenset, seeds_of):
            common |= {seeds, *(seeds & others for others in common)}
        rectangles = []
        for chosen in common - {frozenset()}:
            folds = [fold for fold, seeds in zip(self.study.folds, seeds_of) if chosen <= seeds]
            rectangles.append((folds, [seed for seed in self.seeds if seed in chosen]))
        return min(rectangles, key=_preference, default=([], []))


def _preference(rectangle: tuple[list[int], list[int]]) -> tuple[Any, ...]:
    folds, seeds = rectangle
    has_verdict = len(folds) >= MIN_FOLDS and len(seeds) >= MIN_SEEDS
    return not has_verdict, -len(folds) * len(seeds), len(folds), folds


def read_results(study: Study, results: Path, splits: Path | None = None) -> Results:
    """Read all runs of a study.

    Args:
        study: the study.
        results: nnU-Net's ``nnUNet_results``.
        splits: the study's record of the splits of its data sets, if there is one. Splits elsewhere are
            not read: they may have changed since.

    Raises:
        ReportError: the study has no data set, or no run has finished.
    """
    if not study.datasets:
        raise ReportError(f"study {study.name}: expected a data set, got none; add --dataset")
    cases, epochs = [pd.DataFrame(columns=CASES)], [pd.DataFrame(columns=EPOCHS)]
    unbounded: list[Run] = []
    notes: list[str] = []
    for run in study.runs():
        folder = run.folder(results)
        setting = dict(zip(SETTING, (run.dataset, run.configuration, run.plans)))
        seed = UNSEEDED if run.seed is None else run.seed
        here = {**setting, "fold": run.fold, "seed": seed, "trainer": run.entry}
        try:
            cases.append(pd.DataFrame(read_cases(folder)).assign(**here)[CASES])
        except FileNotFoundError:
            pass  # not validated yet
        except DAMAGE:
            notes.append(f"{_title(run)}: validation/summary.json unreadable; counts as unfinished")
        if (folder / CSV_NAME).is_file() and not has_bounds(folder / CSV_NAME):
            unbounded.append(run)
        epochs.append(read_logs(folder).assign(**here)[EPOCHS])
    if len(cases) == 1:
        raise ReportError(
            f"study {study.name}: no run has finished; expected a validation/summary.json "
            f"below {results}"
        )
    return Results(
        study,
        results,
        pd.concat(cases[1:], ignore_index=True),
        pd.concat([table for table in epochs if len(table)] or epochs[:1], ignore_index=True),
        unbounded,
        notes,
        {name: _test_ratio(name, study.folds, splits) for name in study.datasets},
    )


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


def case_means(cases: pd.DataFrame, metric: str = "dice") -> pd.DataFrame:
    """Return the foreground mean of each case in each run, over the classes where it is defined."""
    return cases.groupby([*RUN, "case"], sort=False)[metric].mean().reset_index()


def _test_ratio(dataset: str, folds: Sequence[int], record: Path | None) -> SplitRatio:
    """Return the ratio of test to other cases, 1/4 as in five folds if it is not recorded.

    Cases that a fold neither trains nor tests count as training cases: the ratio stands for how much
    the training sets of two folds overlap, which is not more if they are small subsets.
    """
    try:
        splits = read_json(record)[dataset] if record else []
        total = len({case for split in splits for case in (*split["train"], *split["val"])})
        tested = [len(splits[fold]["val"]) for fold in folds]
        return SplitRatio(float(np.mean([count / (total - count) for count in tested])), RECORDED)
    except DAMAGE:
        return SplitRatio(1 / 4, ASSUMED)


def read_dataset_json(fold: Path) -> dict[str, Any]:
    """Return the ``dataset.json`` that nnU-Net keeps beside the folds; empty if it is unreadable."""
    try:
        return dict(read_json(fold.parent / "dataset.json"))
    except DAMAGE:
        return {}


def class_key(value: Any) -> tuple[int, ...]:
    """Return the labels of a class or region, given as 3, [1, 2], "3" or "(1, 2)"."""
    return tuple(int(number) for number in re.findall(r"-?\d+", str(value)))


def _title(run: Run) -> str:
    return f"{run.dataset}, {run.configuration}, {run.plans}, {run.trainer}, fold {run.fold}"


def read_cases(fold: Path) -> list[dict[str, Any]]:
    """Return one row for each class of each validation case of a fold, sorted by case.

    Args:
        fold: nnU-Net's ``fold_X``.

    Returns:
        Rows with case, class, dice in [0, 1] or NaN, labels (those of the class or region), and
        prediction_file and reference_file as they are in the ``summary.json``.

    Raises:
        FileNotFoundError: the fold has not been validated.
        Exception: the ``summary.json`` is damaged, one of ``DAMAGE``.
    """
    summary = read_json(fold / "validation" / "summary.json")
    labels = dict(read_dataset_json(fold).get("labels") or {})
    names = {class_key(value): str(name) for name, value in labels.items()}
    order = {key: position for position, key in enumerate(names)}
    rows = []
    for case in summary["metric_per_case"]:
        files = {key: str(case.get(key, "")) for key in ("prediction_file", "reference_file")}
        name = Path(case["prediction_file"]).name.removesuffix(".gz")
        # The keys in the file are sorted as text, 10 before 2; use the data set's order.
        metrics = {class_key(key): values for key, values in case["metrics"].items()}
        for key in sorted(metrics, key=lambda k: (order.get(k, len(order)), k)):
            value = metrics[key]["Dice"]
            dice = np.nan if value is None else float(value)
            if not (0 <= dice <= 1 or np.isnan(dice)):
                raise ValueError(f"Dice {dice}")
            label = names.get(key, "label " + " + ".join(map(str, key)))
            row = {"case": Path(name).stem, "class": label, "dice": dice, "labels": key, **files}
            if key != (0,):
                rows.append(row)
    if not rows or len({(row["case"], row["labels"]) for row in rows}) < len(rows):
        raise ValueError("no cases, or a case twice")
    return sorted(rows, key=lambda row: str(row["case"]))


def unique(values: Sequence[Any] | pd.Series) -> list[Any]:
    """Return the unique values in the order of their first appearance."""
    return list(dict.fromkeys(values))
