import json
import math

import numpy as np
import pytest

from nnunet_cpr.nnunet.fold_files import read_logs
from nnunet_cpr.reports.comparisons import compare_all
from nnunet_cpr.reports.results import (
    ReportError,
    Setting,
    case_means,
    class_key,
    fold_means,
    read_results,
    strip_ending,
)
from nnunet_cpr.studies.definition import TrainerEntry
from tests.helpers.report_folds import (
    DATASET,
    LABELS,
    NAN,
    both,
    study,
    write_fold,
    write_history,
    write_json,
    write_log,
)

SETTING = Setting(DATASET, "3d_fullres", "nnUNetPlans")


def read(planned, results):
    return read_results(planned, results, None, None)


def test_cases_are_tidy_with_class_names(tmp_path):
    write_fold(tmp_path, "A", 0, {"b": {"1": 0.5, "2": 0.7}, "a": {"1": 0.1, "2": NAN}})
    cases = read(study("A"), tmp_path).cases
    assert cases[["case", "class", "fold", "trainer"]].to_numpy().tolist() == [
        ["a", "liver", 0, "A"],
        ["a", "left_kidney", 0, "A"],
        ["b", "liver", 0, "A"],
        ["b", "left_kidney", 0, "A"],
    ]
    np.testing.assert_array_equal(cases["dice"], [0.1, NAN, 0.5, 0.7])


def test_background_is_ignored(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": {"0": 1.0, "1": 0.5, "2": 0.5}})
    assert read(study("A"), tmp_path).cases["class"].tolist() == ["liver", "left_kidney"]


def test_means_match_nnunet_and_ignore_nan(tmp_path):
    write_fold(
        tmp_path,
        "A",
        0,
        {"a": {"1": 0.2, "2": NAN}, "b": {"1": 0.6, "2": 0.9}, "c": {"1": NAN, "2": NAN}},
    )
    cases = read(study("A"), tmp_path).cases
    # liver (0.2 + 0.6) / 2 = 0.4, kidney 0.9: mean 0.65; not the mean of the cases' means.
    assert fold_means(cases)["dice"].tolist() == pytest.approx([0.65])
    np.testing.assert_allclose(case_means(cases)["dice"], [0.2, 0.75, NAN])


def test_regions_have_names_of_dataset_json(tmp_path):
    labels = {"background": 0, "whole tumor": [1, 2, 3], "core": [2, 3], "enhancing": 3}
    dice = {"a": {"(1, 2, 3)": 0.9, "(2, 3)": 0.8, "3": 0.7}}
    write_fold(tmp_path, "A", 0, dice, labels=labels)
    assert read(study("A"), tmp_path).cases["class"].tolist() == ["whole tumor", "core", "enhancing"]


def test_class_names_fall_back_to_label_numbers(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": {"10": 0.1, "2": 0.2, "(1, 2)": 0.3}}, labels=None)
    assert read(study("A"), tmp_path).cases["class"].tolist() == ["label 1 + 2", "label 2", "label 10"]
    write_json(tmp_path / "pre" / DATASET / "dataset.json", {"labels": {"x": 10, "y": 2, "z": [1, 2]}})
    named = read_results(study("A"), tmp_path, None, tmp_path / "pre")
    assert named.cases["class"].tolist() == ["x", "y", "z"]


def test_class_keys_and_file_endings_are_parsed():
    assert [class_key(v) for v in (3, "3", [1, 2], "(1, 2)", "(3,)")] == [
        (3,),
        (3,),
        (1, 2),
        (1, 2),
        (3,),
    ]
    assert strip_ending("/x/case_1.nii.gz") == strip_ending("case_1.png", ".png") == "case_1"
    assert strip_ending("case.v1.mha", ".mha") == "case.v1"


def test_fold_is_finished_after_validation(tmp_path):
    write_fold(tmp_path, "A", 1, {"a": both(0.5)})
    torn = write_fold(tmp_path, "A", 0, {"a": both(0.5)})
    path = torn / "validation" / "summary.json"
    path.write_text(path.read_text()[:30])
    results = read(study("A", "B"), tmp_path)
    assert results.finished(SETTING, "A") == [1] and results.finished(SETTING, "B") == []
    assert len(results.notes) == 1 and "fold 0: validation/summary.json unreadable" in results.notes[0]


def test_study_without_results_is_refused(tmp_path):
    write_log(tmp_path / DATASET / "A__nnUNetPlans__3d_fullres" / "fold_0", {0: (1, 1, 0, 5)})
    with pytest.raises(ReportError, match="study toy: no fold has finished") as error:
        read(study("A"), tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(ReportError, match="expected a data set"):
        read(study("A", datasets=()), tmp_path)


def test_later_log_replaces_repeated_epochs(tmp_path):
    write_log(tmp_path, {0: (0.5, 0.6, 0.1, 10), 1: (0.4, 0.5, 0.2, 11)}, "2026_1_2_03_04_05")
    # In the order of text "2026_10" would come before "2026_9".
    write_log(tmp_path, {1: (0.3, 0.4, 0.3, 12), 2: (0.2, 0.3, 0.4, 13)}, "2026_10_1_00_00_00")
    write_log(tmp_path, {1: (9, 9, 0.9, 99)}, "2026_9_1_00_00_00")
    log = read_logs(tmp_path)
    assert log["epoch"].tolist() == [0, 1, 2]
    assert log["train_loss"].tolist() == [0.5, 0.3, 0.2]
    assert log["pseudo_dice"].tolist() == pytest.approx([0.1, 0.3, 0.4])  # the NaN class left out
    assert log["seconds"].tolist() == [10, 12, 13]


def test_incomplete_epoch_has_no_time(tmp_path):
    write_log(tmp_path, {0: (0.5, 0.6, 0.1, 10), 1: (-1.5e-05, 0.5, 0.2, 11)})
    path = next(tmp_path.glob("training_log_*"))
    path.write_text(path.read_text().rpartition("Epoch time")[0])
    log = read_logs(tmp_path)
    assert log["train_loss"].tolist() == [0.5, -1.5e-05]
    assert log["seconds"][0] == 10 and math.isnan(log["seconds"][1])


def test_incomplete_history_rows_are_ignored(tmp_path):
    folder = write_fold(tmp_path, "A", 0, {"a": both(0.5)})
    write_history(folder)
    path = folder / "cpr_history.csv"
    path.write_text(path.read_text()[:-9] + "\nx,1,stage.0.weight,0.1,0.1,0.1\n")
    fold, history = read(study("A"), tmp_path).histories[SETTING, "A"]
    assert fold == 0 and len(history) == 5 * 4 - 1
    path.write_text("nonsense\n\x00")
    results = read(study("A"), tmp_path)
    assert not results.histories and "cpr_history.csv unreadable" in results.notes[0]


def test_missing_measurements_are_nan(tmp_path):
    folder = write_fold(tmp_path, "A", 0, {"a": both(0.5)})
    assert read(study("A"), tmp_path).resources.empty
    content = {"seconds": 7.5, "peak_memory_bytes": 100, "peak_gpu_memory_bytes": None}
    (folder / "resources.json").write_text(json.dumps(content))
    row = read(study("A"), tmp_path).resources.iloc[0]
    assert row["seconds"] == 7.5 and row["peak_memory_bytes"] == 100
    assert math.isnan(row["peak_gpu_memory_bytes"])


def comparisons(planned, results):
    return {c.entry.trainer: c for c in compare_all(read(planned, results))}


def test_comparisons_use_cases_of_common_folds(tmp_path):
    names = [f"c{i}" for i in range(8)]
    for fold in (0, 1):
        write_fold(tmp_path, "A", fold, {f"{n}{fold}": both(0.5) for n in names})
    write_fold(tmp_path, "B", 0, {f"{n}0": both(0.6 + 0.01 * i) for i, n in enumerate(names)})
    write_fold(tmp_path, "C", 0, {f"{n}0": both(0.5) for n in names})
    found = comparisons(study("A", "B", "C", "D"), tmp_path)
    b = found["B"]
    assert b.folds == [0] and b.paired.cases == 8 and b.left_out == 0
    assert b.paired.difference == pytest.approx(np.mean([10 + i for i in range(8)]))
    assert b.paired.p == pytest.approx(2 / 2**8) and b.p_holm == pytest.approx(2 * 2 / 2**8)
    assert (b.paired.wins, b.paired.ties, b.paired.losses) == (8, 0, 0)
    assert "B is better" in b.sentence and "So far 1 of 2 folds." in b.sentence
    assert (
        found["C"].p_holm == 1
        and "No statistically significant difference between C and A was found: +0.00"
        in found["C"].sentence
    )
    assert found["D"].paired.cases == 0 and "cannot be compared" in found["D"].sentence


def test_case_with_one_dice_is_left_out(tmp_path):
    some = {f"c{i}": both(0.5 + 0.01 * i) for i in range(7)}
    nothing = {"1": NAN, "2": NAN}
    write_fold(tmp_path, "A", 0, {**some, "x": nothing, "y": nothing, "only_a": both(0.5)})
    write_fold(tmp_path, "B", 0, {**some, "x": nothing, "y": both(0)})
    (b,) = comparisons(study("A", "B"), tmp_path).values()
    assert b.paired.cases == 7 and b.left_out == 2
    assert "Left out: 2 cases with a Dice from one of the two only." in b.sentence


def test_holm_family_is_the_data_set(tmp_path):
    names = [f"c{i}" for i in range(6)]
    datasets = (DATASET, "Dataset002_Other")
    for dataset in datasets:
        for configuration in ("2d", "3d_fullres"):
            for position, trainer in enumerate("AB"):
                dice = {n: both(0.5 + position * 0.01 * (i + 1)) for i, n in enumerate(names)}
                write_fold(tmp_path, trainer, 0, dice, dataset, configuration, LABELS)
    planned = study("A", TrainerEntry("B"), datasets=datasets, configurations=("2d", "3d_fullres"))
    found = compare_all(read(planned, tmp_path))
    assert len(found) == 4
    assert [c.p_holm for c in found] == pytest.approx([2 * 2 / 2**6] * 4)
