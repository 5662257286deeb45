"""HD95 and NSD of masks, of whole folds, and their cache."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal

import numpy as np
import pandas as pd
import pytest
import SimpleITK as sitk
import tifffile
from rich.console import Console

from nnunet_cpr.refusals import Refusal
from nnunet_cpr.reports import surface_metrics as module
from nnunet_cpr.reports import write_report
from nnunet_cpr.reports.surface_metrics import (
    CACHE_NAME,
    compute_surface_metrics,
    fold_surface_metrics,
)
from tests.reports.folds import LABELS, study, whole, write_fold, write_json, write_volume

SPACING = (2.5, 0.7, 1.3)


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
    assert compute_surface_metrics(prediction, truth, (1, 2.5), 2.0)[0] == 7.5


def test_empty_masks_follow_the_convention():
    full, empty = np.ones((3, 4, 12), bool), np.zeros((3, 4, 12), bool)
    diagonal = math.sqrt(3**2 + 4**2 + 12**2)
    assert np.isnan(compute_surface_metrics(empty, empty, (1, 1, 1))).all()
    assert compute_surface_metrics(full, empty, (1, 1, 1)) == (diagonal, 0)
    assert compute_surface_metrics(empty, full, (1, 1, 1)) == (diagonal, 0)
    assert compute_surface_metrics(empty, full, (2, 1, 1))[0] == math.sqrt(6**2 + 4**2 + 12**2)
    assert compute_surface_metrics(empty[:1], full[:1], (99, 1, 1)) == (math.hypot(4, 12), 0)


def test_shifted_cubes_have_the_shift_along_each_axis():
    truth = np.zeros((12, 12, 30), bool)
    truth[3:7, 3:7, 3:7] = True
    for axis, shift in enumerate(SPACING):
        prediction = np.roll(truth, 1, axis=axis)
        assert compute_surface_metrics(prediction, truth, SPACING, shift) == (pytest.approx(shift), 1)
        assert compute_surface_metrics(prediction, truth, SPACING, 0.9 * shift)[1] < 1
    truth[:, :, 10:29] = True
    prediction = truth.copy()
    prediction[5, 5, 8] = True  # less than 5 % of the surface
    hd95, nsd = compute_surface_metrics(prediction, truth, SPACING, 0.1)
    assert hd95 == 0 and 0.9 < nsd < 1


# Whole folds


def ball(shift=0, label=1):
    z, y, x = np.indices((8, 14, 16))
    return (((z - 4) ** 2 + (y - 6) ** 2 + (x - 6 - shift) ** 2 < 14) * label).astype(np.uint8)


def make_fold(folder, cases, keys=("1", "2"), labels=LABELS):
    """Write a fold from {case: (prediction, truth)} and return the arguments of the function."""
    dice = {case: dict.fromkeys(keys, 0.5) for case in cases}
    fold = write_fold(folder / "nnUNet_results", "nnUNetTrainer", 0, dice, labels=labels)
    for case, (prediction, truth) in cases.items():
        write_volume(prediction, fold / "validation" / f"{case}.nii.gz", SPACING)
        write_volume(truth, folder / "labelsTr" / f"{case}.nii.gz", SPACING)
    return fold, folder / "labelsTr"


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
    expected = compute_surface_metrics(ball(1) == 1, ball() == 1, SPACING, 2.0)
    assert tuple(table.loc[2, ["hd95", "nsd"]]) == pytest.approx(expected) and 0 < expected[0] < 3
    assert tuple(table.loc[1, ["hd95", "nsd"]]) == (pytest.approx(diagonal, rel=1e-5), 0)
    assert table.loc[3, ["hd95", "nsd"]].isna().all()


def test_unusable_files_become_notes(tmp_path):
    names = ["good", "missing", "small"]
    args = make_fold(tmp_path, {name: (ball(1), ball()) for name in names}, ("1",))
    (args[0] / "validation" / "missing.nii.gz").unlink()
    write_volume(ball()[:, :-1], args[0] / "validation" / "small.nii.gz", SPACING)
    table, notes = fold_surface_metrics(*args)
    assert [note.partition(":")[0] for note in notes] == ["missing", "small"]
    assert "missing.nii.gz" in notes[0] and "(8, 13, 16), the ground truth (8, 14, 16)" in notes[1]
    assert table.set_index("case")["nsd"].notna().to_dict() == {n: n == "good" for n in names}


def test_regions_and_ignored_voxels_are_those_of_nnunet(tmp_path):
    labels = {"background": 0, "whole tumor": [1, 2], "core": 2, "ignore": 3}
    truth, prediction = ball(), ball(1, 2)
    truth[ball(3) > 0] = 2
    truth[:, 10:, 12:], prediction[:, 11:, 13:] = 3, 1  # counts as background
    args = make_fold(tmp_path, {"a": (prediction, truth)}, ("(1, 2)", "2"), labels)
    table, notes = fold_surface_metrics(*args)
    assert table["class"].tolist() == ["whole tumor", "core"] and notes == []
    prediction[truth == 3], truth[truth == 3] = 0, 0
    expected = [
        compute_surface_metrics(prediction >= label, truth >= label, SPACING) for label in (1, 2)
    ]
    np.testing.assert_allclose(table[["hd95", "nsd"]], expected, rtol=1e-6)


def test_png_is_measured_in_pixels(tmp_path):
    truth = np.zeros((20, 20), np.uint8)
    truth[4:14, 4:14] = 1
    masks = {"prediction.png": np.roll(truth, 3, axis=1), "truth.png": truth}
    for name, mask in masks.items():
        image = sitk.GetImageFromArray(mask)
        image.SetSpacing((0.5, 0.5))  # which a PNG can store
        sitk.WriteImage(image, str(tmp_path / name))
    found = module._measure(*(tmp_path / name for name in masks), [(1,)], {"file_ending": ".png"}, 2.0)
    expected = compute_surface_metrics(*(mask > 0 for mask in masks.values()), (1, 1))
    assert found == {"1": list(expected)}


@pytest.mark.parametrize(
    ("plans", "dataset"),
    [
        ({"image_reader_writer": "Tiff3DIO"}, {}),
        (None, {"overwrite_image_reader_writer": "Tiff3DIO"}),
        (None, {}),  # nnU-Net tries its reader of 2D TIFF first
    ],
)
def test_tiff_is_read_as_nnunet_does_without_output(tmp_path, capfd, plans, dataset):
    fold, truths = make_fold(tmp_path, {"a": (ball(1), ball())}, ("1",))
    for folder in (fold / "validation", truths):
        nifti = folder / "a.nii.gz"
        tifffile.imwrite(folder / "a.tif", sitk.GetArrayFromImage(sitk.ReadImage(str(nifti))))
        nifti.unlink()
    # The prediction has a file with the spacing; nnU-Net copies none to the ground truth.
    write_json(fold / "validation" / "a.json", {"spacing": SPACING})
    write_json(fold.parent / "dataset.json", {"labels": LABELS, "file_ending": ".tif", **dataset})
    summary = fold / "validation" / "summary.json"
    summary.write_text(summary.read_text().replace(".nii.gz", ".tif"))
    if plans:
        write_json(fold.parent / "plans.json", plans)
    table, notes = fold_surface_metrics(fold, truths)
    expected = compute_surface_metrics(ball(1) > 0, ball() > 0, SPACING)
    assert notes == [] and tuple(table.loc[0, ["hd95", "nsd"]]) == pytest.approx(expected)
    assert capfd.readouterr() == ("", "")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Killer:
    """File whose reader is killed, as by a system without memory."""

    def __reduce__(self):
        return die, ()


@pytest.mark.slow
def test_killed_process_costs_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    args = make_fold(tmp_path, {f"c{i:02}": (ball(1), ball()) for i in range(16)}, ("1",))
    table, notes = fold_surface_metrics(*args)
    assert notes == [] and table["nsd"].nunique() == 1, "the processes work"
    none = tmp_path / "none"
    jobs = [*[(none, none, [(1,)], {}, 2.0)] * 16, (Killer(), none, [(1,)], {}, 2.0)]
    outcomes = module._compute(jobs)
    assert len(outcomes) == 17 and outcomes[-1].startswith("a process was killed")


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


def test_cache_that_cannot_be_written_is_a_note(fold):
    cache = fold[0] / "validation" / CACHE_NAME
    cache.mkdir()  # refuses the write for root too
    table, notes = fold_surface_metrics(*fold)
    assert notes == [f"HD95 and NSD are not cached in {cache}: Is a directory"]
    assert table["nsd"].notna().sum() == 3


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
    # The truth is a sphere of radius 9 mm, the predictions have 8 and 9: see tests.reports.folds.whole.
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


@pytest.mark.parametrize("metrics", [("dice", "hd95"), ("hd95",)])
def test_missing_monai_is_said(tmp_path, monkeypatch, metrics):
    planned, console = study("A", "B", metrics=metrics), Console(file=io.StringIO(), width=300)
    results, raw, preprocessed = whole(tmp_path, planned, cases=4)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    advice = "they need MONAI; run pip install 'nnunet-cpr[surface]'"
    if "dice" not in metrics:
        with pytest.raises(Refusal, match=re.escape(advice)):
            write_report(planned, results, raw, preprocessed, tmp_path / "report", console)
        return
    files = write_report(planned, results, raw, preprocessed, tmp_path / "report", console)
    assert pd.read_csv(files[0].parent / "comparisons.csv")["metric"].tolist() == ["dice"]
    assert advice in console.file.getvalue()
