"""Results of a study's runs, read from nnU-Net's folders into tables."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nnunet_cpr._files import read_json
from nnunet_cpr.nnunet.fold_files import LOG_COLUMNS, RESOURCES, measurement, read_logs
from nnunet_cpr.nnunet.history import CSV_NAME, read_history
from nnunet_cpr.studies.definition import Run, Study, StudyError


class ReportError(StudyError):
    """No results to report; the message is one line."""


class Setting(NamedTuple):
    """Data set, configuration and plans, which the trainers of one table line share."""

    dataset: str
    configuration: str
    plans: str


SETTING = list(Setting._fields)
RUN = [*SETTING, "trainer", "fold", "seed"]
"""Columns that identify a run; ``seed`` is :data:`UNSEEDED` in a study without seeds."""
CASES = [*SETTING, "fold", "seed", "case", "class", "trainer", "dice"]
EPOCHS = [*SETTING, "fold", "seed", "trainer", *LOG_COLUMNS]
MEASURED = [*SETTING, "fold", "seed", "trainer", "seconds", "peak_memory_bytes", "peak_gpu_memory_bytes"]
UNSEEDED = -1
DAMAGE = (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)
"""Errors that a damaged ``summary.json`` can raise."""


@dataclass(frozen=True)
class Results:
    """Content of a report.

    Attributes:
        study: the study.
        folder: nnU-Net's ``nnUNet_results``.
        cases: one row for each class of each validation case of each finished run, with a column for
            each metric of :data:`~nnunet_cpr.reports.metrics.METRICS` that was read; NaN where the
            class is in neither the truth nor the prediction. ``trainer`` is the trainer's name in the
            study, ``seed`` is :data:`UNSEEDED` in a study without seeds.
        epochs: one row for each epoch in the training logs, of unfinished runs too; ``pseudo_dice``
            is the mean over the classes, in [0, 1].
        resources: time (seconds) and memory (bytes) of the runs that have recorded them.
        histories: first run of each CPR trainer that has a history, with its history.
        notes: one line for each file or metric that is missing or unreadable.
        ratios: test cases of a fold per other case, by data set.
    """

    study: Study
    folder: Path
    cases: pd.DataFrame
    epochs: pd.DataFrame
    resources: pd.DataFrame
    histories: dict[tuple[Setting, str], tuple[Run, pd.DataFrame]]
    notes: list[str]
    ratios: dict[str, float]

    @property
    def settings(self) -> list[Setting]:
        """Data sets x configurations x plans, in the study's order."""
        study = self.study
        return [Setting(*s) for s in product(study.datasets, study.configurations, study.plans)]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the study, or :data:`UNSEEDED`."""
        return list(self.study.seeds) or [UNSEEDED]

    def run(self, setting: Setting, fold: int, trainer: str, seed: int = UNSEEDED) -> Run:
        """Return a run of the study."""
        return self.study.run(*setting, fold, trainer, None if seed == UNSEEDED else seed)

    def finished_runs(self, setting: Setting, trainer: str) -> list[tuple[int, int]]:
        """Return fold and seed of the runs that have been validated, in the study's order."""
        done = self._finished_runs
        runs = product(self.study.folds, self.seeds)
        return [(fold, seed) for fold, seed in runs if (*setting, trainer, fold, seed) in done]

    @cached_property
    def _finished_runs(self) -> set[tuple[Any, ...]]:
        return set(self.cases[RUN].drop_duplicates().itertuples(index=False, name=None))

    def finished(self, setting: Setting, trainer: str) -> list[int]:
        """Return the folds that have been validated with all seeds."""
        runs = self.finished_runs(setting, trainer)
        return [fold for fold in self.study.folds if all((fold, seed) in runs for seed in self.seeds)]

    def largest_rectangle(self, runs: Collection[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Return folds and seeds all of whose runs are given, as many runs as possible.

        Args:
            runs: fold and seed of each run.
        """
        folds, seeds = list(self.study.folds), self.seeds
        by_fold = len(folds) <= len(seeds)
        few, many = (folds, seeds) if by_fold else (seeds, folds)
        given = {run if by_fold else run[::-1] for run in runs}
        best: tuple[list[int], list[int]] = ([], [])
        # Of more than 10 only the sets of those with the most runs: there are 2^n sets.
        by_count = sorted(few, key=lambda each: -sum(run[0] == each for run in given))
        for count in range(1, len(few) + 1):
            for chosen in [by_count[:count]] if len(few) > 10 else combinations(few, count):
                others = [each for each in many if all((one, each) in given for one in chosen)]
                size, largest = count * len(others), len(best[0]) * len(best[1])
                if others and (size > largest or (size == largest and not by_fold)):
                    best = ([each for each in few if each in chosen], others)
        return best if by_fold else best[::-1]

    def of(self, table: pd.DataFrame, setting: Setting) -> pd.DataFrame:
        """Return the rows of a table that belong to a setting."""
        if len(self.settings) == 1:
            return table
        return table[(table[SETTING] == list(setting)).all(axis=1)]

    def title(self, setting: Setting) -> str:
        """Return the data set's name, with configuration and plans if there are several."""
        several = [True, len(self.study.configurations) > 1, len(self.study.plans) > 1]
        return ", ".join(part for part, said in zip(setting, several) if said)


def read_results(study: Study, results: Path, raw: Path | None, preprocessed: Path | None) -> Results:
    """Read all runs of a study.

    Args:
        study: the study.
        results: nnU-Net's ``nnUNet_results``.
        raw: nnU-Net's ``nnUNet_raw``, if there is one.
        preprocessed: nnU-Net's ``nnUNet_preprocessed``, if there is one.

    Raises:
        ReportError: the study has no data set, or no run has finished.
    """
    if not study.datasets:
        raise ReportError(f"study {study.name}: expected a data set, got none; add --dataset")
    cases: list[pd.DataFrame] = []
    epochs: list[pd.DataFrame] = []
    resources: list[dict[str, Any]] = []
    histories: dict[tuple[Setting, str], tuple[Run, pd.DataFrame]] = {}
    notes: list[str] = []
    for run in study.runs():
        folder = run.folder(results)
        setting = Setting(run.dataset, run.configuration, run.plans)
        seed = UNSEEDED if run.seed is None else run.seed
        here = {**setting._asdict(), "fold": run.fold, "seed": seed, "trainer": run.entry}
        try:
            labels = read_dataset_json(folder, run.dataset, preprocessed, raw).get("labels")
            cases.append(pd.DataFrame(read_cases(folder, labels)).assign(**here))
        except FileNotFoundError:
            pass  # not validated yet
        except DAMAGE:
            notes.append(f"{_name(run)}: validation/summary.json unreadable; counts as unfinished")
        if not (log := read_logs(folder)).empty:
            epochs.append(log.assign(**here))
        try:
            measured = read_json(folder / RESOURCES)
            resources.append({**here, **{k: measurement(measured.get(k)) for k in MEASURED[-3:]}})
        except FileNotFoundError:
            pass
        except (OSError, ValueError, AttributeError):
            notes.append(f"{_name(run)}: {RESOURCES} unreadable")
        if (setting, run.entry) not in histories and (folder / CSV_NAME).is_file():
            try:
                histories[setting, run.entry] = (run, read_history(folder / CSV_NAME))
            except (OSError, ValueError):
                notes.append(f"{_name(run)}: {CSV_NAME} unreadable")
    if not cases:
        raise ReportError(
            f"study {study.name}: no run has finished; expected a validation/summary.json "
            f"below {results}"
        )
    return Results(
        study,
        results,
        pd.concat(cases, ignore_index=True)[CASES],
        pd.concat(epochs, ignore_index=True)[EPOCHS] if epochs else pd.DataFrame(columns=EPOCHS),
        pd.DataFrame(resources, columns=MEASURED).astype(dict.fromkeys(MEASURED[-3:], float)),
        histories,
        notes,
        {name: _test_ratio(name, study.folds, preprocessed) for name in study.datasets},
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


def _test_ratio(dataset: str, folds: Sequence[int], preprocessed: Path | None) -> float:
    """Return the mean ratio of test to other cases over the folds, 1/4 as in five folds if unknown.

    Cases that a fold neither trains nor tests count as training cases: the ratio stands for how much
    the training sets of two folds overlap, which is not more if they are small subsets.
    """
    try:
        splits = read_json(preprocessed / dataset / "splits_final.json") if preprocessed else []
        total = len({case for split in splits for case in (*split["train"], *split["val"])})
        tested = [len(splits[fold]["val"]) for fold in folds]
        return float(np.mean([count / (total - count) for count in tested]))
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError):
        return 1 / 4


def read_dataset_json(
    fold: Path, dataset: str, preprocessed: Path | None, raw: Path | None
) -> dict[str, Any]:
    """Return the ``dataset.json`` of the training or else of the data set; empty if there is none."""
    for folder in (fold.parent, preprocessed and preprocessed / dataset, raw and raw / dataset):
        try:
            if folder is not None:
                return dict(read_json(folder / "dataset.json"))
        except (OSError, ValueError, TypeError):
            continue
    return {}


def class_key(value: Any) -> tuple[int, ...]:
    """Return the labels of a class or region, given as 3, [1, 2], "3" or "(1, 2)"."""
    return tuple(int(number) for number in re.findall(r"-?\d+", str(value)))


def strip_ending(file: str) -> str:
    """Return the name of a case from the name of its file."""
    name = Path(file).name
    return name.removesuffix(".nii.gz") if name.endswith(".nii.gz") else Path(name).stem


def _name(run: Run) -> str:
    return f"{run.dataset}, {run.configuration}, {run.plans}, {run.trainer}, fold {run.fold}"


def _replace_unprintable(text: str) -> str:
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)


def read_cases(fold: Path, labels: Any) -> list[dict[str, Any]]:
    """Return one row for each class of each validation case of a fold, sorted by case.

    Args:
        fold: nnU-Net's ``fold_X``.
        labels: the ``labels`` of the ``dataset.json``, for the names of the classes.

    Returns:
        Rows with case, class, dice in [0, 1] or NaN, labels (those of the class or region), and
        prediction_file and reference_file as they are in the ``summary.json``.

    Raises:
        FileNotFoundError: the fold has not been validated.
        Exception: the ``summary.json`` is damaged, one of ``DAMAGE``.
    """
    summary = read_json(fold / "validation" / "summary.json")
    labels = labels if isinstance(labels, dict) else {}
    names: dict[tuple[int, ...], str] = {}
    for given, value in labels.items():
        name, key = _replace_unprintable(str(given)), class_key(value)
        names[key] = f"{name} (label {value})" if name in names.values() or not name else name
    order = {key: position for position, key in enumerate(names)}
    rows = []
    seen = set()
    for case in summary["metric_per_case"]:
        name = _replace_unprintable(strip_ending(case["prediction_file"]))
        if name in seen:
            raise ValueError(f"duplicate case {name}")
        seen.add(name)
        # The keys in the file are sorted as text, 10 before 2; use the data set's order.
        keys = {class_key(text): text for text in case["metrics"]}
        for key in sorted(keys, key=lambda k: (order.get(k, len(order)), k)):
            if key == (0,):
                continue
            value = case["metrics"][keys[key]]["Dice"]
            dice = np.nan if value is None else float(value)
            if not (0 <= dice <= 1 or np.isnan(dice)):
                raise ValueError(f"Dice {dice}")
            label = names.get(key, "label " + " + ".join(map(str, key)))
            files = {k: str(case.get(k, "")) for k in ("prediction_file", "reference_file")}
            rows.append({"case": name, "class": label, "dice": dice, "labels": key, **files})
    if not rows:
        raise ValueError("no cases")
    return sorted(rows, key=lambda row: str(row["case"]))


def in_order(values: Sequence[Any]) -> list[Any]:
    """Return the unique values in the order of their first appearance."""
    return list(dict.fromkeys(values))
