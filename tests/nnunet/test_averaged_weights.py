"""Averaged weights against a float64 average of the weights after each step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import nn

from nnunet_cpr.nnunet.base_trainer import parts_of
from nnunet_cpr.nnunet.parts.average import TRAINING_WEIGHTS, AveragedWeights
from tests.golden.tiny_trainer import build_trainer, nnunet_folders, set_gradients
from tests.helpers import ROOT
from tests.helpers.resume_cases import differences
from tests.helpers.workspace import Workspace

ANYTIME = "nnUNetTrainerCPR_anytime_ema0p5_ws3_seed1_4iters"
NORMALIZED = "nnUNetTrainerSGD_ema0p5_seed1_4iters_on_nnUNetTrainerBN"

SAME_OPTIMIZER = """
import torch
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer


class nnUNetTrainerSameOptimizer(nnUNetTrainer):
    def configure_optimizers(self):
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.network.parameters(), self.initial_lr)
        return self.optimizer, PolyLRScheduler(self.optimizer, self.initial_lr, self.num_epochs)
"""


def averages(states: list[dict[str, torch.Tensor]], decay: float) -> dict[str, torch.Tensor]:
    """Return the average of states in float64, whose window is at most a tenth of the steps."""
    found: dict[str, Any] = {}
    for name in states[0]:
        values = [state[name].double() for state in states]
        average = values[0]
        for step, value in enumerate(values[1:], start=2):
            window = max(1.0, min(1 / (1 - decay), step / 10))
            average = average + (value - average) / window
        found[name] = average if states[0][name].is_floating_point() else values[-1]
    return found


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_average_has_the_window_of_its_documentation(decay: float) -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    averaged = AveragedWeights(network, decay)
    states = []
    for step in range(60):
        network(torch.randn(3, 1, 2, 2)).square().sum().backward()
        optimizer.step()
        averaged.update(network)
        states.append({key: value.clone() for key, value in network.state_dict().items()})
        expected = averages(states, decay)
        for name, value in averaged.network.state_dict().items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
        assert averaged.steps == step + 1


@pytest.mark.slow  # 20 seconds
@pytest.mark.parametrize("family", [ANYTIME, NORMALIZED])
def test_training_validates_and_saves_averages(
    family: str, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continue from a checkpoint bit for bit, and validate and predict with the averaged weights."""
    own, ending, other = family.partition("_on_")
    name = f"{own}_6epochs{ending}{other}"
    whole, continued = (workspace.with_results_in(tmp_path / each) for each in ("whole", "continued"))
    states, validated = [], []
    train_step, validate = nnUNetTrainer.train_step, nnUNetTrainer.on_validation_epoch_start

    def recorded_step(trainer: Any, batch: Any) -> Any:
        result = train_step(trainer, batch)
        states.append({key: value.clone() for key, value in trainer.network.state_dict().items()})
        return result

    def recorded_validation(trainer: Any) -> None:
        validated.append({k: v.clone() for k, v in trainer.network.state_dict().items()})
        validate(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(nnUNetTrainer, "train_step", recorded_step)
        patch.setattr(nnUNetTrainer, "on_validation_epoch_start", recorded_validation)
        whole.train_here(name)
    expected, checkpoint = averages(states, 0.5), whole.checkpoint(name)
    for key, value in checkpoint["network_weights"].items():
        torch.testing.assert_close(value.double(), expected[key], rtol=1e-5, atol=1e-6)
    assert not differences(validated[-1], dict(checkpoint["network_weights"]))
    assert not differences(checkpoint["optimizer_state"][TRAINING_WEIGHTS]["weights"], states[-1])
    assert "Validating and saving averaged weights" in whole.logs(name)[0].read_text()

    continued.begin_here(name, epoch=3)
    continued.train_here(name, "--c")
    for key in ("optimizer_state", "network_weights"):
        assert not differences(continued.checkpoint(name)[key], checkpoint[key])
    assert continued.predict_here(name, "--disable_tta").is_dir()


def test_checkpoint_without_averaged_weights_is_refused(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    space = workspace.with_results_in(tmp_path)
    without, with_average = "nnUNetTrainerSGD_2epochs_2iters", "nnUNetTrainerSGD_ema_2epochs_2iters"
    built = space.build(without, monkeypatch)
    built.save_checkpoint(str(tmp_path / "checkpoint.pth"))
    other = space.build(with_average, monkeypatch, continues=True)
    with pytest.raises(SystemExit):
        other.load_checkpoint(str(tmp_path / "checkpoint.pth"))
    assert "without averaged weights" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["nnUNetTrainerAdam", "nnUNetTrainerSameOptimizer"])
def test_each_step_is_averaged_once(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a later stage configures the same optimizer again."""
    (tmp_path / "other.py").write_text(SAME_OPTIMIZER)
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([str(tmp_path), str(ROOT / "trainers")]))
    monkeypatch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: None)
    with nnunet_folders(tmp_path):
        trainer = build_trainer(f"nnUNetTrainerPlain_ema_2epochs_2iters_on_{other}")
        trainer.on_train_start()
        trainer.optimizer, trainer.lr_scheduler = trainer.configure_optimizers()
        trainer.on_train_epoch_start()
        set_gradients(trainer, 0)
        trainer.optimizer.step()
    assert parts_of(trainer).average.weights.steps == 1


def test_optimizer_or_schedule_replaced_in_the_training_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: None)
    with nnunet_folders(tmp_path):
        for suffix, attribute, said in (
            ("ema", "optimizer", "that is not from configure_optimizers"),
            ("constant", "lr_scheduler", "poly in place of _constant"),
            ("cooldown50p", "num_epochs", "its optimizer was built for 1 epoch of 250 iterations"),
        ):
            trainer = build_trainer(f"nnUNetTrainerPlain_{suffix}_250iters_on_nnUNetTrainer_1epoch")
            trainer.on_train_start()
            replaced = {
                "optimizer": torch.optim.SGD(trainer.network.parameters(), lr=0.1),
                "lr_scheduler": PolyLRScheduler(trainer.optimizer, 0.01, 2),
                "num_epochs": 3,
            }
            setattr(trainer, attribute, replaced[attribute])
            trainer.on_epoch_start()
            with pytest.raises(SystemExit):
                trainer.train_step({})
            assert said in capsys.readouterr().err
