"""``nnunet-cpr trainers NAME``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.names import WrongName
from nnunet_cpr.nnunet.tools.explain_name import explain
from tests.helpers import ROOT
from tests.helpers.nnunet_trainers import OTHER_PROJECTS

NEEDS_PLANS = """
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer


class nnUNetTrainerPretrained(nnUNetTrainer):
    def __init__(self, plans, configuration, fold, dataset_json, device=None):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.info = plans["pretrain_info"]
"""


@pytest.fixture(autouse=True)
def _searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_projects.py").write_text(OTHER_PROJECTS)
    (tmp_path / "needs_plans.py").write_text(NEEDS_PLANS)
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([str(tmp_path), str(ROOT / "trainers")]))
    monkeypatch.setenv("nnUNet_results", "not-touched")


def test_explanation_follows_the_stages_of_the_other_trainer() -> None:
    rows = dict(explain("nnUNetTrainerAttachCPR_on_nnUNet_Primus_M_Trainer"))
    assert rows["optimizer"].startswith("AdamW(betas=(0.9, 0.98)")
    assert "0.0003 (epoch 49)" in rows["learning rate"]
    assert "none for regularized parameters, 0.05 for biases" in rows["weight decay"]
    assert "set at step 13,500, after 5.4% of the training" in rows["bound"]
    assert rows["compare with"] == "nnUNetTrainerPlain_on_nnUNet_Primus_M_Trainer"


@pytest.mark.parametrize(
    ("name", "subject", "text"),
    [
        (
            "nnUNetTrainerCPR_ws0p5p_on_nnUNetTrainer_100epochs",
            "bound",
            "set at step 125, after 0.5% of the training",
        ),
        ("nnUNetTrainerCPR_ip20_2epochs", "bound", "not before step 40, after 8.0% of the training"),
        ("nnUNetTrainerAdam", "with CPR", "nnUNetTrainerAttachCPR_on_nnUNetTrainerAdam"),
    ],
)
def test_explanation_of_settings(name: str, subject: str, text: str) -> None:
    assert text in dict(explain(name))[subject]


def test_trainer_that_needs_its_plans_is_refused_in_one_line() -> None:
    with pytest.raises(WrongName, match="cannot be built without its data: KeyError: 'pretrain_info'"):
        explain("nnUNetTrainerCPR_on_nnUNetTrainerPretrained")


def test_command_explains_or_corrects_a_name() -> None:
    said = CliRunner().invoke(app, ["trainers", "nnUNetTrainerSGD_9epochs"])
    assert said.exit_code == 0 and "9 epochs of 250 iterations" in said.stdout
    long = "nnUNetTrainerCPR_lr1en1_momentum0p9_warmup30_6epochs_50iters_on_nnUNetTrainerDA5"
    narrow = CliRunner().invoke(app, ["trainers", long], env={"COLUMNS": "60"})
    assert "nnUNetTrainerSGD_lr0p1_momentum0p9_warmup30_6epochs_50iters_on" in narrow.stdout
    never = CliRunner().invoke(app, ["trainers", "nnUNetTrainerCPR_ws3000_1epochs"])
    assert never.exit_code == 1 and "no matrix is regularized" in never.stderr
    assert "never comes, as the training has 250 steps" in " ".join(never.stdout.split())
    wrong = CliRunner().invoke(app, ["trainers", "nnUNetTrainerCPR_DA5"])
    assert wrong.exit_code == 1 and wrong.stdout == ""
    assert wrong.stderr.count("\n") == 1 and "nnUNetTrainerCPR_on_nnUNetTrainerDA5" in wrong.stderr
