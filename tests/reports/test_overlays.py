import base64
import io
import shutil

import numpy as np
import pytest
import SimpleITK as sitk
from PIL import Image

from nnunet_cpr.reports.overlays import (
    _crop,
    _draw,
    _most_wrong_slice,
    _read,
    extreme_cases,
    overlays,
)
from nnunet_cpr.reports.results import read_results
from nnunet_cpr.reports.verdicts import compare_all
from tests.helpers.report_folds import DATASET, both, sphere, study, whole, write_fold, write_volume

YELLOW = (0xF0, 0xE4, 0x42)


def pixels(source):
    data = base64.b64decode(source.removeprefix("data:image/webp;base64,"))
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def test_slice_has_most_wrong_voxels():
    truth = sphere(9)
    prediction = truth.copy()
    prediction[2, 3, 3:6] = 1
    assert _most_wrong_slice([truth, prediction, truth]) == 2
    assert _most_wrong_slice([truth, truth, truth]) == 6  # the middle of the sphere


def test_crop_is_a_square_around_the_structures():
    plane = np.zeros((50, 100), int)
    plane[20:30, 40:60] = 1  # of 20 x 20 mm
    rows, columns = _crop([plane, np.zeros_like(plane)], (2.0, 1.0))
    assert (rows, columns) == (slice(17, 33), slice(35, 65))
    assert _crop([np.zeros((5, 5))], (1.0, 1.0)) == (slice(None), slice(None))


def test_contours_follow_label_borders():
    plane = np.zeros((36, 36), int)
    plane[9:27, 9:27] = 1
    picture = np.tile(np.arange(36.0), (36, 1))
    shown = pixels(_draw(picture, 1.0, [(plane, "#f0e442", "solid")]))
    assert max(shown.shape[:2]) == 720
    yellow = np.abs(shown - YELLOW).sum(axis=2) < 60
    rows, columns = np.nonzero(yellow)
    # Between voxels 8 and 9, at 9 / 36 of the picture's side, and 26 and 27.
    assert [rows.min(), rows.max(), columns.min(), columns.max()] == pytest.approx(
        [180, 540, 180, 540], abs=8
    )
    assert not yellow[220:500, 220:500].any()


def test_2d_and_colour_images_are_read(tmp_path):
    colours = np.zeros((4, 6, 3), np.uint8)
    colours[..., 0] = 7
    sitk.WriteImage(sitk.GetImageFromArray(colours, isVector=True), str(tmp_path / "a.png"))
    array, spacing = _read(tmp_path / "a.png")
    assert array.shape == (1, 4, 6) and (array == 7).all() and spacing == (1.0, 1.0, 1.0)
    write_volume(np.zeros((3, 4, 5), np.uint8), tmp_path / "b.nii.gz")
    array, spacing = _read(tmp_path / "b.nii.gz")
    assert array.shape == (3, 4, 5) and spacing == pytest.approx((2, 1, 1))


def test_extreme_cases_have_largest_median_smallest_difference(tmp_path):
    for trainer, step in (("A", 0.0), ("B", 0.01)):
        write_fold(tmp_path, trainer, 0, {f"c{i}": both(0.5 + step * i) for i in range(5)})
    (comparison,) = compare_all(read_results(study("A", "B"), tmp_path, None, None))
    assert extreme_cases(comparison) == [
        ("largest difference", 0, "c4"),
        ("median difference", 0, "c2"),
        ("smallest difference", 0, "c0"),
    ]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda raw, pre: shutil.rmtree(raw), "image case_"),
        (lambda raw, pre: shutil.rmtree(pre / "gt_segmentations"), "ground truth case_"),
        (
            lambda raw, pre: [p.write_bytes(b"no") for p in (raw / "imagesTr").iterdir()],
            "a file cannot be read",
        ),
        (
            lambda raw, pre: [
                write_volume(np.zeros((2, 3, 4), np.uint8), p) for p in (raw / "imagesTr").iterdir()
            ],
            "image, ground truth and predictions differ in size",
        ),
    ],
)
def test_missing_picture_gives_a_note(tmp_path, harm, reason):
    planned = study("A", "B", folds=(0,))
    folder, raw, preprocessed = whole(tmp_path, planned, cases=3)
    harm(raw / DATASET, preprocessed / DATASET)
    results = read_results(planned, folder, raw, preprocessed)
    (comparison,) = compare_all(results)
    pictures, notes = overlays(results, comparison, raw, preprocessed)
    assert not pictures and len(notes) == 3 and all(reason in note for note in notes)
    assert not any(str(tmp_path) in note for note in notes)
