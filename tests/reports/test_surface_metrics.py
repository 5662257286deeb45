"""HD95 and NSD against brute force, of whole folds, and their cache."""

from __future__ import annotations

import io
import json
import math
from functools import cache

import numpy as np
import pandas as pd
import pytest
import SimpleITK as sitk
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.console import Console
from skimage.measure import marching_cubes, mesh_surface_area

from nnunet_cpr.reports import surface_metrics as module
from nnunet_cpr.reports import write_report
from nnunet_cpr.reports.surface_metrics import (
    CACHE_NAME,
    compute_surface_metrics,
    fold_surface_metrics,
)
from tests.helpers.examples import examples
from tests.helpers.report_folds import LABELS, study, whole, write_fold

SPACING = (2.5, 0.7, 1.3)


# An oracle in float64 without code of MONAI: all surface elements, all pairwise distances.


@cache
def element_area(block: bytes, dimensions: int, spacing: tuple[float, ...]) -> float:
    """Return the area (length) of the surface between 2 x 2 x 2 voxels (2 x 2 pixels)."""
    values = np.frombuffer(block, bool).reshape((2,) * dimensions)
    # The surface is that of the voxels in the minority, so that a mask and its complement have the same.
    values = values if values.sum() <= values.size / 2 else ~values
    if dimensions == 3:
        vertices, faces, _, _ = marching_cubes(
            values.astype(float), 0.5, spacing=spacing, method="lorensen"
        )
        return mesh_surface_area(vertices, faces)
    halves = np.hypot(*spacing) / 2  # cuts off one pixel
    if values.sum() == 1:
        return halves
    if values[0, 0] == values[1, 1]:
        return 2 * halves
    return spacing[1] if values[0, 0] == values[0, 1] else spacing[0]


def elements(mask, spacing):
    """Return positions in mm and areas of the surface elements of a mask."""
    mask = np.pad(mask, 1)
    positions, areas = [], []
    for corner in np.ndindex(*(n - 1 for n in mask.shape)):
        block = mask[tuple(slice(start, start + 2) for start in corner)]
        if block.any() and not block.all():
            positions.append(np.multiply(corner, spacing))
            areas.append(element_area(block.tobytes(), mask.ndim, spacing))
    return np.array(positions), np.array(areas)


def brute_force(prediction, truth, spacing, tolerance):
    """Return the bounds of HD95 (at 95 % -+ 1e-5, for ties) and the NSD."""
    (a, area_a), (b, area_b) = elements(prediction, spacing), elements(truth, spacing)
    distances = np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=-1))
    directed = ((distances.min(axis=1), area_a), (distances.min(axis=0), area_b))
    bounds = []
    for part in (0.95 - 1e-5, 0.95 + 1e-5):
        reached = [
            min(d for d in set(nearest) if area[nearest <= d].sum() >= part * area.sum())
            for nearest, area in directed
        ]
        bounds.append(max(reached))
    near = sum(area[nearest <= tolerance * (1 + 1e-6)].sum() for nearest, area in directed)
    return *bounds, near / (area_a.sum() + area_b.sum())


def check(prediction, truth, spacing, tolerance):
    low, high, nsd = brute_force(prediction, truth, spacing, tolerance)
    hd95, found = compute_surface_metrics(prediction, truth, spacing, tolerance)
    assert low * (1 - 1e-6) <= hd95 <= high * (1 + 1e-6)
    assert found == pytest.approx(nsd, rel=1e-5)


@st.composite
def mask_pairs(draw):
    shape = draw(st.one_of(*(st.tuples(*[st.integers(2, 6)] * n) for n in (2, 3))))
    masks = arrays(bool, shape, fill=st.nothing()).filter(np.any)
    spacing = draw(st.tuples(*[st.sampled_from([0.3, 0.7, 1.0, 2.5, 5.0])] * len(shape)))
    return draw(masks), draw(masks), spacing


@given(mask_pairs(), st.sampled_from([0.5, 0.7, 2.0, 5.0]))
@examples(40, search=1000)
def test_random_masks_equal_brute_force(pair, tolerance):
    check(*pair, tolerance)


# Answers by hand.


def test_shifted_squares_have_the_hand_computed_metrics():
    """Two squares of 10 x 10 mm, 3 mm apart: corners count sqrt(2)/2 mm of contour, others 1 mm."""
    truth = np.zeros((20, 20), bool)
    truth[4:14, 4:14] = True
    prediction = np.roll(truth, 3, axis=1)
    total = 36 + math.sqrt(2) * 2
    # Of each contour, 8 elements at the top, 8 at the bottom, 2 corners and 2 at a side are within 1 mm.
    expected = {1.0: (18 + math.sqrt(2)) / total, 2.0: (22 + math.sqrt(2)) / total, 3.0: 1.0}
    for tolerance, nsd in expected.items():
        assert compute_surface_metrics(prediction, truth, (1, 1), tolerance) == (3.0, pytest.approx(nsd))


def test_shifted_cubes_have_the_shift_as_hd95():
    truth = np.zeros((12, 12, 12), bool)
    truth[3:7, 3:7, 3:7] = True
    for axis, shift in ((0, 5.0), (1, 0.7), (2, 1.3)):
        prediction = np.roll(truth, 1, axis=axis)
        hd95, nsd = compute_surface_metrics(prediction, truth, (5.0, 0.7, 1.3), shift)
        assert (hd95, nsd) == (pytest.approx(shift), 1.0)
        assert compute_surface_metrics(prediction, truth, (5.0, 0.7, 1.3), 0.9 * shift)[1] < 1


def test_hd95_ignores_a_small_far_part():
    truth = np.zeros((30, 30, 30), bool)
    truth[5:20, 5:20, 5:20] = True
    prediction = truth.copy()
    prediction[28, 28, 28] = True
    hd95, nsd = compute_surface_metrics(prediction, truth, (1, 1, 1))
    assert hd95 == 0 and 0.99 < nsd < 1


def test_distance_of_exactly_the_tolerance_counts():
    """A NIfTI header has 0.3 mm as float32, which is slightly more."""
    truth = np.zeros((4, 12), bool)
    truth[1:3, 1:4] = True
    spacing = (float(np.float32(0.3)),) * 2
    assert compute_surface_metrics(np.roll(truth, 7, axis=1), truth, spacing, 2.1)[1] == 1


def test_empty_masks_follow_the_convention():
    full, empty = np.ones((3, 4, 12), bool), np.zeros((3, 4, 12), bool)
    diagonal = math.sqrt(3**2 + 4**2 + 12**2)
    assert np.isnan(compute_surface_metrics(empty, empty, (1, 1, 1))).all()
    assert compute_surface_metrics(full, empty, (1, 1, 1)) == (diagonal, 0)
    assert compute_surface_metrics(empty, full, (1, 1, 1)) == (diagonal, 0)
    assert compute_surface_metrics(empty, full, (2, 1, 1))[0] == math.sqrt(6**2 + 4**2 + 12**2)
    assert compute_surface_metrics(empty[:1], full[:1], (99, 1, 1)) == (math.hypot(4, 12), 0)


def test_single_slice_is_measured_in_2d():
    rng = np.random.default_rng(0)
    prediction, truth = rng.random((2, 9, 8)) < 0.6
    flat = compute_surface_metrics(prediction, truth, (0.7, 1.3), 1.0)
    for axis in range(3):
        masks = [np.expand_dims(mask, axis) for mask in (prediction, truth)]
        assert compute_surface_metrics(*masks, np.insert([0.7, 1.3], axis, 5.0), 1.0) == flat


# Whole folds.


def ball(shift=0, label=1):
    z, y, x = np.indices((8, 14, 16))
    return (((z - 4) ** 2 + (y - 6) ** 2 + (x - 6 - shift) ** 2 < 14) * label).astype(np.uint8)


def write_labels(array, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = sitk.GetImageFromArray(array)
    image.SetSpacing([float(mm) for mm in SPACING[::-1]])
    sitk.WriteImage(image, str(path))


def make_fold(folder, cases, keys=("1", "2"), labels=LABELS):
    """Write a fold from {case: (prediction, truth)} and return the arguments of the function."""
    dice = {case: dict.fromkeys(keys, 0.5) for case in cases}
    fold = write_fold(folder / "nnUNet_results", "nnUNetTrainer", 0, dice, labels=labels)
    for case, (prediction, truth) in cases.items():
        write_labels(prediction, fold / "validation" / f"{case}.nii.gz")
        write_labels(truth, folder / "labelsTr" / f"{case}.nii.gz")
    return fold, [folder / "labelsTr"]


@pytest.fixture
def fold(tmp_path):
    """Two cases; the second has no class 2, the first has it only in the ground truth."""
    first = np.where(ball(-3), 2, ball(2)).astype(np.uint8)
    return make_fold(tmp_path, {"case_10": (ball(1), first), "case_2": (ball(1), ball())})


def test_fold_has_a_row_for_each_case_and_class(fold):
    table, notes = fold_surface_metrics(*fold)
    assert notes == []
    assert table[["case", "class"]].to_numpy().tolist() == [
        [case, name] for case in ("case_10", "case_2") for name in ("liver", "left_kidney")
    ]
    diagonal = math.hypot(*np.multiply(ball().shape, SPACING))
    low, high, nsd = brute_force(ball(1) == 1, ball() == 1, SPACING, 2.0)
    assert tuple(table.loc[2, ["hd95", "nsd"]]) == pytest.approx((low, nsd), rel=1e-5) and low == high
    assert tuple(table.loc[1, ["hd95", "nsd"]]) == (pytest.approx(diagonal, rel=1e-5), 0)
    assert table.loc[3, ["hd95", "nsd"]].isna().all()


def test_regions_are_unions_of_labels(tmp_path):
    labels = {"background": 0, "whole tumor": [1, 2, 3], "core": [2, 3]}
    truth, prediction = ball(0, 1), ball(1, 2)
    truth[ball(3) > 0] = 3
    args = make_fold(tmp_path, {"a": (prediction, truth)}, ("(1, 2, 3)", "(2, 3)"), labels)
    table, _ = fold_surface_metrics(*args)
    whole_tumor = compute_surface_metrics(prediction > 0, truth > 0, SPACING)
    core = compute_surface_metrics(prediction >= 2, truth >= 2, SPACING)
    np.testing.assert_allclose(table[["hd95", "nsd"]], [whole_tumor, core], rtol=1e-6)


def test_ignored_voxels_do_not_count(tmp_path):
    truth, prediction = ball(), ball()
    truth[:, 10:, 12:] = 2
    prediction[:, 11:, 13:] = 1
    labels = {"background": 0, "liver": 1, "ignore": 2}
    table, _ = fold_surface_metrics(*make_fold(tmp_path, {"a": (prediction, truth)}, ("1",), labels))
    assert table.loc[0, ["hd95", "nsd"]].tolist() == [0, 1]


def test_unusable_files_become_notes(tmp_path):
    names = ["good", "missing", "small"]
    args = make_fold(tmp_path, {name: (ball(1), ball()) for name in names}, ("1",))
    (args[0] / "validation" / "missing.nii.gz").unlink()
    write_labels(ball()[:, :-1], args[0] / "validation" / "small.nii.gz")
    table, notes = fold_surface_metrics(*args)
    assert [note.partition(":")[0] for note in notes] == ["missing", "small"]
    assert "missing.nii.gz" in notes[0] and "(8, 13, 16), the ground truth (8, 14, 16)" in notes[1]
    assert table.set_index("case")["nsd"].notna().to_dict() == {n: n == "good" for n in names}


# The cache


def poison(fold):
    """Write another HD95 of the last case into the cache."""
    cache = fold[0] / "validation" / CACHE_NAME
    content = json.loads(cache.read_text())
    content["cases"]["case_2"]["1"][0] = 77.0
    cache.write_text(json.dumps(content))
    return cache


def test_cache_is_read_until_something_has_changed(fold, monkeypatch):
    fold_surface_metrics(*fold)
    poison(fold)
    assert fold_surface_metrics(*fold)[0].loc[2, "hd95"] == 77
    assert fold_surface_metrics(*fold, tolerance=0.5)[0].loc[2, "hd95"] < 10
    fold_surface_metrics(*fold)
    poison(fold)
    summary = fold[0] / "validation" / "summary.json"
    summary.write_text(summary.read_text().replace("0.5", "0.6"))
    assert fold_surface_metrics(*fold)[0].loc[2, "hd95"] < 10
    poison(fold)
    monkeypatch.setattr(module, "version", lambda name: "99.0")
    assert fold_surface_metrics(*fold)[0].loc[2, "hd95"] < 10
    poison(fold).write_text('{"cases": []}')
    assert fold_surface_metrics(*fold)[0].loc[2, "hd95"] < 10


# In a report


def test_report_compares_every_metric(tmp_path):
    planned = study(
        "A", "B", metrics=("dice", "hd95", "nsd"), tolerance=1.0, margin={"dice": 0.05, "hd95": 0.5}
    )
    results, raw, preprocessed = whole(tmp_path, planned, cases=4)  # three of them have predictions
    console = Console(file=io.StringIO(), width=300)
    files = write_report(planned, results, raw, preprocessed, tmp_path / "report", console)
    folder = files[0].parent
    rows = pd.read_csv(folder / "comparisons.csv")
    assert rows["metric"].tolist() == ["dice", "hd95", "nsd"]
    assert rows["unit"].tolist() == ["points", "mm", "points"] and rows["cases"].tolist() == [8, 6, 6]
    # The truth is a sphere of radius 9 mm, the predictions have 8 and 9: see report_folds.whole.
    cases = (
        pd.read_csv(folder / "cases.csv")
        .dropna(subset=["hd95"])
        .groupby("trainer")[["hd95", "nsd"]]
        .agg(["min", "max"])
    )
    assert cases.loc["B"].tolist() == [0, 0, 1, 1]
    assert cases.loc["A", ("hd95", "min")] > 0 and cases.loc["A", ("nsd", "max")] < 1
    assert "A, fold 0: case_0003: no HD95 and NSD; " in console.file.getvalue()
    for margin in ("0.05 points of Dice", "0.5 mm of HD95", "0.1 points of NSD"):
        assert (
            f"Shown to be not worse than A by more than {margin}: no trainer." in console.file.getvalue()
        )


def test_report_without_monai_has_the_other_metrics(tmp_path, monkeypatch):
    planned = study("A", "B", metrics=("hd95", "dice"), folds=(0,))
    results, raw, preprocessed = whole(tmp_path, planned, cases=2)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    console = Console(file=io.StringIO(), width=300)
    files = write_report(planned, results, raw, preprocessed, tmp_path / "report", console)
    assert "HD95 and NSD are missing: they need MONAI; run pip install" in console.file.getvalue()
    assert pd.read_csv(files[0].parent / "comparisons.csv")["metric"].tolist() == ["dice"]
