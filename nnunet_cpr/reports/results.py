"""What nnU-Net and the trainers left in the folders of a study's folds, as tables."""

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
from nnunet_cpr.nnunet.fold_files import LARGEST, LOG_COLUMNS, RESOURCES, measurement, read_logs
from nnunet_cpr.nnunet.history import COLUMNS, CSV_NAME
from nnunet_cpr.studies.definition import Cell, Row, Study


class ReportError(Exception):
    """There is nothing to report; the message is one line."""


class Setting(NamedTuple):
    """What the trainers of one table row have in common."""

    dataset: str
    configuration: str
    plans: str


_LAST_EPOCH = 10**6
_TINIEST = 1e-45  # of float32
SETTING = list(Setting._fields)
CASES = [*SETTING, "fold", "case", "class", "trainer", "dice"]
EPOCHS = [*SETTING, "fold", "trainer", *LOG_COLUMNS]
MEASURED = [*SETTING, "fold", "trainer", "seconds", "peak_memory_bytes", "peak_gpu_memory_bytes"]


@dataclass(frozen=True)
class Results:
    """Everything that the report shows.

    Attributes:
        study: what was to be trained.
        folder: nnU-Net's ``nnUNet_results``.
        cases: one row for each class of each validation case of each finished fold; ``dice`` in
            [0, 1], NaN where the class is in neither the truth nor the prediction.
        epochs: one row for each epoch in the training logs, of unfinished folds too; ``pseudo_dice``
            is the mean over the classes, in [0, 1].
        resources: what was measured from outside, one row for each fold that has it; bytes.
        histories: of each CPR trainer its first fold that has one, as (fold, table).
        notes: files that could not be used, one line each.
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
        return settings_of(self.study)

    def cell(self, setting: Setting, fold: int, trainer: str) -> Cell:
        """One training of the study."""
        return Cell(*setting, fold=fold, trainer=trainer)

    def finished(self, setting: Setting, trainer: str) -> list[int]:
        """The folds that have been validated."""
        rows = self.of(self.cases, setting)
        done = set(rows.loc[rows["trainer"] == trainer, "fold"])
        return [fold for fold in self.study.folds if fold in done]

    def of(self, table: pd.DataFrame, setting: Setting) -> pd.DataFrame:
        """The rows of a table that belong to a setting."""
        return table[(table[SETTING] == list(setting)).all(axis=1)]

    def title(self, setting: Setting) -> str:
        """The data set's name, and what else tells its settings apart."""
        several = [True, len(self.study.configurations) > 1, len(self.study.plans) > 1]
        return ", ".join(part for part, said in zip(setting, several) if said)


def settings_of(study: Study) -> list[Setting]:
    """Data sets x configurations x plans, in the study's order."""
    return [Setting(*s) for s in product(study.datasets, study.configurations, study.plans)]


def full_title(row: Row) -> str:
    """A trainer's label with its group's: labels such as "1e-3" say little alone."""
    return f"{row.group} {row.title}" if row.group else row.title


def read_results(study: Study, results: Path, raw: Path | None, preprocessed: Path | None) -> Results:
    """Read all folds of a study.

    Args:
        study: what was to be trained.
        results: nnU-Net's ``nnUNet_results``.
        raw: nnU-Net's ``nnUNet_raw``, if there is one.
        preprocessed: nnU-Net's ``nnUNet_preprocessed``, if there is one.

    Raises:
        ReportError: the study names no data set, or none of its folds has finished.
    """
    if not study.datasets:
        raise ReportError(
            f"the study {study.name} names no data set; name one in its file or as an option"
        )
    cases: list[dict[str, Any]] = []
    epochs: list[pd.DataFrame] = []
    resources: list[dict[str, Any]] = []
    histories: dict[tuple[Setting, str], tuple[int, pd.DataFrame]] = {}
    notes: list[str] = []
    for cell in study.cells():
        folder = cell.folder(results)
        setting = Setting(cell.dataset, cell.configuration, cell.plans)
        here = {**setting._asdict(), "fold": cell.fold, "trainer": cell.trainer}
        try:
            labels = read_dataset_json(folder, cell.dataset, preprocessed, raw).get("labels")
            cases += [{**here, **case} for case in _read_cases(folder, labels)]
        except FileNotFoundError:
            pass  # not validated yet
        except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError):
            notes.append(f"{_name(cell)}: validation/summary.json cannot be read; counted as unfinished")
        if not (log := read_logs(folder)).empty:
            epochs.append(log.assign(**here))
        try:
            measured = read_json(folder / RESOURCES)
            resources.append({**here, **{k: measurement(measured.get(k)) for k in MEASURED[-3:]}})
        except FileNotFoundError:
            pass
        except (OSError, ValueError, AttributeError):
            notes.append(f"{_name(cell)}: {RESOURCES} cannot be read")
        if (setting, cell.trainer) not in histories and (folder / CSV_NAME).is_file():
            if (history := _read_history(folder / CSV_NAME)) is not None:
                histories[setting, cell.trainer] = (cell.fold, history)
            else:
                notes.append(f"{_name(cell)}: {CSV_NAME} cannot be read")
    if not cases:
        raise ReportError(
            f"no fold of the study {study.name} has finished: "
            f"none has a validation/summary.json below {results}"
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
    """The mean foreground Dice of each fold, as nnU-Net has it: the mean of the classes' means.

    A class that no case of the fold has does not count.

    Returns:
        Columns dataset, configuration, plans, trainer, fold, dice in [0, 1].
    """
    classes = class_means(cases)
    return classes.groupby([*SETTING, "trainer", "fold"], sort=False)["dice"].mean().reset_index()


def class_means(cases: pd.DataFrame) -> pd.DataFrame:
    """The mean Dice of each class in each fold, over the cases where it is defined."""
    by = [*SETTING, "trainer", "fold", "class"]
    return cases.groupby(by, sort=False)["dice"].mean().reset_index()


def case_means(cases: pd.DataFrame) -> pd.DataFrame:
    """The mean foreground Dice of each case, over the classes where it is defined."""
    by = [*SETTING, "trainer", "fold", "case"]
    return cases.groupby(by, sort=False)["dice"].mean().reset_index()


def read_dataset_json(
    fold: Path, dataset: str, preprocessed: Path | None, raw: Path | None
) -> dict[str, Any]:
    """The ``dataset.json`` that the training had, or the data set's; empty where there is none."""
    for folder in (fold.parent, preprocessed and preprocessed / dataset, raw and raw / dataset):
        try:
            if folder is not None:
                return dict(read_json(folder / "dataset.json"))
        except (OSError, ValueError, TypeError):
            continue
    return {}


def class_key(value: Any) -> tuple[int, ...]:
    """The labels of a class or region: from 3, [1, 2], or nnU-Net's keys "3" and "(1, 2)"."""
    return tuple(int(number) for number in re.findall(r"-?\d+", str(value)))


def strip_ending(file: str, ending: str = "") -> str:
    """A case's name from the name of its file."""
    name = Path(file).name
    for known in (ending, ".nii.gz"):
        if known and name.endswith(known):
            return name[: -len(known)]
    return Path(name).stem


def _name(cell: Cell) -> str:
    return f"{cell.dataset}, {cell.configuration}, {cell.plans}, {cell.trainer}, fold {cell.fold}"


def _printable(text: str) -> str:
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)


def _read_cases(fold: Path, labels: Any) -> list[dict[str, Any]]:
    summary = read_json(fold / "validation" / "summary.json")
    labels = labels if isinstance(labels, dict) else {}
    names = {class_key(value): _printable(name) for name, value in labels.items()}
    order = {key: position for position, key in enumerate(names)}
    rows = []
    seen = set()
    for case in summary["metric_per_case"]:
        name = _printable(strip_ending(case["prediction_file"]))
        if name in seen:
            raise ValueError(f"{name} is there twice")
        seen.add(name)
        # JSON's keys are sorted as text, 10 before 2; the data set's order says more.
        keys = {class_key(text): text for text in case["metrics"]}
        for key in sorted(keys, key=lambda k: (order.get(k, len(order)), k)):
            if key == (0,):
                continue
            value = case["metrics"][keys[key]]["Dice"]
            dice = np.nan if value is None else float(value)
            if not (0 <= dice <= 1 or np.isnan(dice)):
                raise ValueError(f"a Dice of {dice}")
            label = names.get(key, "label " + " + ".join(map(str, key)))
            rows.append({"case": name, "class": label, "dice": dice})
    if not rows:
        raise ValueError("a summary without cases")
    return sorted(rows, key=lambda row: str(row["case"]))


def _read_history(path: Path) -> pd.DataFrame | None:
    """The rows that are whole; a killed training may have torn the last one."""
    try:
        table = pd.read_csv(path, on_bad_lines="skip", encoding_errors="replace", dtype=str)
        numbers = [column for column in COLUMNS if column != "parameter"]
        table[numbers] = table[numbers].apply(pd.to_numeric, errors="coerce").astype(float)
    except (OSError, ValueError, KeyError):
        return None
    table = table.dropna(subset=["epoch", "parameter", "kappa", "multiplier"])
    tiny = table[["measure", "kappa", "multiplier"]].abs() < _TINIEST
    table[tiny.columns] = table[tiny.columns].mask(tiny, 0.0)
    table = table[
        table["epoch"].between(0, _LAST_EPOCH)
        & (table["epoch"] % 1 == 0)
        & (table["kappa"] >= 0)
        & table["multiplier"].between(0, LARGEST)
    ]
    table["measure"] = table["measure"].where(table["measure"].abs() <= LARGEST)
    return None if table.empty else table.astype({"epoch": int}).reset_index(drop=True)


def in_order(values: Sequence[Any]) -> list[Any]:
    """Each value once, in the order in which they come first."""
    return list(dict.fromkeys(values))
