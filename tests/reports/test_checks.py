"""Warnings about runs that make a comparison doubtful."""

from nnunet_cpr.reports.checks import find_warnings
from nnunet_cpr.reports.results import Setting, read_results
from tests.helpers.report_folds import DATASET, both, study, write_fold, write_log

SETTING = Setting(DATASET, "3d_fullres", "nnUNetPlans")


def lines(tmp_path, planned):
    return find_warnings(read_results(planned, tmp_path, None, None), SETTING)


def test_sound_runs_have_no_warning(tmp_path):
    for fold in (0, 1):
        folder = write_fold(tmp_path, "A", fold, {"a": both(0.5), "b": {"1": 0.0, "2": 0.1}})
        write_log(folder, {epoch: (0.5 - 0.1 * epoch, 0.5, 0.3, 5) for epoch in range(8)})
    assert lines(tmp_path, study("A")) == []


def test_class_of_zero_is_named(tmp_path):
    for fold in (0, 1):
        write_fold(tmp_path, "A", fold, {"a": {"1": 0.5, "2": 0.0}, "b": {"1": 0.4, "2": 0.0}})
    assert lines(tmp_path, study("A")) == ["A: Dice of 0 in all cases of class left_kidney (all runs)."]


def test_collapsed_run_is_named(tmp_path):
    trainer = "nnUNetTrainerCPR"
    for seed in (1, 2):
        for fold in (0, 1):
            dice = 0.0 if (seed, fold) == (2, 1) else 0.5
            write_fold(tmp_path, f"{trainer}_seed{seed}", fold, {"a": both(dice), "b": both(dice)})
    found = lines(tmp_path, study(trainer, seeds=(1, 2)))
    assert found == [
        f"{trainer}: Dice of 0 in all cases of class {name} (fold 1, seed 2)."
        for name in ("liver", "left_kidney")
    ]


def test_missing_runs_are_counted(tmp_path):
    trainer = "nnUNetTrainerCPR"
    write_fold(tmp_path, f"{trainer}_seed1", 0, {"a": both(0.5)})
    assert lines(tmp_path, study(trainer, seeds=(1, 2, 3))) == [f"{trainer}: 1 of 6 runs have finished."]


def test_diverged_trainings_are_named(tmp_path):
    losses = {
        "A": [0.5, 0.2, float("nan"), float("nan")],
        "B": [0.5, 0.2, 0.9, 1.5, 2.0, 2.0],
        "C": [0.5, 0.2, 0.1, 0.0, -0.1, -0.2],
    }
    for trainer, values in losses.items():
        folder = write_fold(tmp_path, trainer, 0, {"a": both(0.5)})
        write_log(folder, {epoch: (loss, 0.5, 0.3, 5) for epoch, loss in enumerate(values)})
    assert lines(tmp_path, study(*losses, folds=(0,))) == [
        "A, fold 0: the training diverged (its loss is not a number).",
        "B, fold 0: the training diverged (its loss ends above that of its first epoch).",
    ]


def test_running_epoch_is_no_divergence(tmp_path):
    folder = write_fold(tmp_path, "A", 0, {"a": both(0.5)})
    write_log(folder, {epoch: (0.5 - 0.1 * epoch, 0.5, 0.3, 5) for epoch in range(6)})
    (log,) = folder.glob("training_log_*")
    log.write_text(log.read_text() + "2026-01-02 03:04:06.000000: Epoch 6 \n")
    assert lines(tmp_path, study("A", folds=(0,))) == []
