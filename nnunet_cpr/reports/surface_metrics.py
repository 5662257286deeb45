"""HD95 and normalized surface Dice (NSD) of validation cases, cached beside ``summary.json``."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nnunet_cpr._cores import available_cores
from nnunet_cpr._files import atomic_write, finite_number, read_json
from nnunet_cpr.reports.case_files import read_volume, truth_file
from nnunet_cpr.reports.results import (
    DAMAGE,
    RUN,
    UNSEEDED,
    ReportError,
    Results,
    class_key,
    read_cases,
    read_dataset_json,
)
from nnunet_cpr.studies.definition import DEFAULT_TOLERANCE

CACHE_NAME = "surface_metrics.json"
COLUMNS = ["case", "class", "hd95", "nsd"]

_FORMAT = 1
_SLACK = 1e-6
"""Relative slack of the tolerance and of 95 %. NIfTI headers store spacings as float32, so that a
distance of exactly the tolerance can come out slightly larger."""
_WITHOUT_MM = (".png", ".bmp", ".tif", ".tiff")
"""Formats that nnU-Net reads with a spacing of 1: their headers have a resolution for printing."""

_Labels = tuple[int, ...]
_Metrics = dict[_Labels, tuple[float, float]]


class _Job(NamedTuple):
    """Files, classes and settings of one case."""

    prediction: Path
    truth: Path
    classes: list[_Labels]
    ignore: int | None
    tolerance: float


class _Unusable(Exception):
    """A case without metrics; the message is the reason."""


def add_surface_metrics(results: Results, raw: Path | None, preprocessed: Path | None) -> Results:
    """Return results whose cases have the columns hd95 and nsd, with notes about cases without them.

    Results of a study that has neither of these metrics are returned as they are.

    Args:
        results: results of a study.
        raw, preprocessed: nnU-Net's folders, as for :func:`fold_surface_metrics`.

    Raises:
        ReportError: MONAI is not installed.
    """
    study = results.study
    if not {"hd95", "nsd"} & set(study.metrics):
        return results
    finished = results.cases[RUN].drop_duplicates()
    runs = set(finished.itertuples(index=False, name=None))
    tables, notes = [], []
    for run in study.runs():
        seed = UNSEEDED if run.seed is None else run.seed
        key = (run.dataset, run.configuration, run.plans, run.entry, run.fold, seed)
        if key not in runs:
            continue
        folder = run.folder(results.folder)
        table, of_run = fold_surface_metrics(folder, run.dataset, raw, preprocessed, study.tolerance)
        tables.append(table.assign(**dict(zip(RUN, key))))
        notes += [f"{run.trainer}, fold {run.fold}: {note}" for note in of_run]
    keys = [*RUN, "case", "class"]
    found = pd.concat(tables).drop_duplicates(keys)
    cases = results.cases.merge(found, how="left", on=keys)
    return replace(results, cases=cases, notes=[*results.notes, *notes])


def fold_surface_metrics(
    fold: Path,
    dataset: str,
    raw: Path | None,
    preprocessed: Path | None,
    tolerance: float = DEFAULT_TOLERANCE,
    processes: int | None = None,
) -> tuple[pd.DataFrame, list[str]]:
    """Return HD95 and NSD of each class of each validation case of a fold.

    Results are read from ``validation/surface_metrics.json`` if they belong to this ``summary.json``,
    tolerance and version of MONAI. All others are computed and written there.

    Args:
        fold: nnU-Net's ``fold_X`` with ``validation/summary.json`` and the predictions.
        dataset: nnU-Net's name of the data set.
        raw: nnU-Net's ``nnUNet_raw``, for ground truth that is not where ``summary.json`` says.
        preprocessed: nnU-Net's ``nnUNet_preprocessed``, likewise; it comes before ``raw``.
        tolerance: tolerance of the NSD in mm.
        processes: number of processes; 1 computes in this one. Defaults to the CPUs, at most 8.

    Returns:
        A table with the columns case and class (as named by :func:`read_cases`), hd95 in mm and nsd in
        [0, 1], and one-line notes. Both metrics are NaN where ground truth and prediction of a class are
        empty, and where the files of a case cannot be used; the notes have the reason.

    Raises:
        ReportError: MONAI is not installed, or ``summary.json`` cannot be read.
        ValueError: the tolerance or the number of processes is not positive.

    Example:
        >>> import SimpleITK as sitk, tempfile
        >>> fold = Path(tempfile.mkdtemp(), "fold_0")
        >>> (fold / "validation").mkdir(parents=True)
        >>> file = fold / "validation" / "case_1.nii.gz"
        >>> sitk.WriteImage(sitk.GetImageFromArray(np.ones((4, 4, 4), np.uint8)), str(file))
        >>> case = {"metrics": {"1": {"Dice": 1.0}}, "prediction_file": str(file)}
        >>> summary = {"metric_per_case": [case | {"reference_file": str(file)}]}
        >>> _ = (fold / "validation" / "summary.json").write_text(json.dumps(summary))
        >>> table, notes = fold_surface_metrics(fold, "Dataset001_Toy", None, None)
        >>> table.to_dict("records")
        [{'case': 'case_1', 'class': 'label 1', 'hd95': 0.0, 'nsd': 1.0}]
    """
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise ValueError(f"tolerance: expected a positive number of mm, got {tolerance}")
    if processes is not None and processes < 1:
        raise ValueError(f"processes: expected at least 1, got {processes}")
    labels = read_dataset_json(fold, dataset, preprocessed, raw).get("labels")
    summary = fold / "validation" / "summary.json"
    try:
        digest = hashlib.sha256(summary.read_bytes()).hexdigest()
        rows = read_cases(fold, labels)
    except DAMAGE:
        raise ReportError(
            f"{summary}: expected results of a validation; validate the fold again"
        ) from None
    ignore = labels.get("ignore") if isinstance(labels, dict) else None
    ignore = ignore if type(ignore) is int else None
    belongs_to = {
        "format": _FORMAT,
        "library": f"MONAI {_library_version()}",
        "summary_sha256": digest,
        "tolerance_mm": float(tolerance),
        "ignore_label": ignore,
    }
    cache = summary.with_name(CACHE_NAME)
    found = _read_cache(cache, belongs_to)
    jobs: dict[str, _Job] = {}
    reasons: dict[str, str] = {}
    for case, group in groupby(rows, key=lambda row: str(row["case"])):
        classes = list(group)
        wanted = [row["labels"] for row in classes]
        if list(found.get(case, {})) == wanted:
            continue
        found.pop(case, None)
        name = Path(classes[0]["prediction_file"]).name
        prediction = summary.with_name(name)
        if not prediction.is_file():
            reasons[case] = "the prediction was not found"
            continue
        try:
            reference = Path(classes[0]["reference_file"])
            truth = truth_file(name, dataset, raw, preprocessed, reference)
            jobs[case] = _Job(prediction, truth, wanted, ignore, tolerance)
        except FileNotFoundError:
            reasons[case] = "the ground truth was not found; check nnUNet_raw and nnUNet_preprocessed"
    for case, outcome in _compute(jobs, processes or min(8, available_cores())).items():
        if isinstance(outcome, str):
            reasons[case] = outcome
        else:
            found[case] = outcome
    notes = _notes(reasons)
    if jobs.keys() & found.keys():
        try:
            _write_cache(cache, belongs_to, found)
        except OSError as error:
            notes.append(f"HD95 and NSD not cached in {cache}: {error.strerror or error}")
    nothing = (math.nan, math.nan)
    table = [
        (row["case"], row["class"], *found.get(str(row["case"]), {}).get(row["labels"], nothing))
        for row in rows
    ]
    return pd.DataFrame(table, columns=COLUMNS), notes


def compute_surface_metrics(
    prediction: np.ndarray,
    truth: np.ndarray,
    spacing: Sequence[float],
    tolerance: float = DEFAULT_TOLERANCE,
) -> tuple[float, float]:
    """Return HD95 and NSD of a predicted mask, by the surface elements of Nikolov et al. (2018).

    A surface element lies between 2 x 2 x 2 voxels (2 x 2 pixels) that are not all equal. Its area
    (length) is that of the marching-cubes surface there. Voxels outside the image are background.

    The NSD is the fraction of the area of both surfaces that is at most ``tolerance`` away from the
    other surface. HD95 is the larger of the two directed 95th percentiles of the distances, weighted by
    area.

    If one mask is empty, the NSD is 0 and HD95 is the diagonal of the image, an upper bound on all
    distances in it.

    Args:
        prediction: bool array with 2 or 3 dimensions. An axis of length 1 is dropped from a 3D array.
        truth: bool array of the same shape.
        spacing: distance in mm between neighbouring voxels along each axis.
        tolerance: tolerance of the NSD in mm.

    Returns:
        HD95 in mm and NSD in [0, 1]; both NaN if both masks are empty.

    Example:
        >>> truth = np.zeros((8, 9, 10), bool)
        >>> truth[2:6, 2:6, 2:6] = True
        >>> prediction = np.roll(truth, 1, axis=0)
        >>> compute_surface_metrics(prediction, truth, spacing=(5.0, 1.0, 1.0), tolerance=5.0)
        (5.0, 1.0)
        >>> compute_surface_metrics(np.zeros_like(truth), truth, spacing=(5.0, 1.0, 1.0))
        (42.20189569201838, 0.0)
    """
    from monai.metrics import get_mask_edges, get_surface_distance

    if truth.ndim == 3 and truth.shape.count(1) == 1:
        # A slice is an area. As a volume, all of its voxels would be at the surface.
        axis = truth.shape.index(1)
        prediction, truth = prediction.squeeze(axis), truth.squeeze(axis)
        spacing = [mm for position, mm in enumerate(spacing) if position != axis]
    either = prediction | truth
    if not either.any():
        return math.nan, math.nan
    if not (prediction.any() and truth.any()):
        return math.hypot(*(n * mm for n, mm in zip(truth.shape, spacing))), 0.0
    crop = tuple(slice(positions.min(), positions.max() + 1) for positions in np.nonzero(either))
    *edges, prediction_areas, truth_areas = map(
        np.asarray, get_mask_edges(prediction[crop], truth[crop], spacing=spacing)
    )
    areas = [prediction_areas[edges[0]], truth_areas[edges[1]]]
    distances = [
        np.asarray(get_surface_distance(of, to, spacing=spacing))
        for of, to in ((edges[0], edges[1]), (edges[1], edges[0]))
    ]
    limit = tolerance * (1 + _SLACK)
    within = sum(area[distance <= limit].sum() for distance, area in zip(distances, areas))
    hd95 = max(_percentile(distance, area, 0.95) for distance, area in zip(distances, areas))
    return hd95, float(within / sum(area.sum() for area in areas))


def _percentile(values: np.ndarray, weights: np.ndarray, fraction: float) -> float:
    """Return the smallest value such that values up to it have this fraction of the weights."""
    order = np.argsort(values)
    sums = np.cumsum(weights[order], dtype=float)
    position = np.searchsorted(sums, fraction * sums[-1] * (1 - _SLACK))
    return float(values[order][position])


def _library_version() -> str:
    try:
        return version("monai")
    except PackageNotFoundError:
        raise ReportError(
            "HD95 and NSD: expected MONAI, which is not installed; run pip install 'nnunet-cpr[surface]'"
        ) from None


def _compute(jobs: dict[str, _Job], processes: int) -> dict[str, _Metrics | str]:
    """Return the metrics of each case, or the reason why there are none."""
    processes = min(processes, len(jobs))
    if processes <= 1:
        return {case: _measure(job) for case, job in jobs.items()}
    # A forked copy of this process can hang in torch's threads. A fork server imports torch and MONAI,
    # which takes seconds, only once for the processes of all folds.
    has_fork_server = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if has_fork_server else "spawn")
    if has_fork_server:
        context.set_forkserver_preload([__name__, "monai.metrics"])
    outcomes: dict[str, _Metrics | str] = _measure_in(processes, context, jobs)
    for case, job in jobs.items():  # without those that a killed process took with it
        if case not in outcomes:
            outcomes |= _measure_in(1, context, {case: job})
        outcomes.setdefault(case, "its process was killed, perhaps because memory was short")
    return outcomes


def _measure_in(
    processes: int, context: BaseContext, jobs: dict[str, _Job]
) -> dict[str, _Metrics | str]:
    """Return the outcomes of processes, without those after one of the processes was killed."""
    executor = ProcessPoolExecutor(processes, context, _use_one_thread)
    futures, outcomes = {}, {}
    try:
        with suppress(BrokenProcessPool):
            for case, job in jobs.items():
                futures[case] = executor.submit(_measure, job)
        for case, future in futures.items():
            with suppress(BrokenProcessPool):
                outcomes[case] = future.result()
    finally:
        executor.shutdown(cancel_futures=True)
    return outcomes


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _measure(job: _Job) -> _Metrics | str:
    """Return the metrics of each class of a case, or the reason why there are none."""
    try:
        prediction, _ = _read(job.prediction, "prediction")
        truth, header = _read(job.truth, "ground truth")
        spacing = _spacing(job.prediction, header)
        if prediction.shape != truth.shape:
            sizes = [" x ".join(map(str, array.shape)) for array in (prediction, truth)]
            return f"the prediction has {sizes[0]} voxels, the ground truth {sizes[1]}"
        if job.ignore is not None:
            prediction = np.where(truth == job.ignore, 0, prediction)
        metrics = {}
        for labels in job.classes:
            masks = np.isin(prediction, labels), np.isin(truth, labels)
            metrics[labels] = compute_surface_metrics(*masks, spacing, job.tolerance)
        return metrics
    except _Unusable as error:
        return str(error)
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError if memory is short
        reason = str(error).strip() or "not enough memory"
        return f"the computation failed: {reason.splitlines()[0]}"


def _read(path: Path, kind: str) -> tuple[np.ndarray, tuple[float, float, float]]:
    try:
        return read_volume(path)
    except (OSError, RuntimeError, ValueError, MemoryError):  # SimpleITK raises RuntimeError
        raise _Unusable(f"the {kind} cannot be read") from None


def _spacing(prediction: Path, header: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return the spacing in mm that nnU-Net uses for a case, in the order [z, y, x]."""
    if prediction.suffix.lower() in _WITHOUT_MM:
        try:  # nnU-Net writes the spacing of 3D TIFF files beside them
            z, y, x = read_json(prediction.with_suffix(".json"))["spacing"]
            header = (float(z), float(y), float(x))
        except FileNotFoundError:
            return 1.0, 1.0, 1.0
        except DAMAGE:
            raise _Unusable(
                f"the spacing in the {prediction.suffix} file's .json cannot be read"
            ) from None
    if not all(math.isfinite(mm) and mm > 0 for mm in header):
        raise _Unusable("the spacing is not positive")
    return header


def _notes(reasons: dict[str, str]) -> list[str]:
    """Return one line for each reason, with the first of its cases and the number of the others."""
    cases: dict[str, list[str]] = {}
    for case in sorted(reasons):
        cases.setdefault(reasons[case], []).append(case)
    notes = []
    for reason, (first, *others) in cases.items():
        more = f" and {len(others)} more" if others else ""
        notes.append(f"{first}{more}: no HD95 and NSD; {reason}")
    return notes


def _read_cache(path: Path, belongs_to: dict[str, Any]) -> dict[str, _Metrics]:
    """Return the cached metrics of each case; empty if they belong to something else or are damaged."""
    try:
        content = read_json(path)
        if {key: content[key] for key in belongs_to} != belongs_to:
            return {}
        return {
            case: {class_key(labels): _checked(*values) for labels, values in classes.items()}
            for case, classes in content["cases"].items()
        }
    except DAMAGE:
        return {}


def _checked(hd95: Any, nsd: Any) -> tuple[float, float]:
    if hd95 is None and nsd is None:
        return math.nan, math.nan
    distance, part = finite_number(hd95), finite_number(nsd)
    if distance is None or part is None or distance < 0 or not 0 <= part <= 1:
        raise ValueError("expected a distance and a number in [0, 1]")
    return distance, part


def _write_cache(path: Path, belongs_to: dict[str, Any], cases: dict[str, _Metrics]) -> None:
    content = {
        **belongs_to,
        "cases": {
            case: {
                ", ".join(map(str, labels)): [None if math.isnan(value) else value for value in values]
                for labels, values in cases[case].items()
            }
            for case in sorted(cases)
        },
    }
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False))
