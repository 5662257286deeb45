"""nnU-Net trainings with Muon."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.poly_lr import warmup_poly
from nnunet_cpr.nnunet.tools.explanation import explain
from nnunet_cpr.nnunet.trainer import trainer_class
from nnunet_cpr.optimizers import Muon, MuonCPR
from tests.helpers import ROOT
from tests.helpers.command_server import CommandServer
from tests.helpers.workspace import PLANS, Workspace

CPR = "nnUNetTrainerMuonCPR_ws1_warmup2_2epochs_2iters_seed1"


class Stopped(Exception):
    pass


@pytest.fixture(scope="module", autouse=True)
def _no_figures_and_validation() -> Iterator[None]:
    """Leave out the slowest parts of a training, which do not depend on the optimizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NamedTrainer, "_draw", lambda trainer: None)
        patch.setattr(nnUNetTrainer, "perform_actual_validation", lambda trainer, probabilities: None)
        yield


@pytest.fixture(scope="module")
def trained(workspace: Workspace) -> Workspace:
    workspace.train_here(CPR)
    return workspace


def test_training_has_warmup_bounds_and_muon(trained: Workspace) -> None:
    log = trained.logs(CPR)[0].read_text()
    assert "with MuonCPR and WarmupPolyLRScheduler: learning rate" in log
    rates = [float(line.split()[-1]) for line in log.splitlines() if "Current learning rate" in line]
    assert rates == [pytest.approx(warmup_poly(i, 3e-3, 2, 4), abs=1e-5) for i in (0, 2)]
    history = trained.history(CPR)
    assert (history.query("epoch == 1")["kappa"] < 1e9).all() and history["multiplier"].max() > 0
    (group,) = trained.checkpoint(CPR)["optimizer_state"]["param_groups"]
    assert {"adamw", "muon", "muon_transposed"} == set(group["rules"])


def test_continued_training_equals_an_uninterrupted_one(
    trained: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = trained.with_results_in(tmp_path)
    begin = nnUNetTrainer.on_epoch_start

    def stop(trainer: nnUNetTrainer) -> None:
        if trainer.current_epoch == 1:
            raise Stopped
        begin(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(nnUNetTrainer, "on_epoch_start", stop)
        with pytest.raises(Stopped):
            other.train_here(CPR)
    other.train_here(CPR, "--c")
    ours, theirs = other.checkpoint(CPR), trained.checkpoint(CPR)
    a, b = ours["optimizer_state"], theirs["optimizer_state"]
    for key, value in a["cpr"]["state"].items():
        assert torch.equal(value, b["cpr"]["state"][key]), key
    for index, state in a["state"].items():
        assert all(torch.equal(value, b["state"][index][key]) for key, value in state.items())
    for key, value in ours["network_weights"].items():
        assert torch.equal(value, theirs["network_weights"][key]), key


@pytest.mark.parametrize(
    ("name", "decay", "baseline"),
    [
        ("nnUNetTrainerMuon", 3e-5, None),
        ("nnUNetTrainerMuon_wd1en2_lr1en3_warmup9", 1e-2, None),
        ("nnUNetTrainerMuon_decoupled_wd0p1", 0.0, "DecoupledDecay"),
        ("nnUNetTrainerMuon_rescale0p8_on_nnUNetTrainerDA5", 0.0, "NormRescaling"),
    ],
)
def test_muon_has_weight_decay_or_a_comparison_method(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    decay: float,
    baseline: str | None,
) -> None:
    trainer = workspace.build(name, monkeypatch)
    assert type(trainer.optimizer) is Muon
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {decay}
    saved = trainer.optimizer.state_dict().get("baseline", {"config": {"method": None}})
    assert saved["config"]["method"] == baseline
    settings = parse_trainer_name(name)
    assert settings is not None
    assert trainer.initial_lr == (settings.lr or 3e-3)
    assert trainer.lr_scheduler.warmup == (2000 if settings.warmup is None else settings.warmup)


def test_muon_combines_with_other_trainers(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "nnUNetTrainerMuonCPR_ws9_on_nnUNetTrainerDA5"
    trainer = workspace.build(name, monkeypatch)
    assert type(trainer.optimizer) is MuonCPR and type(trainer).__name__ == name
    assert "nnUNetTrainerDA5" in [base.__name__ for base in type(trainer).__mro__]
    kernels = {n for n, p in trainer.network.named_parameters() if p.ndim == 5}
    assert set(trainer.cpr.names) == kernels


def test_derived_trainer_passes_arguments_to_muon(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in ("nnUNetTrainerMuon", "nnUNetTrainerMuonCPR"):
        trainer = workspace.build(f"{family}_seed3", monkeypatch)
        monkeypatch.setattr(type(trainer), "muon_options", {"adamw_for": ("transposed",)})
        (group,) = trainer.build_optimizer().param_groups
        assert group["adamw_for"] == ("transposed",) and "muon_transposed" not in group["rules"]


def test_explanation_names_the_counterpart() -> None:
    ours = dict(explain("nnUNetTrainerMuonCPR_ws900_lr1en3_5epochs_warmup5"))
    assert ours["optimizer"].startswith("MuonCPR(") and "momentum=0.95" in ours["optimizer"]
    assert f"{warmup_poly(250, 1e-3, 5, 1250):.3g} (epoch 1)" in ours["learning rate"]
    assert ours["compare with"] == "nnUNetTrainerMuon_lr1en3_warmup5_5epochs"
    theirs = dict(explain("nnUNetTrainerMuon_awd"))
    assert theirs["weight decay"] == "3e-05, applied by AdaptiveWeightDecay"
    assert theirs["compare with"] == "nnUNetTrainerMuonCPR"


def test_checkpoint_with_other_rules_is_refused(
    trained: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trained.build(CPR, monkeypatch, continues=True)
    trainer.optimizer = MuonCPR(trainer.network, adamw_for=("head",), **trainer.cpr_settings)
    with pytest.raises(SystemExit):
        trainer.load_checkpoint(str(trained.fold(CPR) / "checkpoint_final.pth"))
    said = capsys.readouterr().err
    assert "adamw_for: expected ('head',), got ('first', 'head', 'depthwise')" in said
    assert said.count("\n") == 1


def test_defaults_of_the_trainers_are_those_of_the_library() -> None:
    for family in ("nnUNetTrainerMuon", "nnUNetTrainerMuonCPR"):
        found = trainer_class(family)
        assert found is not None
        assert (
            found.settings.defaults.lr == MuonCPR([torch.nn.Parameter(torch.ones(3, 3))]).defaults["lr"]
        )
        assert dataclasses.replace(found.settings, warmup=5).bound.steps == 10


@pytest.fixture(scope="module")
def server() -> Iterator[CommandServer]:
    started = CommandServer("tests.helpers.nnunet_trainers:make_small")
    yield started
    started.close()


@pytest.mark.slow  # 10 seconds each
@pytest.mark.parametrize(
    "name",
    [
        "nnUNetTrainerMuonCPR_ws3_warmup2_3epochs_2iters_seed1",
        "nnUNetTrainerMuon_wd1en2_warmup2_3epochs_2iters_seed1_on_nnUNetTrainerDA5",
    ],
)
def test_training_is_killed_continued_and_predicts(
    name: str, workspace: Workspace, server: CommandServer, tmp_path: Path
) -> None:
    space = workspace.with_results_in(tmp_path)
    environment = {**space.environment, "nnUNet_extTrainer": str(ROOT / "trainers")}
    train = ["nnUNetv2_train", *space.train_arguments(name)]
    log = tmp_path / "output.txt"
    server.run_and_kill(train, environment, log, "Epoch 1")
    assert not (space.fold(name) / "checkpoint_final.pth").exists()
    assert server.run([*train, "--c"], environment, log) == 0, log.read_text()[-3000:]
    assert "Epoch 0" not in log.read_text()
    assert space.checkpoint(name)["trainer_name"] == name

    images = workspace.folder / "nnUNet_raw" / workspace.dataset / "imagesTs"
    predict = ["nnUNetv2_predict", "-i", str(images), "-o", str(tmp_path / "out"), "-d", "901"]
    model = ["-c", "3d_fullres", "-f", "0", "-tr", name, "-p", PLANS, "-device", "cpu"]
    options = ["-npp", "0", "-nps", "0", "--disable_tta"]
    assert server.run([*predict, *model, *options], environment, log) == 0, log.read_text()[-3000:]
    assert list((tmp_path / "out").glob("*.nii.gz"))
