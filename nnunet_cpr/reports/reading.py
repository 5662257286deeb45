"""Reading of a study's runs from nnU-Net's folders."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nnunet_cpr.files import read_json
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT, LOG_COLUMNS, read_logs
from nnunet_cpr.nnunet.history import CSV_NAME, has_bounds
from nnunet_cpr.nnunet.is_finished import (
    DAMAGE,
    Validation,
    find_validation,
    is_outdated,
    read_summary,
    summary_file,
)
from nnunet_cpr.nnunet.run_record import RunRecord, read_record, record_of
from nnunet_cpr.refusals import Refusal, counted
from nnunet_cpr.reports.results import (
    ASSUMED,
    CONDITION,
    FALSELY_FOUND,
    INCOMPLETE,
    NOT_FOUND,
    RECORDED,
    RUN,
    UNSEEDED,
    Flaw,
    SplitRatio,
    StudyResults,
)
from nnunet_cpr.studies.plans_and_weights import (
    with_other_cases,
    with_other_plans,
    with_other_training,
    with_other_weights,
    with_seen_cases,
)
from nnunet_cpr.studies.state import cases_of_fold, validation_cases
from nnunet_cpr.studies.study import Run, Study

VOXELS = ["predicted_voxels", "true_voxels"]
CASES = [*CONDITION, "fold", "seed", "case", "class", "trainer", "dice", "empty", *VOXELS]
_UNSET = "the bounds of CPR were never set, so nothing was regularized"
EPOCHS = [*CONDITION, "fold", "seed", "trainer", *LOG_COLUMNS]


def read_results(
    study: Study, results: Path, splits: Path | None = None, preprocessed: Path | None = None
) -> StudyResults:
    """Read all runs of a study.

    Args:
        study: the study.
        results: nnU-Net's ``nnUNet_results``.
        splits: the study's record of the splits of its data sets, if there is one.
        preprocessed: nnU-Net's ``nnUNet_preprocessed``, whose folds say which cases a run should have
            where the study has no record.

    Raises:
        Refusal: the study has no data set, or no run has finished.
    """
    if not study.datasets:
        raise Refusal(f"study {study.name}: expected a data set, got none", "add --dataset")
    cases, epochs = [], []
    finished: dict[Run, Validation] = {}
    flaws: list[Flaw] = []
    notes: list[str] = []
    for condition, run in study.runs_by_condition():
        folder = run.folder(results)
        seed = UNSEEDED if run.seed is None else run.seed
        here = dict(zip(RUN, (*condition, run.entry, run.fold, seed)))
        title = f"{run.dataset}, {run.configuration}, {run.plans}, {run.trainer}, fold {run.fold}"
        try:
            validation = find_validation(folder)
            if validation is not None:
                cases.append(read_cases(folder).assign(**here)[CASES])
                finished[run] = validation
            elif summary_file(folder).exists():
                reason = "older than a checkpoint" if is_outdated(folder) else "unreadable"
                notes.append(f"{title}: validation/summary.json {reason}; counts as unfinished")
        except DAMAGE:  # of dataset.json
            notes.append(f"{title}: validation/summary.json unreadable; counts as unfinished")
        if (folder / CSV_NAME).is_file() and not has_bounds(folder / CSV_NAME):
            flaws.append(Flaw(run, _UNSET, "bounds of {} were never set"))
        logs = read_logs(folder)
        if len(logs):
            epochs.append(logs.assign(**here)[EPOCHS])
    if not cases:
        raise Refusal(
            f"study {study.name}: no run has finished",
            f"expected a validation/summary.json below {results}",
        )
    notes += _describe_records({run: record_of(run.folder(results)) for run in finished})
    unknown = sum(read_record(run.folder(results)) is None for run in finished)
    if unknown:
        notes.append(
            f"{unknown} of {len(finished)} runs have no record of the cases and plans that they were "
            "made from, which version 0.4.0 began to write."
        )
    return StudyResults(
        study,
        results,
        pd.concat(cases, ignore_index=True),
        pd.concat(epochs, ignore_index=True) if epochs else pd.DataFrame(columns=EPOCHS),
        [
            *flaws,
            *_find_incomplete_runs(finished, splits, preprocessed),
            *_find_other_runs(list(finished), results, splits, preprocessed),
        ],
        notes,
        {name: _test_ratio(name, study.folds, splits) for name in study.datasets},
    )


def _describe_records(records: Mapping[Run, RunRecord]) -> Iterator[str]:
    """Yield the versions that trained the runs, and the cases of their folds."""
    versions = Counter(
        ", ".join(f"{k} {v}" for k, v in each.versions.items()) for each in records.values()
    )
    versions.pop("", None)
    if versions:
        shown = "; ".join(f"{text} ({counted(n, 'run')})" for text, n in versions.most_common())
        yield f"Trained with {shown}."
    of_dataset: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for run, each in records.items():
        if each.split:
            of_dataset[run.dataset].add((len(each.split["train"]), len(each.split["val"])))
    for dataset, sizes in of_dataset.items():
        train, val = (
            f"{min(part)} to {max(part)}" if min(part) < max(part) else str(min(part))
            for part in zip(*sizes)
        )
        yield f"{dataset}: trained on {train} and validated on {val} cases a fold, by the runs' records."


def _find_incomplete_runs(
    finished: Mapping[Run, Validation], splits: Path | None, preprocessed: Path | None
) -> Iterator[Flaw]:
    """Yield the runs that lack cases of their fold, by its file, else by what others have."""
    of_others: dict[tuple[str, int], frozenset[str]] = defaultdict(frozenset)
    for run, validation in finished.items():
        of_others[run.dataset, run.fold] |= validation.cases
    for run, validation in finished.items():
        expected = validation_cases(run, splits, preprocessed) or of_others[run.dataset, run.fold]
        if missing := validation.missing(expected):
            left = len(expected) - len(missing)
            yield Flaw(run, f"validated on {left} of the {len(expected)} cases of its fold", INCOMPLETE)


def _find_other_runs(
    finished: Sequence[Run], results: Path, splits: Path | None, preprocessed: Path | None
) -> Iterator[Flaw]:
    """Yield the runs that are not what the study says."""
    cases = partial(cases_of_fold, recorded=splits, preprocessed=preprocessed)
    for run, difference in with_other_cases(finished, results, cases):
        yield Flaw(run, f"{difference} of its fold", "{} has runs on other cases")
    for run, settings in with_other_training(finished, results):
        warning = f"it differs from other runs of its trainer in {settings}"
        yield Flaw(run, warning, "{} has runs that trained something else")
    for run, seen in with_seen_cases(finished, results, cases):
        yield Flaw(run, seen, "{} has runs whose weights have seen validation cases")
    for run in finished:
        validated = record_of(run.folder(results)).validated
        if validated.get("checkpoint", FINAL_CHECKPOINT) != FINAL_CHECKPOINT:
            yield Flaw(
                run,
                f"validated with {validated['checkpoint']} of {validated['epochs']} epochs",
                "{} has runs validated with another checkpoint",
            )
    for run, difference in with_other_weights(finished, results):
        yield Flaw(run, difference, "{} has runs that began with other weights")
    for run, settings in with_other_plans(finished, results):
        warning = f"its {run.plans} differ from those of other runs in {settings}"
        yield Flaw(run, warning, "{} has runs with other plans of the same name")


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


def ignore_label(dataset: dict[str, Any]) -> int | None:
    """Return the label of the voxels that do not count, None if a ``dataset.json`` has none."""
    return dict(dataset.get("labels") or {}).get("ignore")


def counted_voxels(truth: np.ndarray, ignore: int | None) -> np.ndarray:
    """Return the mask of the voxels that metrics and pictures count."""
    return np.ones(truth.shape, bool) if ignore is None else truth != ignore


def class_key(value: Any) -> tuple[int, ...]:
    """Return the labels of a class or region, given as 3, [1, 2], "3" or "(1, 2)"."""
    return tuple(int(number) for number in re.findall(r"-?\d+", str(value)))


def read_cases(fold: Path) -> pd.DataFrame:
    """Return one row for each class of each validation case of a fold, sorted by case.

    Args:
        fold: nnU-Net's ``fold_X``.

    Returns:
        The columns case, class, dice in [0, 1] or NaN, labels (those of the class or region), empty
        (:data:`NOT_FOUND`, :data:`FALSELY_FOUND` or ""), predicted_voxels and true_voxels, and
        prediction_file and reference_file as they are in the ``summary.json``.

    Raises:
        FileNotFoundError: the fold has not been validated.
        Exception: the ``summary.json`` is damaged, one of ``DAMAGE``.
    """
    labels = dict(read_dataset_json(fold).get("labels") or {})
    names = {class_key(value): str(name) for name, value in labels.items()}
    order = {key: position for position, key in enumerate(names)}
    rows = []
    for name, case in read_summary(fold).items():
        files = {key: str(case.get(key, "")) for key in ("prediction_file", "reference_file")}
        # The keys in the file are sorted as text, 10 before 2; use the data set's order.
        metrics = {class_key(key): values for key, values in case["metrics"].items()}
        for key in sorted(metrics.keys() - {(0,)}, key=lambda k: (order.get(k, len(order)), k)):
            label = names.get(key, "label " + " + ".join(map(str, key)))
            dice = metrics[key]["Dice"]
            voxels = [metrics[key].get("n_pred"), metrics[key].get("n_ref")]
            row = {
                "case": name,
                "class": label,
                "dice": dice,
                "labels": key,
                "empty": _empty_mask(*voxels),
            }
            rows.append(row | dict(zip(VOXELS, voxels)) | files)
    table = pd.DataFrame(rows).astype(
        {"dice": float, **dict.fromkeys(VOXELS, float)}
    )  # None becomes NaN
    return table.sort_values("case", kind="stable")


def _empty_mask(predicted: int | None, true: int | None) -> str:
    """Return which mask is the only empty one; "" for neither, both, and unknown numbers of voxels."""
    if true and predicted == 0:
        return NOT_FOUND
    return FALSELY_FOUND if predicted and true == 0 else ""
