"""TensorBoard's event files of trainings."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.nnunet.cpr_trainer import LOGGED
from nnunet_cpr.nnunet.tensorboard import VARIABLE, TensorBoardLogger
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


def assert_all_there(found: dict[str, dict[int, float]], logged: dict[str, Any]) -> None:
    """Check that every value of nnU-Net's local logger is in the event files."""
    for key, values in logged.items():
        columns = {key: values}
        if isinstance(values[0], list):
            columns = {f"{key}/class_{i}": column for i, column in enumerate(zip(*values), 1)}
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
    assert_all_there(found, logged)
    history = space.history(TRAINER)
    bounded = history[np.isfinite(history["kappa"])]
    for parameter, rows in bounded.groupby("parameter"):
        multipliers = found[f"cpr_lagrange_multiplier/{parameter}"]
        assert list(multipliers) == rows["epoch"].tolist() == [1, 2, 3]
        np.testing.assert_allclose(list(multipliers.values()), rows["multiplier"], rtol=1e-6)
        ratios = list(found[f"cpr_measure_to_kappa/{parameter}"].values())
        np.testing.assert_allclose(ratios, rows["measure"] / rows["kappa"], rtol=1e-6)
    final = [values for tag, values in found.items() if tag.startswith("final_val/")]
    assert final and all(list(dice) == [3] and 0 <= dice[3] <= 1 for dice in final)


def test_new_training_hides_the_previous_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        logger = TensorBoardLogger(tmp_path, 0)
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
