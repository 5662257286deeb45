import numpy as np
import pytest

from nnunet_cpr.nnunet.fold_files import read_logs
from nnunet_cpr.reports.checks import find_warnings
from nnunet_cpr.reports.results import (
    ReportError,
    Setting,
    read_results,
)
from tests.reports.folds import (
    DATASET,
    NAN,
    both,
    study,
    write_fold,
    write_log,
)

SETTING = Setting(DATASET, "3d_fullres", "nnUNetPlans")


def test_cases_are_tidy_with_class_names(tmp_path):
    write_fold(tmp_path, "A", 0, {"b": {"1": 0.5, "2": 0.7}, "a": {"1": 0.1, "2": NAN}})
    cases = read_results(study("A"), tmp_path).cases
    assert cases[["case", "class", "fold", "trainer"]].to_numpy().tolist() == [
        ["a", "liver", 0, "A"],
        ["a", "left_kidney", 0, "A"],
        ["b", "liver", 0, "A"],
        ["b", "left_kidney", 0, "A"],
    ]
    np.testing.assert_array_equal(cases["dice"], [0.1, NAN, 0.5, 0.7])


def test_fold_is_finished_after_validation(tmp_path):
    write_fold(tmp_path, "A", 1, {"a": both(0.5)})
    torn = write_fold(tmp_path, "A", 0, {"a": both(0.5)})
    path = torn / "validation" / "summary.json"
    path.write_text(path.read_text()[:30])
    results = read_results(study("A", "B"), tmp_path)
    assert results.finished_runs(SETTING, "A") == [(1, -1)] and not results.finished_runs(SETTING, "B")
    assert len(results.notes) == 1 and "fold 0: validation/summary.json unreadable" in results.notes[0]


def test_study_without_results_is_refused(tmp_path):
    write_log(tmp_path / DATASET / "A__nnUNetPlans__3d_fullres" / "fold_0", {0: (1, 1, 0, 5)})
    with pytest.raises(ReportError, match="study toy: no run has finished") as error:
        read_results(study("A"), tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(ReportError, match="expected a data set"):
        read_results(study("A", datasets=()), tmp_path)


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


# Warnings


def warnings(tmp_path, *trainers, **changes):
    return find_warnings(read_results(study(*trainers, **changes), tmp_path), SETTING)


def test_collapsed_and_missing_runs_are_named(tmp_path):
    trainer = "nnUNetTrainerCPR"
    for seed, fold, dice in ((1, 0, 0.5), (1, 1, 0.5), (2, 0, 0.0)):
        write_fold(tmp_path, f"{trainer}_seed{seed}", fold, {"a": {"1": 0.5, "2": dice}})
    assert warnings(tmp_path, trainer, seeds=(1, 2)) == [
        f"{trainer}: Dice of 0 in all cases of class left_kidney (fold 0, seed 2).",
        f"{trainer}: 3 of 4 runs have finished.",
    ]


def test_diverged_trainings_are_named(tmp_path):
    losses = {
        "A": [0.5, 0.2, NAN, NAN],
        "B": [0.5, 0.2, 0.9, 1.5, 2.0, 2.0],
        "C": [0.5, 0.2, 0.1, 0.0, -0.1, -0.2],
    }
    for trainer, values in losses.items():
        folder = write_fold(tmp_path, trainer, 0, {"a": both(0.5)})
        write_log(folder, {epoch: (loss, 0.5, 0.3, 5) for epoch, loss in enumerate(values)})
    assert warnings(tmp_path, *losses, folds=(0,)) == [
        "A, fold 0: the training diverged (its loss is not a number).",
        "B, fold 0: the training diverged (its loss ends above that of its first epoch).",
    ]
