import base64
import io
import shutil

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from nnunet_cpr.reports.overlays import (
    CLASS_COLOURS,
    case_pairs,
    draw_case,
    extreme_cases,
    is_ct,
    overlays,
    read_classes,
)
from nnunet_cpr.reports.results import read_results
from nnunet_cpr.reports.verdicts import compare_all
from nnunet_cpr.reports.volumes import View
from tests.helpers.report_folds import DATASET, both, study, whole, write_fold, write_json, write_volume


def pixels(source):
    data = base64.b64decode(source.removeprefix("data:image/webp;base64,"))
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def view(labels, edges=()):
    return View("axial", 1, 1, np.full(labels[0].shape, 50.0), tuple(labels), 1.0, edges)


def test_pictures_have_fills_of_the_classes_and_contours():
    truth = np.zeros((36, 36), int)
    truth[9:27, 9:27] = 2
    prediction = np.roll(truth, 4, axis=1)
    classes = read_classes({"background": 0, "a": 1, "b": 2})
    sources, drawing = draw_case(
        [view([truth, prediction, truth])], ["truth", "one", "two"], classes, [2], (0, 100), "case"
    )
    shown = pixels(sources[0][1])
    colour = np.array([int(CLASS_COLOURS[1][i : i + 2], 16) for i in (1, 3, 5)])
    blue = shown[..., 2] - shown[..., 0] > 25  # of the second class, over grey
    rows, columns = np.nonzero(blue)
    size = shown.shape[0] / 36
    assert columns.min() == pytest.approx(13 * size, abs=8)
    assert columns.max() == pytest.approx(31 * size, abs=8)
    assert rows.min() == pytest.approx(9 * size, abs=8)
    # The prediction has a solid line in the full colour, the truth a dotted white line.
    solid = np.abs(shown - colour).sum(axis=2) < 70
    assert solid.any() and not (np.abs(pixels(sources[0][0]) - colour).sum(axis=2) < 70).any()
    assert (shown.min(axis=2) > 200).any()
    assert set(drawing.files) == {"pdf", "svg"}


def test_classes_keep_their_colours_and_names():
    classes = read_classes({"background": 0, "liver": 1, "left_kidney": 2, "ignore": 3})
    assert dict(classes.names) == {1: "liver", 2: "left_kidney"} and classes.ignored == 3
    assert classes.colour(1) == CLASS_COLOURS[0] and classes.name(7) == "label 7"
    many = read_classes({f"c{i}": i for i in range(1, 25)})
    assert many.colour(1) == many.colour(11) and len({many.colour(i) for i in range(1, 11)}) == 10


def test_regions_name_their_labels():
    classes = read_classes({"background": 0, "whole tumor": [1, 2, 3], "core": [2, 3], "enhancing": 3})
    assert dict(classes.names) == {1: "whole tumor (rest)", 2: "core (rest)", 3: "enhancing"}
    assert dict(read_classes({"both": [1, 2]}).names) == {1: "both (label 1)", 2: "both (label 2)"}
    assert read_classes(None).names == {}


def test_plans_and_channels_tell_ct(tmp_path):
    plans = tmp_path / "plans.json"
    assert is_ct(plans, "2d", {"channel_names": {"0": "CT"}})
    assert not is_ct(plans, "2d", {"channel_names": {"0": "T1"}}) and not is_ct(plans, "2d", {})
    configurations = {
        "3d_fullres": {"normalization_schemes": ["CTNormalization"]},
        "mine": {"inherits_from": "3d_fullres"},
        "2d": {"normalization_schemes": ["ZScoreNormalization"]},
    }
    write_json(plans, {"configurations": configurations})
    assert is_ct(plans, "mine", {}) and not is_ct(plans, "2d", {"channel_names": {"0": "CT"}})


def test_pictures_show_the_first_seed(tmp_path):
    planned = study("nnUNetTrainerSGD", "nnUNetTrainerCPR", folds=(0,), seeds=(4, 5))
    for run in planned.runs():
        write_fold(tmp_path, run.trainer, 0, {"a": both(0.1 * run.seed), "b": both(0.3)})
    results = read_results(planned, tmp_path, None, None)
    (comparison,) = compare_all(results)
    pairs = case_pairs(results, comparison)
    assert pairs.loc[(0, "a"), "other"] == pytest.approx(40)


def test_extreme_cases_have_largest_median_smallest_difference(tmp_path):
    for trainer, step in (("A", 0.0), ("B", 0.01)):
        write_fold(tmp_path, trainer, 0, {f"c{i}": both(0.5 + step * i) for i in range(5)})
    results = read_results(study("A", "B"), tmp_path, None, None)
    (comparison,) = compare_all(results)
    assert extreme_cases(case_pairs(results, comparison)) == [
        ("largest difference", 0, "c4"),
        ("median difference", 0, "c2"),
        ("smallest difference", 0, "c0"),
    ]


@pytest.mark.parametrize(
    ("differences", "ranks"),
    [([], []), ([1.0], ["largest 0"]), ([1.0, 2.0], ["largest 1", "smallest 0"])],
)
def test_few_cases_have_fewer_ranks(differences, ranks):
    index = pd.MultiIndex.from_product([[0], [str(i) for i in range(len(differences))]])
    found = extreme_cases(pd.DataFrame({"reference": 0.0, "other": differences}, index=index))
    assert [f"{rank.removesuffix(' difference')} {case}" for rank, _, case in found] == ranks


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
