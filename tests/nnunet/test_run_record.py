"""Record of a run: written when it begins, compared when it is continued."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nnunetv2.run.run_training import maybe_load_checkpoint
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.nnunet import processes
from nnunet_cpr.nnunet.run_record import RunRecord, read_record, record_of
from nnunet_cpr.nnunet.seen_cases import describe_origin
from nnunet_cpr.nnunet.tools import extend
from tests.golden.tiny_trainer import build_trainer, nnunet_folders

NAME = "nnUNetTrainerSGD_anytime_seed1_9epochs_5iters"
SPLIT = {"train": ["a", "b", "c"], "val": ["d"]}


@pytest.fixture
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """nnU-Net's folders, and its trainer without data."""
    monkeypatch.setattr(nnUNetTrainer, "do_split", lambda trainer: (SPLIT["train"], SPLIT["val"]))
    monkeypatch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: trainer.do_split())
    with nnunet_folders(tmp_path):
        yield


def begin(name: str) -> tuple[Any, Path]:
    trainer = build_trainer(name)
    trainer.on_train_start()
    return trainer, Path(trainer.output_folder)


def save(trainer: Any, epochs: int, file: str = "checkpoint_latest.pth") -> None:
    trainer.current_epoch = epochs - 1  # nnU-Net stores the next one
    trainer.save_checkpoint(str(Path(trainer.output_folder) / file))


def continue_training(name: str) -> Any:
    trainer = build_trainer(name, continues=True)
    maybe_load_checkpoint(trainer, True, False)
    trainer.on_train_start()
    return trainer


@pytest.mark.usefixtures("_folders")
def test_record_says_what_a_training_is_made_from() -> None:
    trainer, fold = begin("nnUNetTrainerAdamCPR_20epochs")
    record = read_record(fold)
    assert record is not None
    assert record == RunRecord(**json.loads((fold / "nnunet_cpr_run.json").read_text()))
    assert record.trainer == "nnUNetTrainerAdamCPR_20epochs" and record.split == SPLIT
    assert record.training["kappa"] == "ws1000" and record.training["warmup"] == 500
    assert record.plans["patch_size"] == trainer.configuration_manager.patch_size
    assert record.weights == {} and {"nnunetv2", "torch", "CUDA"} <= record.versions.keys()
    save(trainer, 3)
    continue_training("nnUNetTrainerAdamCPR_20epochs")
    assert read_record(fold) == record  # of its beginning


@pytest.mark.usefixtures("_folders")
def test_plans_are_recorded_as_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    initialize = nnUNetTrainer.initialize

    def change_plans(trainer: Any) -> None:
        trainer.configuration_manager.configuration["patch_size"] = [1, 2, 3]
        initialize(trainer)

    monkeypatch.setattr(nnUNetTrainer, "initialize", change_plans)
    trainer, fold = begin(NAME)
    assert trainer.configuration_manager.patch_size == [1, 2, 3]
    record = read_record(fold)
    assert record is not None and record.plans["patch_size"] != [1, 2, 3]


@pytest.mark.usefixtures("_folders")
@pytest.mark.parametrize("has_record", [True, False])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("nnUNetTrainerSGD_constant_ema0p5_seed1_9epochs_5iters", "ema: expected 0.5, got 0.999"),
        ("nnUNetTrainerSGD_anytime_seed2_9epochs_5iters", "seed: expected 2, got 1"),
        ("nnUNetTrainerSGD_anytime_freezeencoder_seed1_9epochs_5iters", "freeze: expected encoder"),
        ("nnUNetTrainerSGD_ema_cooldown20p_seed1_9epochs_5iters", "schedule: expected Cooldown"),
        (
            "nnUNetTrainerSGD_anytime_seed1_9epochs_5iters_on_nnUNetTrainerDA5",
            "nnUNetTrainerDA5, got None",
        ),
    ],
)
def test_renamed_folder_of_another_training_is_not_continued(
    other: str, words: str, has_record: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, fold = begin(NAME)
    save(trainer, 3)
    if not has_record:  # as those of version 0.3.0
        (fold / "nnunet_cpr_run.json").unlink()
    renamed = Path(str(fold).replace(NAME, other))
    shutil.copytree(fold, renamed)
    with pytest.raises(SystemExit):
        continue_training(other)
    assert words in capsys.readouterr().err
    assert continue_training(NAME).current_epoch == 3


@pytest.mark.usefixtures("_folders")
def test_training_with_other_plans_is_not_continued(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, fold = begin(NAME)
    save(trainer, 3)
    record = record_of(fold)
    record.changed(fold, plans={**record.plans, "batch_size": 7})
    with pytest.raises(SystemExit):
        continue_training(NAME)
    assert "plans batch_size: expected 2, got 7" in capsys.readouterr().err


@pytest.mark.usefixtures("_folders")
def test_validation_of_the_best_checkpoint_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """``nnUNetv2_train --val_best`` loads it after the training, with its number of epochs."""

    def train(trainer: Any) -> None:
        trainer.on_train_start()
        save(trainer, 4, "checkpoint_best.pth")
        trainer.perform_actual_validation()  # amid the training
        assert not read_record(fold).validated
        save(trainer, 9, "checkpoint_final.pth")

    monkeypatch.setattr(nnUNetTrainer, "run_training", train)
    monkeypatch.setattr(nnUNetTrainer, "perform_actual_validation", lambda trainer: None)
    trainer = build_trainer(NAME)
    fold = Path(trainer.output_folder)
    trainer.run_training()
    trainer.load_checkpoint(str(fold / "checkpoint_best.pth"))
    trainer.perform_actual_validation()
    assert read_record(fold).validated == {"checkpoint": "checkpoint_best.pth", "epochs": 4}


@pytest.mark.usefixtures("_folders")
def test_finish_outlives_a_signal_and_a_killed_validation(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, fold = begin(NAME)
    save(trainer, 4)
    (fold / processes.REQUEST).write_text("of a process that a signal has ended")
    continued = continue_training(NAME)
    with pytest.raises(Exception, match=r"^$") as ended:
        continued.on_epoch_start()
    assert type(ended.value).__name__ == "Finished"
    record = read_record(fold)
    assert record is not None and record.finished_after == 4
    save(continued, 4, "checkpoint_final.pth")
    # Its validation was killed: only that is done, each time.
    again = continue_training(NAME)
    with pytest.raises(type(ended.value)):
        again.on_epoch_start()
    record = record_of(fold)
    record.changed(fold, validated={"checkpoint": "checkpoint_final.pth", "epochs": 4})
    with pytest.raises(SystemExit):
        continue_training(NAME)
    assert "was finished after 4 epochs; to train longer" in capsys.readouterr().err
    begin(NAME)  # anew
    assert not (fold / processes.REQUEST).exists()


@pytest.mark.usefixtures("_folders")
def test_extend_that_failed_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, fold = begin(NAME)
    save(trainer, 4)
    shutil.copytree(fold, fold.with_name("fold_1"))
    write, written = extend.atomic_torch_save, []

    def fail_at_second(content: Any, path: Path) -> None:
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        write(content, path)

    monkeypatch.setattr(extend, "atomic_torch_save", fail_at_second)
    with pytest.raises(OSError, match="No space left"):
        extend.extend_model(fold.parent, 20, print)
    target, folds = extend.extend_model(fold.parent, 20, print)
    assert folds == ["0", "1"]
    assert all((target / f"fold_{n}" / "checkpoint_latest.pth").exists() for n in folds)
    record = read_record(target / "fold_1")
    assert record is not None and record.trainer == NAME.replace("9epochs", "20epochs")
    assert record.training["epochs"] == 20 and record.split == SPLIT
    assert continue_training(record.trainer).current_epoch == 4


@pytest.mark.usefixtures("_folders")
def test_weights_that_have_seen_validation_cases_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    first, fold = begin(NAME)
    record = record_of(fold)
    seen = {"path": "/w.pth", "sha256": "0", "dataset": record.dataset, "trained_on": ["e"]}
    record.changed(fold, split={"train": ["c", "d"], "val": ["a", "b"]}, weights=seen)
    save(first, 9, "checkpoint_final.pth")
    given = describe_origin(fold / "checkpoint_final.pth", "0" * 64, "Dataset002_B", ["c", "d"])
    assert given["seen"] == []  # equal ids of other data
    assert given["trained_on"] == ["c", "d", "e"] and given["dataset"] == fold.parents[1].name
    tuned = build_trainer("nnUNetTrainerSGD_preOne_9epochs_5iters")
    tuned.my_init_kwargs["nnunet_cpr_pretrained"] = {key: given[key] for key in ("path", "sha256")}
    tuned.on_train_start()
    assert "trained on 1 of the 1 validation cases of this fold, such as d" in capsys.readouterr().err
    written = read_record(Path(tuned.output_folder))
    assert written is not None and written.leaked == ["d"]


def test_weights_that_have_seen_equal_images_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another id, in another data set, and compressed again."""
    monkeypatch.setenv("nnUNet_raw", str(tmp_path))
    images = {"Dataset001_A": {"a": b"1", "b": b"2"}, "Dataset002_B": {"x": b"2", "y": b"3", "a": b"4"}}
    for number, (dataset, cases) in enumerate(images.items()):
        (tmp_path / dataset / "imagesTr").mkdir(parents=True)
        described = {"file_ending": ".nii.gz", "numTraining": len(cases)}
        (tmp_path / dataset / "dataset.json").write_text(json.dumps(described))
        for case, content in cases.items():
            file = tmp_path / dataset / "imagesTr" / f"{case}_0000.nii.gz"
            file.write_bytes(gzip.compress(content, mtime=number))
    for dataset, split in (("Dataset001_A", ["a", "b"]), ("Dataset003_Gone", ["x"])):
        RunRecord(dataset=dataset, split={"train": split, "val": []}).write(tmp_path)
        given = describe_origin(tmp_path / "w.pth", "0", "Dataset002_B", ["a", "x", "y"])
        assert given["seen"] == (["x"] if dataset == "Dataset001_A" else [])


@pytest.mark.usefixtures("_folders")
def test_weights_that_a_script_gives_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nnU-Net's ``run_training`` with ``pretrained_weights``; the command line has nothing to do."""
    first, fold = begin(NAME)
    save(first, 9, "checkpoint_final.pth")
    file = str(fold / "checkpoint_final.pth")
    monkeypatch.setattr("sys.argv", ["nnUNetv2_train", "4", "2d", "0", "-pretrained_weights", file])
    assert "nnunet_cpr_pretrained" not in build_trainer(NAME).my_init_kwargs
    monkeypatch.setattr("sys.argv", ["script.py"])
    tuned = build_trainer("nnUNetTrainerSGD_preOne_ema_9epochs_5iters")
    maybe_load_checkpoint(tuned, False, False, file)
    tuned.on_train_start()  # which copies the network
    record = read_record(Path(tuned.output_folder))
    assert record is not None and record.weights is not None
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert (record.weights["path"], record.weights["sha256"]) == (file, digest)
    assert record.leaked == [] and record.weights["trained_on"] == SPLIT["train"]


@pytest.mark.usefixtures("_folders")
def test_cases_that_are_trained_and_validated_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nnUNetTrainer, "do_split", lambda trainer: (["a", "b"], ["b"]))
    begin(NAME)
    assert "1 of the 1 validation cases are trained on, such as b" in capsys.readouterr().err


def test_unknown_entries_contradict_nothing(tmp_path: Path) -> None:
    known = RunRecord(training={"lr": 0.1}, plans={"a": 1}, split=SPLIT, weights={})
    assert not [*known.differences(RunRecord())] and not [*RunRecord().differences(known)]
    other = RunRecord(training={"lr": 0.2}, split={"train": ["a", "b", "x"], "val": ["d"]})
    assert [*known.differences(other)] == [
        "training lr: expected 0.1, got 0.2",
        "training cases: expected c among them, got x",
    ]
    weights = {"path": "w.pth", "sha256": "0"}
    assert [*known.differences(RunRecord(weights=weights))] == [
        "weights: expected random weights, got w.pth (SHA-256 0)"
    ]
    fold = tmp_path / "nnUNetTrainerX__nnUNetPlans__3d_fullres" / "fold_0"
    fold.mkdir(parents=True)
    assert record_of(fold) == RunRecord("nnUNetTrainerX")
    torch.save({"init_args": {}}, fold / "checkpoint_final.pth")
    assert record_of(fold).weights == {}
