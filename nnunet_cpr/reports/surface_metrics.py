"""HD95 and normalized surface Dice (NSD) of validation cases by MONAI, with a cache of the results."""

from __future__ import annotations

import hashlib
import io
import json
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nnunet_cpr.environment import available_cores
from nnunet_cpr.files import atomic_write, read_json
from nnunet_cpr.nnunet.is_finished import DAMAGE, summary_file
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.reports.reading import counted_voxels, ignore_label, read_cases, read_dataset_json
from nnunet_cpr.reports.results import RUN, UNSEEDED, StudyResults
from nnunet_cpr.studies.study import DEFAULT_TOLERANCE, SURFACE_METRICS

CACHE_NAME = "surface_metrics.json"
_SLACK = 1e-6
"""Relative slack of the tolerance and of 95 %. NIfTI headers store spacings as float32, so that a
distance of exactly the tolerance can come out slightly larger."""

_Labels = tuple[int, ...]
_Metrics = dict[str, list[float | None]]
"""HD95 and NSD of each class as in the cache; None for NaN."""
_Job = tuple[Path, Path, list[_Labels], dict[str, Any], float]
"""Prediction, truth and classes of a case, ``dataset.json``, tolerance."""


def add_surface_metrics(results: StudyResults, preprocessed: Path | None) -> StudyResults:
    """Return results whose cases have the columns hd95 (mm) and nsd (in [0, 1]).

    Results of a study that has neither of these metrics are returned as they are; without MONAI with a
    note, as for every case whose files cannot be used.

    Args:
        results: results of a study.
        preprocessed: nnU-Net's folder, for the ground truth.

    Raises:
        Refusal: MONAI is missing, and the study has no other metric.
    """
    study = results.study
    if not {*SURFACE_METRICS} & {*study.metrics}:
        return results
    if find_spec("monai") is None:
        note = "HD95 and NSD are missing: they need MONAI; run pip install 'nnunet-cpr[surface]'"
        if {*study.metrics} <= {*SURFACE_METRICS}:
            raise Refusal(note)
        return replace(results, notes=[*results.notes, note])
    tables, notes = [], []
    for key in results.cases[RUN].drop_duplicates().itertuples(index=False):
        seed = None if key.seed == UNSEEDED else key.seed
        run = study.run(key.dataset, key.configuration, key.plans, key.fold, key.trainer, seed)
        truths = preprocessed and preprocessed / run.dataset / "gt_segmentations"
        table, of_run = fold_surface_metrics(run.folder(results.folder), truths, study.tolerance)
        tables.append(table.assign(**key._asdict()))
        notes += [f"{run.trainer}, fold {run.fold}: {note}" for note in of_run]
    cases = results.cases.merge(pd.concat(tables), how="left", on=[*RUN, "case", "class"])
    return replace(results, cases=cases, notes=[*results.notes, *notes])


def fold_surface_metrics(
    fold: Path, truths: Path | None, tolerance: float = DEFAULT_TOLERANCE
) -> tuple[pd.DataFrame, list[str]]:
    """Return HD95 and NSD of each class of each validation case of a fold.

    Results are read from ``validation/surface_metrics.json`` if they belong to this ``summary.json``,
    tolerance and version of MONAI; others are computed and written there.

    Args:
        fold: nnU-Net's ``fold_X`` with ``validation/summary.json`` and the predictions.
        truths: folder with the ground truth, for results of another machine, where the paths in
            ``summary.json`` do not exist.
        tolerance: tolerance of the NSD in mm.

    Returns:
        A table with the columns case, class, hd95 in mm and nsd in [0, 1], both NaN where ground truth
        and prediction are empty or a file cannot be used, and one line for each case of the latter.
    """
    summary = summary_file(fold)
    table = read_cases(fold)
    dataset = _dataset_with_reader(fold)
    belongs_to = {
        "format": 1,
        "library": f"MONAI {version('monai')}",
        "summary_sha256": hashlib.sha256(summary.read_bytes()).hexdigest(),
        "tolerance_mm": float(tolerance),
        "ignore_label": ignore_label(dataset),
    }
    cache = summary.with_name(CACHE_NAME)
    found, notes = _read_cache(cache, belongs_to), []
    jobs: dict[str, _Job] = {}
    for case, rows in table.groupby("case", sort=False):
        if case not in found:
            prediction, reference = rows.iloc[0][["prediction_file", "reference_file"]].map(Path)
            truth = reference if reference.is_file() or truths is None else truths / prediction.name
            labels = list(rows["labels"])
            jobs[case] = (summary.with_name(prediction.name), truth, labels, dataset, tolerance)
    for case, outcome in zip(jobs, _compute(list(jobs.values()))):
        if isinstance(outcome, str):
            notes.append(f"{case}: no HD95 and NSD; {outcome}")
        else:
            found[case] = outcome
    try:
        if jobs:
            content = {**belongs_to, "cases": dict(sorted(found.items()))}
            with atomic_write(cache) as temporary:
                temporary.write_text(json.dumps(content, indent=1))
    except OSError as error:  # of a folder of another user
        notes.append(f"HD95 and NSD are not cached in {cache}: {error.strerror}")
    keys = zip(table["case"], table["labels"].map(_key))
    values = [found.get(case, {}).get(key, (None, None)) for case, key in keys]
    table[["hd95", "nsd"]] = np.array(values, float)  # None becomes NaN
    return table[["case", "class", "hd95", "nsd"]], notes


def compute_surface_metrics(
    prediction: np.ndarray,
    truth: np.ndarray,
    spacing: Sequence[float],
    tolerance: float = DEFAULT_TOLERANCE,
) -> tuple[float, float]:
    """Return HD95 and NSD of a predicted mask, by the surface elements of Nikolov et al. (2018).

    A surface element lies between 2 x 2 x 2 voxels (2 x 2 pixels) that are not all equal. Its area
    (length) is that of the marching-cubes surface there. The NSD is the fraction of the area of both
    surfaces that is at most ``tolerance`` away from the other surface. HD95 is the larger of the two
    directed 95th percentiles of the distances, weighted by area. If one mask is empty, the NSD is 0 and
    HD95 is the diagonal of the image, an upper bound on all distances in it.

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
    both_ways = (edges, edges[::-1])
    distances = [np.asarray(get_surface_distance(of, to, spacing=spacing)) for of, to in both_ways]
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


def _compute(jobs: list[_Job]) -> list[_Metrics | str]:
    """Return the metrics of each case, or the reason why there are none."""
    processes = min(available_cores(), len(jobs) // 8)  # each takes seconds to start
    if processes <= 1:
        return [_measure(*job) for job in jobs]
    # A forked copy of this process can hang in torch's threads.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _use_one_thread) as pool:
        outcomes: list[_Metrics | str] = []
        with suppress(BrokenProcessPool):
            outcomes.extend(pool.map(_measure, *zip(*jobs)))
        lost = len(jobs) - len(outcomes)
        return outcomes + ["a process was killed; is the memory too small?"] * lost


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _dataset_with_reader(fold: Path) -> dict[str, Any]:
    """Return the ``dataset.json`` beside a fold, with the reader that nnU-Net chose for its plans."""
    dataset = {"file_ending": ".nii.gz", **read_dataset_json(fold)}
    with suppress(*DAMAGE):  # results can be copied without the plans
        plans = read_json(fold.parent / "plans.json")
        dataset["overwrite_image_reader_writer"] = plans["image_reader_writer"]
    return dataset


def _measure(
    prediction_file: Path,
    truth_file: Path,
    classes: list[_Labels],
    dataset: dict[str, Any],
    tolerance: float,
) -> _Metrics | str:
    """Return the metrics of each class of a case, or the reason why there are none."""
    try:
        (prediction, spacing), (truth, _) = (_read(f, dataset) for f in (prediction_file, truth_file))
    except Exception as error:  # each library that reads images has errors of its own
        return " ".join(str(error).split())[-200:]
    if prediction.shape != truth.shape:
        return f"the prediction has shape {prediction.shape}, the ground truth {truth.shape}"
    prediction = np.where(counted_voxels(truth, ignore_label(dataset)), prediction, 0)
    metrics = {}
    for labels in classes:
        masks = np.isin(prediction, labels), np.isin(truth, labels)
        found = compute_surface_metrics(*masks, spacing, tolerance)
        metrics[_key(labels)] = [None if math.isnan(value) else value for value in found]
    return metrics


def _key(labels: _Labels) -> str:
    """Return the name of a class in the cache."""
    return ", ".join(map(str, labels))


def _read(path: Path, dataset: dict[str, Any]) -> tuple[np.ndarray, Sequence[float]]:
    """Return the labels [z, y, x] and the spacing in mm as nnU-Net reads them."""
    from nnunetv2.imageio.reader_writer_registry import determine_reader_writer_from_dataset_json

    # nnU-Net prints a traceback of each reader that it tries in vain, and missing spacings.
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        reader = determine_reader_writer_from_dataset_json(dataset, str(path), verbose=False)
        labels, properties = reader().read_seg(str(path))
    return labels[0], properties["spacing"]


def _read_cache(path: Path, belongs_to: dict[str, Any]) -> dict[str, _Metrics]:
    """Return the cached metrics of each case; empty if they belong to something else or are damaged."""
    try:
        content = read_json(path)
        cases = dict(content.pop("cases"))
        for classes in cases.values():
            np.array([*classes.values()], float).reshape(-1, 2)
        return cases if content == belongs_to else {}
    except DAMAGE:
        return {}
