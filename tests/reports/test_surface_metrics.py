"""HD95 and NSD against brute force, of whole folds, and their cache."""

from __future__ import annotations

import io
import json
import math
import os
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path

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
from nnunet_cpr.reports.results import ReportError, read_results
from nnunet_cpr.reports.surface_metrics import (
    CACHE_NAME,
    COLUMNS,
    compute_surface_metrics,
    fold_surface_metrics,
)
from tests.helpers.examples import examples
from tests.helpers.report_folds import DATASET, NAN, study, whole, write_fold, write_json

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


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (5.0, 0.5, 0.5), (0.5, 5.0, 1.5)])
def test_balls_equal_brute_force(spacing):
    z, y, x = np.indices((9, 14, 15))
    truth = (z - 4) ** 2 * 2 + (y - 6) ** 2 + (x - 6) ** 2 < 25
    prediction = (z - 4) ** 2 * 2 + (y - 7) ** 2 + (x - 8) ** 2 < 22
    prediction[0, 0, 0] = True
    for tolerance in (0.5, 1.0, 5.0):
        check(prediction, truth, spacing, tolerance)


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


def write_labels(array, path, spacing=SPACING):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = sitk.GetImageFromArray(array)
    image.SetSpacing([float(mm) for mm in spacing[::-1]])
    sitk.WriteImage(image, str(path))


def make_fold(folder, cases, keys=("1", "2"), labels=None, **changes):
    """Write a fold from {case: (prediction, truth)} and return the arguments of the function."""
    labels = labels or {"background": 0, "liver": 1, "left_kidney": 2}
    dice = {case: dict.fromkeys(keys, 0.5) for case in cases}
    fold = write_fold(folder / "nnUNet_results", "nnUNetTrainer", 0, dice, labels=labels)
    for case, (prediction, truth) in cases.items():
        write_labels(prediction, fold / "validation" / f"{case}.nii.gz", **changes)
        write_labels(
            truth,
            folder / "nnUNet_preprocessed" / DATASET / "gt_segmentations" / f"{case}.nii.gz",
            **changes,
        )
    return fold, DATASET, folder / "nnUNet_raw", folder / "nnUNet_preprocessed"


@pytest.fixture
def fold(tmp_path):
    """Two cases; the second has no class 2, the first has it only in the ground truth."""
    first = np.where(ball(-3), 2, ball(2)).astype(np.uint8)
    return make_fold(tmp_path, {"case_10": (ball(1), first), "case_2": (ball(1), ball())})


@pytest.fixture
def measured(monkeypatch):
    """Return the list of the predictions that are computed and not read from the cache."""
    files = []

    def measure(job, original=module._measure):
        files.append(job.prediction.name.split(".")[0])
        return original(job)

    monkeypatch.setattr(module, "_measure", measure)
    return files


def same(one, other):
    np.testing.assert_array_equal(one[["hd95", "nsd"]], other[["hd95", "nsd"]])
    return one[["case", "class"]].equals(other[["case", "class"]])


def test_fold_has_a_row_for_each_case_and_class(fold):
    table, notes = fold_surface_metrics(*fold, processes=1)
    assert notes == [] and list(table.columns) == COLUMNS
    assert list(zip(table["case"], table["class"])) == [
        ("case_10", "liver"),
        ("case_10", "left_kidney"),
        ("case_2", "liver"),
        ("case_2", "left_kidney"),
    ]
    truth = sitk.GetArrayFromImage(sitk.ReadImage(str(fold[0] / "validation" / "case_2.nii.gz")))
    diagonal = math.hypot(*np.multiply(truth.shape, SPACING))
    low, high, nsd = brute_force(ball(1) == 1, ball() == 1, SPACING, 2.0)
    assert tuple(table.loc[2, ["hd95", "nsd"]]) == pytest.approx((low, nsd), rel=1e-5) and low == high
    assert tuple(table.loc[1, ["hd95", "nsd"]]) == (pytest.approx(diagonal, rel=1e-5), 0)
    assert table.loc[3, ["hd95", "nsd"]].isna().all()


def test_table_merges_with_the_dice_rows(fold, tmp_path):
    planned = study("nnUNetTrainer", folds=(0,))
    dice = read_results(planned, tmp_path / "nnUNet_results", *fold[2:]).cases
    table, _ = fold_surface_metrics(*fold, processes=1)
    merged = dice.merge(table, on=["case", "class"], how="outer", validate="1:1", indicator=True)
    assert (merged["_merge"] == "both").all() and len(merged) == 4


def test_regions_are_unions_of_labels(tmp_path):
    labels = {"background": 0, "whole tumor": [1, 2, 3], "core": [2, 3]}
    truth = ball(0, 1)
    truth[ball(3) > 0] = 3
    prediction = ball(1, 2)
    args = make_fold(tmp_path, {"a": (prediction, truth)}, ("(1, 2, 3)", "(2, 3)"), labels)
    table, _ = fold_surface_metrics(*args, processes=1)
    assert list(table["class"]) == ["whole tumor", "core"]
    whole = compute_surface_metrics(prediction > 0, truth > 0, SPACING)
    core = compute_surface_metrics(prediction >= 2, truth >= 2, SPACING)
    np.testing.assert_allclose(table[["hd95", "nsd"]], [whole, core], rtol=1e-6)


def test_ignored_voxels_do_not_count(tmp_path):
    labels = {"background": 0, "liver": 1, "ignore": 2}
    truth = ball()
    truth[:, 10:, 12:] = 2
    prediction = ball()
    prediction[:, 11:, 13:] = 1
    args = make_fold(tmp_path, {"a": (prediction, truth)}, ("1",), labels)
    table, _ = fold_surface_metrics(*args, processes=1)
    assert table.loc[0, ["hd95", "nsd"]].tolist() == [0, 1]


@pytest.mark.parametrize("place", ["reference_file", "gt_segmentations", "labelsTr"])
def test_ground_truth_is_found(fold, place):
    path, dataset, raw, preprocessed = fold
    expected, _ = fold_surface_metrics(*fold, processes=1)
    (path / "validation" / CACHE_NAME).unlink()
    folder = preprocessed / dataset / "gt_segmentations"
    moved = {"reference_file": path.parent / "elsewhere", "labelsTr": raw / dataset / "labelsTr"}
    if place != "gt_segmentations":
        moved[place].parent.mkdir(parents=True, exist_ok=True)
        folder.rename(moved[place])
    if place == "reference_file":
        summary = json.loads((path / "validation" / "summary.json").read_text())
        for case in summary["metric_per_case"]:
            case["reference_file"] = str(moved[place] / os.path.basename(case["reference_file"]))
        write_json(path / "validation" / "summary.json", summary)
        raw = preprocessed = None
    table, notes = fold_surface_metrics(path, dataset, raw, preprocessed, processes=1)
    assert notes == [] and same(table, expected)


@pytest.mark.parametrize(("name", "spacing"), [("a.png", (1, 1)), ("a.tif", (2.5, 0.7, 1.3))])
def test_files_without_mm_have_nnunets_spacing(tmp_path, name, spacing):
    """A resolution for printing is not a spacing; nnU-Net writes that of 3D TIFF into a JSON file."""
    masks = [ball(1), ball()] if len(spacing) == 3 else [ball(1)[4], ball()[4]]
    case = {"metrics": {"1": {"Dice": 0.5}}, "prediction_file": name}
    validation = tmp_path / "fold_0" / "validation"
    write_json(validation / "summary.json", {"metric_per_case": [case]})
    write_labels(masks[0], validation / name, (0.3,) * len(spacing))
    write_labels(masks[1], tmp_path / DATASET / "labelsTr" / name, (0.3,) * len(spacing))
    if len(spacing) == 3:
        write_json(validation / "a.json", {"spacing": spacing})
    table, notes = fold_surface_metrics(tmp_path / "fold_0", DATASET, tmp_path, None, processes=1)
    expected = compute_surface_metrics(masks[0] > 0, masks[1] > 0, spacing)
    assert notes == [] and tuple(table.loc[0, ["hd95", "nsd"]]) == pytest.approx(expected, rel=1e-6)


def test_unusable_files_become_notes(tmp_path):
    names = ["bad", "good", "missing", "missing_too", "small"]
    args = make_fold(tmp_path, {name: (ball(1), ball()) for name in names}, ("1",))
    validation = args[0] / "validation"
    for name in ("missing", "missing_too"):
        (validation / f"{name}.nii.gz").unlink()
    (validation / "bad.nii.gz").write_bytes(b"not an image")
    write_labels(ball()[:, :-1], validation / "small.nii.gz")
    table, notes = fold_surface_metrics(*args, processes=1)
    assert notes == [
        "bad: no HD95 and NSD; the prediction cannot be read",
        "missing and 1 more: no HD95 and NSD; the prediction was not found",
        "small: no HD95 and NSD; the prediction has 8 x 13 x 16 voxels, the ground truth 8 x 14 x 16",
    ]
    assert table.set_index("case")["nsd"].notna().to_dict() == {n: n == "good" for n in names}
    write_labels(ball(1), validation / "bad.nii.gz")
    table, notes = fold_surface_metrics(*args, processes=1)
    assert len(notes) == 2 and table.set_index("case")["nsd"].notna()["bad"]


def test_missing_ground_truth_becomes_a_note(fold):
    _, notes = fold_surface_metrics(fold[0], DATASET, None, None, processes=1)
    assert notes == [
        "case_10 and 1 more: no HD95 and NSD; the ground truth was not found; "
        "check nnUNet_raw and nnUNet_preprocessed"
    ]


def test_processes_give_the_serial_result(fold):
    serial, _ = fold_surface_metrics(*fold, processes=1)
    (fold[0] / "validation" / CACHE_NAME).unlink()
    parallel, notes = fold_surface_metrics(*fold, processes=2)
    assert notes == [] and same(parallel, serial)


class Killer:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (1,)


def test_killed_process_takes_no_other_case_with_it():
    job = module._Job(Path("missing.nii.gz"), Path("missing.nii.gz"), [(1,)], None, 2.0)
    outcomes = module._compute({"a": job, "b": Killer(), "c": job, "d": Killer()}, processes=2)
    assert set(outcomes) == {"a", "b", "c", "d"}
    assert [case for case, text in outcomes.items() if "was killed" in text] == ["b", "d"]
    assert outcomes["a"] == outcomes["c"] == "the prediction cannot be read"


# The cache.


def test_second_call_reads_the_cache(fold, measured):
    first, _ = fold_surface_metrics(*fold, processes=1)
    assert measured == ["case_10", "case_2"]
    again, notes = fold_surface_metrics(*fold, processes=1)
    assert measured == ["case_10", "case_2"] and notes == [] and same(first, again)
    content = json.loads((fold[0] / "validation" / CACHE_NAME).read_text())
    assert content["tolerance_mm"] == 2 and content["library"].startswith("MONAI 1.")


def test_other_tolerance_is_computed(fold, measured):
    first, _ = fold_surface_metrics(*fold, processes=1)
    second, _ = fold_surface_metrics(*fold, tolerance=0.5, processes=1)
    assert len(measured) == 4 and second["nsd"][2] < first["nsd"][2]
    assert second["hd95"].equals(first["hd95"])


def test_repeated_validation_is_computed(fold, measured):
    fold_surface_metrics(*fold, processes=1)
    summary = fold[0] / "validation" / "summary.json"
    summary.write_text(summary.read_text().replace("0.5", "0.6"))
    fold_surface_metrics(*fold, processes=1)
    assert len(measured) == 4


def test_other_library_version_is_computed(fold, measured, monkeypatch):
    fold_surface_metrics(*fold, processes=1)
    monkeypatch.setattr(module, "version", lambda name: "99.0")
    fold_surface_metrics(*fold, processes=1)
    assert len(measured) == 4


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        "null",
        "{}",
        '"text"',
        {"cases": []},
        {"cases": {"case_2": 5}},
        {"cases": {"case_2": {"1": [1, 2, 3]}}},
        {"cases": {"case_2": {"1": [1.0, 1.5]}}},
        {"cases": {"case_2": {"1": [-1.0, 0.5]}}},
        {"cases": {"case_2": {"1": [NAN, 0.5]}}},
        {"cases": {"case_2": {"1": ["1", None]}}},
        {"cases": {"case_2": {"1": [1.0, 0.5]}}},  # a class is missing
        {"format": 0},
        {"summary_sha256": "0"},
    ],
)
def test_damaged_cache_is_computed_again(fold, measured, damage):
    expected, _ = fold_surface_metrics(*fold, processes=1)
    cache = fold[0] / "validation" / CACHE_NAME
    good = json.loads(cache.read_text())
    cache.write_text(damage if isinstance(damage, str) else json.dumps({**good, **damage}))
    table, notes = fold_surface_metrics(*fold, processes=1)
    assert len(measured) == 4 and notes == [] and same(table, expected)
    assert json.loads(cache.read_text()) == good


def test_folder_without_write_access_gets_results_and_a_note(fold):
    cache = fold[0] / "validation" / CACHE_NAME
    cache.mkdir()  # refuses the write for root too
    table, notes = fold_surface_metrics(*fold, processes=1)
    assert notes == [f"HD95 and NSD not cached in {cache}: Is a directory"]
    assert table["nsd"].notna().sum() == 3
    assert sorted(path.name for path in cache.parent.iterdir()) == [
        "case_10.nii.gz",
        "case_2.nii.gz",
        "summary.json",
        CACHE_NAME,
    ]


# Errors.


def test_missing_library_names_the_command(fold, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", missing)
    with pytest.raises(ReportError, match=r"run pip install 'nnunet-cpr\[surface\]'$"):
        fold_surface_metrics(*fold)


def test_unreadable_summary_is_one_line(fold, tmp_path):
    (fold[0] / "validation" / "summary.json").write_text("{")
    with pytest.raises(ReportError, match=r"^[^\n]*summary.json: expected[^\n]*$"):
        fold_surface_metrics(*fold)


@pytest.mark.parametrize("wrong", [{"tolerance": 0}, {"tolerance": NAN}, {"processes": 0}])
def test_wrong_arguments_are_refused(fold, wrong):
    with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}: expected"):
        fold_surface_metrics(*fold, **wrong)


def test_report_compares_every_metric(tmp_path):
    planned = study("A", "B", metrics=("dice", "hd95", "nsd"), tolerance=1.0)
    results, raw, preprocessed = whole(tmp_path, planned, cases=3)
    console = Console(file=io.StringIO(), width=200)
    files = write_report(planned, results, raw, preprocessed, tmp_path / "report", console)
    folder = files[0].parent
    rows = pd.read_csv(folder / "comparisons.csv")
    assert rows["metric"].tolist() == ["dice", "hd95", "nsd"]
    assert rows["unit"].tolist() == ["points", "mm", "points"] and (rows["cases"] == 6).all()
    cases = (
        pd.read_csv(folder / "cases.csv").set_index(["trainer", "fold", "case", "class"]).sort_index()
    )
    # The truth is a sphere of radius 9 mm, the predictions have 8 and 9: see report_folds.whole.
    assert (cases.loc["B", "hd95"] == 0).all() and (cases.loc["B", "nsd"] == 1).all()
    assert (cases.loc["A", "hd95"] > 0).all() and (cases.loc["A", "nsd"] < 1).all()
    table = pd.read_csv(folder / "table.csv").set_index("trainer")
    assert table.loc["B", "hd95_mm"] == 0 and table.loc["B", "nsd_percent"] == 100
    assert bool(table.loc["B", "hd95_best"]) and not table.loc["A", "hd95_best"]


def test_report_names_cases_without_surface_metrics(tmp_path):
    planned = study("A", "B", metrics=("hd95",))
    results, raw, preprocessed = whole(tmp_path, planned, cases=4)  # three of them have predictions
    console = Console(file=io.StringIO(), width=300)
    write_report(planned, results, raw, preprocessed, tmp_path / "report", console)
    assert "A, fold 0: case_0003: no HD95 and NSD; the prediction was not found" in (
        console.file.getvalue()
    )
