from itertools import product

import pytest

from nnunet_cpr.nnunet.run_record import RunRecord
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.reports.words import find_warnings
from tests.reports.folds import DATASET, NAN, both, study, write_fold, write_json, write_log


def test_fold_is_finished_after_validation(tmp_path):
    write_fold(tmp_path, "A", 1, {"a": both(0.5)})
    torn = write_fold(tmp_path, "A", 0, {"a": both(0.5)})
    path = torn / "validation" / "summary.json"
    path.write_text(path.read_text()[:30])
    results = read_results(study("A", "B"), tmp_path)
    (part,) = results.by_condition()
    assert part.finished_runs("A") == [(1, -1)] and not part.finished_runs("B")
    unreadable, unknown = results.notes
    assert "fold 0: validation/summary.json unreadable" in unreadable
    assert "1 of 1 runs have no record of" in unknown


def test_study_without_results_is_refused(tmp_path):
    write_log(tmp_path / DATASET / "A__nnUNetPlans__3d_fullres" / "fold_0", {0: (1, 1, 0, 5)})
    with pytest.raises(Refusal, match="study toy: no run has finished") as error:
        read_results(study("A"), tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(Refusal, match="expected a data set"):
        read_results(study("A", datasets=()), tmp_path)


def test_ratio_of_test_to_training_cases_is_that_of_the_split(tmp_path):
    """It widens every interval. The second fold trains on a subset; the third is not in the study."""
    write_fold(tmp_path, "A", 0, {"a": both(0.5)})
    splits = [("abcd", "ef"), ("ab", "d"), ("e", "abc")]
    record = tmp_path / "splits.json"
    write_json(record, {DATASET: [{"train": list(train), "val": list(val)} for train, val in splits]})

    def ratio(record):
        return read_results(study("A"), tmp_path, record).ratios[DATASET]

    assert ratio(None) == (1 / 4, "assumed")
    assert ratio(record) == (pytest.approx((2 / 4 + 1 / 5) / 2), "recorded splits")
    write_json(record, {DATASET: [{"train": []}]})
    assert ratio(record) == (1 / 4, "assumed")


@pytest.mark.parametrize(
    ("finished", "folds", "seeds"),
    [
        # Nine runs with a verdict before ten without one.
        ({(f, s) for f in range(5) for s in (1, 2)} | {(f, 3) for f in range(3)}, 3, 3),
        ({(f, s) for f in range(20) for s in (1, 2, 3) if (f + s) % 20}, 17, 3),
        ({(f, 1) for f in range(4)} | {(0, 2)}, 4, 1),
        (set(), 0, 0),
    ],
)
def test_largest_rectangle_prefers_runs_with_a_verdict(tmp_path, finished, folds, seeds):
    write_fold(tmp_path, "A", 0, {"a": both(0.5)})
    planned = study("A", folds=tuple(range(20)), seeds=(1, 2, 3))
    write_fold(tmp_path, "A_seed1", 0, {"a": both(0.5)})
    (part,) = read_results(planned, tmp_path).by_condition()
    found = part.largest_rectangle(finished)
    assert tuple(map(len, found)) == (folds, seeds)
    assert all(run in finished for run in product(*found))


# Warnings


def warnings(tmp_path, *trainers, **changes):
    return find_warnings(read_results(study(*trainers, **changes), tmp_path).by_condition()[0])


def test_collapsed_and_missing_runs_are_named(tmp_path):
    trainer = "nnUNetTrainerCPR"
    for seed, fold, dice in ((1, 0, 0.5), (1, 1, 0.5), (2, 0, 0.0)):
        write_fold(tmp_path, f"{trainer}_seed{seed}", fold, {"a": {"1": 0.5, "2": dice}})
    assert warnings(tmp_path, trainer, seeds=(1, 2)) == [
        f"{trainer}: Dice of 0 in all cases of class left_kidney (fold 0, seed 2).",
        f"{trainer}: 3 of 4 runs finished.",
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


def test_trainings_that_were_ended_early_are_named(tmp_path):
    trainers = ("nnUNetTrainerCPR_10epochs", "nnUNetTrainer_3epochs", "TheirTrainer")
    for trainer in trainers:
        name = f"{trainer}_seed1" if "CPR" in trainer else trainer
        folder = write_fold(tmp_path, name, 0, {"a": both(0.5)})
        write_log(folder, {epoch: (0.5, 0.5, 0.3, 5) for epoch in range(3)})
    found = warnings(tmp_path, trainers[0], folds=(0,), seeds=(1,))
    assert found == [f"{trainers[0]}, fold 0, seed 1: 3 of 10 epochs were trained."]
    assert warnings(tmp_path, *trainers[1:], folds=(0,)) == []
    for fold in (1, 2):
        folder = write_fold(tmp_path, f"{trainers[0]}_seed1", fold, {"a": both(0.5)})
        write_log(folder, {epoch: (0.5, 0.5, 0.3, 5) for epoch in range(3)})
    found = warnings(tmp_path, trainers[0], folds=(0, 1, 2), seeds=(1,))
    assert found == [f"{trainers[0]}, all 3 runs: 3 of 10 epochs were trained."]


def test_versions_and_sizes_of_splits_are_those_of_the_records(tmp_path):
    versions = {"nnunetv2": "2.8.1", "torch": "2.14.1"}
    for fold, val in ((0, ["a"]), (1, ["b", "c"])):
        run = write_fold(tmp_path, "A", fold, {case: both(0.5) for case in val})
        split = {"train": [case for case in "abcd" if case not in val], "val": val}
        RunRecord("A", dataset=DATASET, split=split, versions=versions).write(run)
    notes = read_results(study("A", folds=(0, 1)), tmp_path).notes
    assert notes == [
        "Trained with nnunetv2 2.8.1, torch 2.14.1 (2 runs).",
        f"{DATASET}: trained on 2 to 3 and validated on 1 to 2 cases a fold, by the runs' records.",
    ]
    RunRecord("A", versions={**versions, "torch": "2.15.0"}).write(run)
    assert read_results(study("A", folds=(0, 1)), tmp_path).notes[0] == (
        "Trained with nnunetv2 2.8.1, torch 2.14.1 (1 run); nnunetv2 2.8.1, torch 2.15.0 (1 run)."
    )
