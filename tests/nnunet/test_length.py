"""Trainings that are finished early and extended, through nnU-Net's own commands."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from nnunetv2.run.run_training import maybe_load_checkpoint
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.nnunet.parts.settings import FOLLOWED
from nnunet_cpr.nnunet.tools.extend import extend_model, with_epochs
from nnunet_cpr.refusals import Refusal
from tests.golden.tiny_trainer import build_trainer, nnunet_folders
from tests.helpers import ROOT
from tests.helpers.resume_cases import differences
from tests.helpers.workspace import Workspace

NAME = "nnUNetTrainerCPR_anytime_ema0p5_ws5_seed1_{}epochs_3iters"
DECAYED = "nnUNetTrainerSGD_anytime_seed1_1epochs_2iters"


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def train_and_finish(space: Workspace, name: str, epoch: int) -> None:
    """Ask the training in this epoch to finish."""
    begin = nnUNetTrainer.on_train_epoch_start

    def begin_and_ask(trainer: nnUNetTrainer) -> None:
        begin(trainer)
        if trainer.current_epoch == epoch:
            asked = command("finish", space.fold(name))
            done = f": {epoch} of {trainer.num_epochs} epochs done; asked process {os.getpid()} of"
            assert asked.exit_code == 0 and done in asked.output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnUNetTrainer, "on_train_epoch_start", begin_and_ask)
        space.train_here(name)


def assert_equal(space: Workspace, name: str, expected: dict[str, Any]) -> None:
    checkpoint = space.checkpoint(name)
    for key in ("network_weights", "optimizer_state", "_best_ema", "current_epoch"):
        assert not differences(checkpoint[key], expected[key]), key
    for key in ("mean_fg_dice", "lrs", "train_losses", "val_losses"):
        assert checkpoint["logging"][key] == expected["logging"][key]
    assert (space.fold(name) / "validation" / "summary.json").exists()


@pytest.mark.slow  # a minute
def test_finished_and_extended_trainings_equal_those_of_their_length(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finish six epochs after three, continue that as five, and compare with three and five."""
    short, whole, finished = NAME.format(3), NAME.format(5), NAME.format(6)
    reference = workspace.with_results_in(tmp_path / "reference")
    for name in (short, whole):
        reference.train_here(name)
    space = workspace.with_results_in(tmp_path / "finished")
    train_and_finish(space, finished, epoch=2)
    assert_equal(space, finished, reference.checkpoint(short))
    assert "Finished after 3 of 6 epochs" in space.logs(finished)[0].read_text()
    assert not list(space.fold(finished).glob(".*"))

    with pytest.raises(SystemExit):
        space.train_here(finished, "--c")
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "was finished after 3 epochs; to train longer: nnunet-cpr extend" in said
    assert space.checkpoint(finished)["current_epoch"] == 3

    extended = command("extend", space.model(finished), "--epochs", 5)
    assert extended.exit_code == 0 and not extended.stderr
    (line,) = re.findall(r"nnUNetv2_train .*", extended.output)
    assert line.split()[1:] == [
        space.dataset, "3d_fullres", "0", "-tr", whole, "-p", space.plans, "--c"
    ]  # fmt: skip
    before = sorted(path.name for path in space.fold(finished).iterdir())
    space.train_here(whole, "--c")
    assert_equal(space, whole, reference.checkpoint(whole))
    assert space.history(whole).equals(reference.history(whole))
    assert before == sorted(path.name for path in space.fold(finished).iterdir())
    for best in (space, reference):
        assert best.checkpoint(whole, "checkpoint_best.pth")["trainer_name"] == whole


def test_refusals_name_what_to_do(workspace: Workspace, tmp_path: Path) -> None:
    space = workspace.with_results_in(tmp_path)
    name = DECAYED
    nothing = command("finish", space.fold(name))
    assert nothing.exit_code == 1 and "without a running training" in nothing.stderr
    nothing = command("extend", space.model(name), "--epochs", 2)
    assert nothing.exit_code == 1 and "with checkpoints in folders" in nothing.stderr

    space.finish(name)
    again = command("extend", space.model(name), "--epochs", 1)
    assert again.exit_code == 1 and "extend it to another number" in again.stderr
    longer = command("extend", space.model(name), "--epochs", 2)
    assert longer.exit_code == 0 and not longer.stderr
    again = command("extend", space.model(name), "--epochs", 2)
    assert again.exit_code == 1 and "has a checkpoint; continue it with --c" in again.stderr
    other = space.model(name).with_name("nnUNetTrainerDA5__nnUNetPlans__2d")
    space.model(name).rename(other)
    foreign = command("extend", other, "--epochs", 2)
    assert foreign.exit_code == 1 and "expected a trainer of nnunet-cpr" in foreign.stderr
    assert all(len(each.stderr.splitlines()) == 1 for each in (nothing, again, foreign))


@pytest.mark.parametrize(
    "name",
    [
        "nnUNetTrainerCPR_50epochs",
        "nnUNetTrainerCPR_ws2p_10epochs",
        "nnUNetTrainerAdamCPR_20epochs",
        "nnUNetTrainerAdamW_20epochs",
        "nnUNetTrainerSGD_cooldown20p_20epochs",
        "nnUNetTrainerAttachCPR_on_nnUNetTrainer_5epochs",
        "nnUNetTrainerCPR_anytime_10epochs",
    ],
)
def test_training_that_0_3_0_extended_keeps_what_followed_the_shorter_length(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is continued and validated, with the bound and the warm-up of the beginning."""
    monkeypatch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: None)
    with nnunet_folders(tmp_path):
        shorter = save_fold(name)
        longer_name, _ = with_epochs(name, 200)
        checkpoint = torch.load(Path(shorter.output_folder) / "checkpoint_final.pth", weights_only=False)
        for validates in (False, False, True):
            longer = build_trainer(longer_name, continues=not validates)
            fold = Path(longer.output_folder)
            if not list(fold.glob("*.pth")):
                torch.save({**checkpoint, "trainer_name": longer_name}, fold / "checkpoint_latest.pth")
            maybe_load_checkpoint(longer, not validates, validates)
            longer.save_checkpoint(str(fold / "checkpoint_latest.pth"))
            if not validates:
                shutil.copyfile(fold / "checkpoint_latest.pth", fold / "checkpoint_final.pth")
        assert longer.current_epoch == 5 and longer.num_epochs == 200
        assert longer.training.warmup == shorter.training.warmup
        states = [each.optimizer.state_dict() for each in (shorter, longer)]
        assert states[0].get("cpr", {}).get("config") == states[1].get("cpr", {}).get("config")


def save_fold(name: str) -> Any:
    """Build a trainer and save it as if it had been trained for three epochs."""
    trainer = build_trainer(name)
    trainer.on_train_start()
    trainer.current_epoch = 2  # nnU-Net stores the next one
    trainer.save_checkpoint(str(Path(trainer.output_folder) / "checkpoint_final.pth"))
    return trainer


def test_training_that_cannot_be_longer_is_refused(tmp_path: Path) -> None:
    """Nothing is written, also if another fold could be extended."""
    with nnunet_folders(tmp_path):
        for name, words in (
            ("nnUNetTrainerSGD_cosine0p1_wd1en3_20epochs", "learning rate and weight decay would be"),
            ("nnUNetTrainerCPR_ws2p_20epochs", "learning rate and bound would be another one"),
            ("nnUNetTrainerCPR_constant_20epochs", "its bound would be another .* of 200 epochs; train"),
            ("nnUNetTrainerAdamW_constant_20epochs", "its learning rate would be another one"),
            ("nnUNetTrainerPlain_on_nnUNetTrainer_5epochs", "its learning rate would be another one"),
            ("nnUNetTrainerCPR_anytime_20epochs", "has 3 epochs; expected --epochs above that"),
        ):
            trainer = build_trainer(name)
            fold = Path(trainer.output_folder)
            for file, content in (
                ("plans.json", trainer.plans_manager.plans),
                ("dataset.json", trainer.dataset_json),
            ):
                (fold.parent / file).write_text(json.dumps(content))
            trainer.save_checkpoint(str(fold / "checkpoint_final.pth"))
            epochs = 3 if "anytime" in name else 200
            if "anytime" in name:
                trainer.current_epoch = 2
                (fold.parent / "fold_1").mkdir()
                trainer.save_checkpoint(str(fold.parent / "fold_1" / "checkpoint_final.pth"))
            with pytest.raises(Refusal, match=words):
                extend_model(fold.parent, epochs, print)
            if words.startswith("its bound"):  # so was that of 0.2.0, which did not record the length
                checkpoint = torch.load(fold / "checkpoint_final.pth", weights_only=False)
                del checkpoint["init_args"][FOLLOWED]
                torch.save(checkpoint, fold / "checkpoint_final.pth")
                with pytest.raises(Refusal, match="its bound would be another"):
                    extend_model(fold.parent, 19, print)
            longer = with_epochs(name, epochs)[0]
            assert not list(fold.parents[1].glob(f"{longer}__*"))


@pytest.mark.parametrize(
    ("name", "longer"),
    [
        ("nnUNetTrainerCPR", "nnUNetTrainerCPR_20epochs"),
        ("nnUNetTrainerCPR_5epochs_seed1", "nnUNetTrainerCPR_20epochs_seed1"),
        (
            "nnUNetTrainerPlain_anytime_on_nnUNetTrainer_5epochs",
            "nnUNetTrainerPlain_anytime_20epochs_on_nnUNetTrainer_5epochs",
        ),
    ],
)
def test_names_get_another_number_of_epochs(name: str, longer: str) -> None:
    assert with_epochs(name, 20)[0] == longer


def test_class_derived_from_a_family_gets_a_number_of_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "derived.py").write_text(
        "from nnunet_cpr.nnunet.trainer import nnUNetTrainerSGD\n\n\n"
        "class nnUNetTrainerDerivedSGD(nnUNetTrainerSGD):\n    pass\n"
    )
    folders = os.pathsep.join([str(tmp_path), str(ROOT / "trainers")])
    monkeypatch.setenv("nnUNet_extTrainer", folders)
    assert with_epochs("nnUNetTrainerDerivedSGD", 9)[0] == "nnUNetTrainerDerivedSGD_9epochs"
