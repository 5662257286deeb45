"""TensorBoard's event files of trainings."""

from __future__ import annotations

import builtins
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.label_handling.label_handling import LabelManager

from nnunet_cpr.nnunet.cpr_trainer import LOGGED
from nnunet_cpr.nnunet.tensorboard import VARIABLE, TensorBoardLogger, class_names
from tests.helpers.workspace import Workspace

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

TRAINER = "nnUNetTrainerCPR_ws4_4epochs_3iters_seed3"


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Return the values by tag and step; a step that is there twice is an error.

    A timestamp, which does not fit into float32, is read from the wall time of its event.
    """
    events = event_accumulator.EventAccumulator(str(folder), {"scalars": 0}).Reload()
    values: dict[str, dict[int, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            assert event.step not in values.setdefault(tag, {}), f"{tag} has step {event.step} twice"
            values[tag][event.step] = event.wall_time if "timestamps" in tag else event.value
    return values


def assert_all_there(
    found: dict[str, dict[int, float]], logged: dict[str, Any], names: list[str]
) -> None:
    """Check that every value of nnU-Net's local logger is in the event files."""
    for key, values in logged.items():
        columns = {key: values}
        if isinstance(values[0], list):
            columns = {f"{key}/{name}": column for name, column in zip(names, zip(*values))}
        for tag, column in columns.items():
            assert list(found[tag]) == list(range(len(values))), tag
            of_tag, expected = np.array(list(found[tag].values())), np.array(column, float)
            if "timestamps" not in tag:
                expected = expected.astype(np.float32)
            np.testing.assert_array_equal(of_tag, expected, tag)


def test_all_values_are_there_after_an_interruption(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    space = workspace.with_results_in(tmp_path)
    names = [name for name in labels_of(space) if name != "background"]
    folder = space.fold(TRAINER) / "tensorboard"
    monkeypatch.setenv(VARIABLE, "1")
    begin = nnUNetTrainer.on_validation_epoch_start

    def stop(trainer: nnUNetTrainer) -> None:
        if trainer.current_epoch == 2:  # with values of an epoch that is trained again
            trainer.tensorboard.log("train_losses", 1e3, 3)
            trainer.tensorboard.close()
            raise Stopped
        begin(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(nnUNetTrainer, "on_validation_epoch_start", stop)
        with pytest.raises(Stopped):
            space.train_here(TRAINER)
    assert read(folder)["train_losses"][3] == 1e3

    space.train_here(TRAINER, "--c")
    logged = space.checkpoint(TRAINER)["logging"]
    found = read(folder)
    assert len(logged["train_losses"]) == 4 and {f"cpr_{key}" for key in LOGGED} <= logged.keys()
    assert_all_there(found, logged, names)
    seconds = np.subtract(logged["epoch_end_timestamps"], logged["epoch_start_timestamps"])
    np.testing.assert_allclose(list(found["epoch_seconds"].values()), seconds, rtol=1e-6)

    history = space.history(TRAINER)
    bounded = history[np.isfinite(history["kappa"])]
    for parameter, rows in bounded.groupby("parameter"):
        multipliers = found[f"cpr_lagrange_multiplier/{parameter}"]
        assert list(multipliers) == rows["epoch"].tolist() == [1, 2, 3]
        np.testing.assert_allclose(list(multipliers.values()), rows["multiplier"], rtol=1e-6)
        ratios = list(found[f"cpr_measure_to_kappa/{parameter}"].values())
        np.testing.assert_allclose(ratios, rows["measure"] / rows["kappa"], rtol=1e-6)
    final = {name: found[f"final_val/{name}_dice"] for name in (*names, "foreground")}
    assert all(list(dice) == [3] and 0 <= dice[3] <= 1 for dice in final.values())


def labels_of(space: Workspace) -> list[str]:
    preprocessed = Path(space.environment["nnUNet_preprocessed"]) / space.dataset
    return list(json.loads((preprocessed / "dataset.json").read_text())["labels"])


def test_enabling_it_later_writes_the_previous_epochs(tmp_path: Path) -> None:
    logged = {"lrs": [0.5, 0.25], "dice_per_class_or_region": [[0.5, 0.25], [0.75, math.nan]]}
    logger = TensorBoardLogger(tmp_path, 2, logged, {1: "liver", (1, 2): "whole tumor"})
    logger.log("lrs", 0.125, 2)
    logger.log("dice_per_class_or_region/class_1", 1.0, 2)
    logger.close()
    found = read(tmp_path / "tensorboard")
    assert found["lrs"] == {0: 0.5, 1: 0.25, 2: 0.125}
    assert found["dice_per_class_or_region/liver"] == {0: 0.5, 1: 0.75, 2: 1.0}
    assert math.isnan(found["dice_per_class_or_region/whole tumor"][1])


def test_new_training_hides_the_previous_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        logger = TensorBoardLogger(tmp_path, 0, {}, {})
        for epoch in range(3 if value == 1 else 1):
            logger.log("lrs", value, epoch)
        logger.log_summary("final_val/foreground_dice", value)
        logger.close()
        (file,) = (f for f in (tmp_path / "tensorboard").iterdir() if "-" not in f.name)
        file.rename(file.with_name(f"events.out.tfevents.{int(value)}-"))  # files are read by name
    assert read(tmp_path / "tensorboard") == {
        "lrs": {0: 2.0},
        "final_val/foreground_dice": {0: 2.0},
    }


@pytest.mark.parametrize(
    ("labels", "order", "expected"),
    [
        ({"background": 0, "liver": 1, "tumor": 2, "ignore": 3}, None, {1: "liver", 2: "tumor"}),
        (
            {"background": 0, "whole": [1, 2], "core": 2},
            [1, 2],
            {(1, 2): "whole", 2: "core"},
        ),
    ],
)
def test_class_names_follow_nnunets_order(labels: dict, order: list | None, expected: dict) -> None:
    manager = LabelManager(labels, order)
    assert class_names(manager) == expected
    assert list(class_names(manager)) == list(
        manager.foreground_regions if manager.has_regions else manager.foreground_labels
    )


def test_missing_package_is_reported_in_one_line(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = workspace.build("nnUNetTrainerSGD_seed7", monkeypatch)
    monkeypatch.setenv(VARIABLE, "true")
    import_module = builtins.__import__

    def refuse(name: str, *arguments: Any) -> Any:
        if name == "torch.utils.tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return import_module(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        trainer.on_train_start()
    said = capsys.readouterr().err
    assert "pip install 'nnunet-cpr[tensorboard]'" in said and said.count("\n") == 1


@pytest.mark.parametrize("value", ["0", "False", "false", None])
def test_it_is_off_by_default(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    trainer = workspace.build("nnUNetTrainerSGD_seed7", monkeypatch)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    trainer.on_train_start()
    assert trainer.tensorboard is None and trainer.logger.loggers == []
