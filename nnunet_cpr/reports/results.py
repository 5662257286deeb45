"""Results of a study's runs, read from nnU-Net's folders into tables."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nnunet_cpr._files import read_json
from nnunet_cpr.nnunet.fold_files import LOG_COLUMNS, RESOURCES, measurement, read_logs
from nnunet_cpr.nnunet.history import CSV_NAME, read_history
from nnunet_cpr.studies.definition import Run, Study, StudyError, TrainerEntry


class ReportError(StudyError):
    """No results to report; the message is one line."""


class Setting(NamedTuple):
    """Data set, configuration and plans, which the trainers of one table line share."""

    dataset: str
    configuration: str
    plans: str


SETTING = list(Setting._fields)
CASES = [*SETTING, "fold", "case", "class", "trainer", "dice"]
EPOCHS = [*SETTING, "fold", "trainer", *LOG_COLUMNS]
DAMAGE = (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)
"""Errors that a damaged ``summary.json`` can raise."""
MEASURED = [*SETTING, "fold", "trainer", "seconds", "peak_memory_bytes", "peak_gpu_memory_bytes"]


@dataclass(frozen=True)
class Results:
    """Content of a report.

    Attributes:
        study: the study.
        folder: nnU-Net's ``nnUNet_results``.
        cases: one row for each class of each validation case of each finished fold; ``dice`` in
            [0, 1], NaN where the class is in neither the truth nor the prediction.
        epochs: one row for each epoch in the training logs, of unfinished folds too; ``pseudo_dice``
            is the mean over the classes, in [0, 1].
        resources: time (seconds) and memory (bytes) of the runs that have recorded them.
        histories: (fold, history) of the first fold of each CPR trainer that has one.
        notes: one line for each unreadable file.
    """

    study: Study
    folder: Path
    cases: pd.DataFrame
    epochs: pd.DataFrame
    resources: pd.DataFrame
    histories: dict[tuple[Setting, str], tuple[int, pd.DataFrame]]
    notes: list[str]

    @property
    def settings(self) -> list[Setting]:
        """Data sets x configurations x plans, in the study's order."""
        study = self.study
        return [Setting(*s) for s in product(study.datasets, study.configurations, study.plans)]

    def run(self, setting: Setting, fold: int, trainer: str) -> Run:
        """Return a run of the study."""
        return Run(*setting, fold=fold, trainer=trainer)

    def finished(self, setting: Setting, trainer: str) -> list[int]:
        """Return the folds that have been validated."""
        rows = self.of(self.cases, setting)
        done = set(rows.loc[rows["trainer"] == trainer, "fold"])
        return [fold for fold in self.study.folds if fold in done]

    def of(self, table: pd.DataFrame, setting: Setting) -> pd.DataFrame:
        """Return the rows of a table that belong to a setting."""
        return table[(table[SETTING] == list(setting)).all(axis=1)]

    def title(self, setting: Setting) -> str:
        """Return the data set's name, with configuration and plans if there are several."""
        several = [True, len(self.study.configurations) > 1, len(self.study.plans) > 1]
        return ", ".join(part for part, said in zip(setting, several) if said)


def full_title(entry: TrainerEntry) -> str:
    """Return a trainer's group and label: a label such as "1e-3" is not clear without the group."""
    return f"{entry.group} {entry.title}" if entry.group else entry.title


def read_results(study: Study, results: Path, raw: Path | None, preprocessed: Path | None) -> Results:
    """Read all folds of a study.

    Args:
        study: the study.
        results: nnU-Net's ``nnUNet_results``.
        raw: nnU-Net's ``nnUNet_raw``, if there is one.
        preprocessed: nnU-Net's ``nnUNet_preprocessed``, if there is one.

    Raises:
        ReportError: the study has no data set, or no fold has finished.
    """
    if not study.datasets:
        raise ReportError(f"study {study.name}: expected a data set, got none; add --dataset")
    cases: list[dict[str, Any]] = []
    epochs: list[pd.DataFrame] = []
    resources: list[dict[str, Any]] = []
    histories: dict[tuple[Setting, str], tuple[int, pd.DataFrame]] = {}
    notes: list[str] = []
    for run in study.runs():
        folder = run.folder(results)
        setting = Setting(run.dataset, run.configuration, run.plans)
        here = {**setting._asdict(), "fold": run.fold, "trainer": run.trainer}
        try:
            labels = read_dataset_json(folder, run.dataset, preprocessed, raw).get("labels")
            cases += [{**here, **case} for case in read_cases(folder, labels)]
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
        if (setting, run.trainer) not in histories and (folder / CSV_NAME).is_file():
            try:
                histories[setting, run.trainer] = (run.fold, read_history(folder / CSV_NAME))
            except (OSError, ValueError):
                notes.append(f"{_name(run)}: {CSV_NAME} unreadable")
    if not cases:
        raise ReportError(
            f"study {study.name}: no fold has finished; expected a validation/summary.json "
            f"below {results}"
        )
    return Results(
        study,
        results,
        pd.DataFrame(cases, columns=CASES),
        pd.concat(epochs, ignore_index=True)[EPOCHS] if epochs else pd.DataFrame(columns=EPOCHS),
        pd.DataFrame(resources, columns=MEASURED).astype(dict.fromkeys(MEASURED[-3:], float)),
        histories,
        notes,
    )


def fold_means(cases: pd.DataFrame) -> pd.DataFrame:
    """Return nnU-Net's mean foreground Dice of each fold: the mean of the classes' means.

    Classes without a Dice in the fold are ignored.

    Returns:
        Columns dataset, configuration, plans, trainer, fold, dice in [0, 1].
    """
    classes = class_means(cases)
    return classes.groupby([*SETTING, "trainer", "fold"], sort=False)["dice"].mean().reset_index()


def class_means(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the mean Dice of each class in each fold, over the cases where it is defined."""
    by = [*SETTING, "trainer", "fold", "class"]
    return cases.groupby(by, sort=False)["dice"].mean().reset_index()


def case_means(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the mean foreground Dice of each case, over the classes where it is defined."""
    by = [*SETTING, "trainer", "fold", "case"]
    return cases.groupby(by, sort=False)["dice"].mean().reset_index()


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


def strip_ending(file: str, ending: str = "") -> str:
    """Return the name of a case from the name of its file."""
    name = Path(file).name
    for known in (ending, ".nii.gz"):
        if known and name.endswith(known):
            return name[: -len(known)]
    return Path(name).stem


def _name(run: Run) -> str:
    return f"{run.dataset}, {run.configuration}, {run.plans}, {run.trainer}, fold {run.fold}"


def _printable(text: str) -> str:
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
    names = {class_key(value): _printable(name) for name, value in labels.items()}
    order = {key: position for position, key in enumerate(names)}
    rows = []
    seen = set()
    for case in summary["metric_per_case"]:
        name = _printable(strip_ending(case["prediction_file"]))
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
