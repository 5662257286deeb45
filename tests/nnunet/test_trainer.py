"""Trainings with nnU-Net's own commands, most of them within this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.nnunet.base_trainer import parts_of
from nnunet_cpr.nnunet.commands import CPU_THREADS
from nnunet_cpr.nnunet.history import History
from nnunet_cpr.nnunet.parts.progress import LOGGED
from tests.helpers.resume_cases import differences
from tests.helpers.workspace import Workspace

CPR = "nnUNetTrainerCPR_ws6_4epochs_4iters_seed1"


@pytest.fixture(scope="module")
def trained(workspace: Workspace) -> Workspace:
    workspace.train_here(CPR)
    return workspace


def test_checkpoint_contains_bounds_and_multipliers(trained: Workspace) -> None:
    checkpoint = trained.checkpoint(CPR)
    assert checkpoint["trainer_name"] == CPR
    cpr = checkpoint["optimizer_state"]["cpr"]
    assert cpr["config"] == {
        "kappa": "KappaWS(steps=6)",
        "regularizer": "l2",
        "mu": 1.0,
        "adaptive": False,
    }
    assert int(cpr["state"]["step"]) == 16
    last = trained.history(CPR).query("epoch == 3")
    assert cpr["names"] == last["parameter"].tolist()
    np.testing.assert_array_equal(cpr["state"]["kappa"], last["kappa"].astype(np.float32))
    for key in LOGGED:
        assert len(checkpoint["logging"][f"cpr_{key}"]) == 4


@pytest.mark.slow
def test_continued_training_equals_an_uninterrupted_one(trained: Workspace, tmp_path: Path) -> None:
    """An exception stops it; test_kills.py kills the process."""
    other = trained.with_results_in(tmp_path)
    other.begin_here(CPR, epoch=2)
    assert other.history(CPR)["epoch"].max() == 1
    other.train_here(CPR, "--c")

    ours, theirs = other.checkpoint(CPR), trained.checkpoint(CPR)
    assert not differences(ours["network_weights"], theirs["network_weights"])
    for key in ("state", "cpr"):
        assert not differences(ours["optimizer_state"][key], theirs["optimizer_state"][key])
    assert other.history(CPR).equals(trained.history(CPR))
    assert len(ours["logging"]["cpr_active"]) == 4


def test_checkpoint_of_another_configuration_is_refused(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The networks of two configurations may have equal shapes."""
    trainer = workspace.build("nnUNetTrainerCPR_ws1", monkeypatch)
    path = tmp_path / "checkpoint_final.pth"
    trainer.save_checkpoint(str(path))
    saved = torch.load(path, weights_only=False)
    saved["init_args"]["configuration"] = "3d_lowres"
    torch.save(saved, path)
    with pytest.raises(SystemExit):
        trainer.load_checkpoint(str(path))
    assert "configuration: expected 3d_fullres, got 3d_lowres; " in capsys.readouterr().err


@pytest.mark.slow
def test_prediction_finds_the_trainer(trained: Workspace) -> None:
    trained.predict_here(CPR)


@pytest.mark.slow  # 10 seconds each
@pytest.mark.parametrize(
    "name",
    [
        "nnUNetTrainerAdamCPR_warmup3_ip2_std_ada_mu0p01_2epochs_3iters",
        "nnUNetTrainerTimmCPR_lion_lr1en2_warmup3_ws4_2epochs_3iters",
    ],
)
def test_adam_trainers_train(workspace: Workspace, name: str) -> None:
    workspace.train_here(name, "--disable_checkpointing")
    lrs = [
        line
        for line in workspace.logs(name)[0].read_text().splitlines()
        if "Current learning rate" in line
    ]
    assert [float(line.split()[-1]) for line in lrs] == [
        pytest.approx(rate, abs=1e-5) for rate in (0.01 / 3, 0.01)
    ]
    assert (workspace.fold(name) / "cpr_history.csv").exists() == ("CPR" in name)


def test_metrics_reach_nnunets_loggers(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loggers after the local one are those of W&B."""
    logged = {}

    class Recorder:
        def log(self, key: str, value: float, step: int) -> None:
            logged[key] = (value, step)

        def update_config(self, config: dict) -> None: ...

    trainer = workspace.build("nnUNetTrainerCPR_ws1", monkeypatch)
    trainer.logger.loggers.append(Recorder())
    trainer.on_train_start()
    parts_of(trainer).progress.end_epoch()
    assert {key for key in logged if key.startswith("cpr_")} == {f"cpr_{key}" for key in LOGGED}
    assert logged["cpr_active"] == (0.0, 0)


def test_figures_take_a_small_share_of_the_time_and_never_end_a_training(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    name = "nnUNetTrainerCPR_ws1_seed9"
    trainer = workspace.build(name, monkeypatch)
    trainer.on_train_start()
    drawn: list[float] = []

    def draw(history: History) -> None:
        drawn.append(now[0])
        now[0] += 4  # seconds
        raise IndexError("no colour")

    monkeypatch.setattr("nnunet_cpr.nnunet.parts.progress.draw_progress", draw)
    for _ in range(30):
        now[0] += 60
        parts_of(trainer).progress.draw()
    assert drawn == [420, 1264]  # after 200 times the assumed 2 s, then the measured 4 s
    assert "cannot draw cpr_progress.png: IndexError: no colour" in workspace.logs(name)[-1].read_text()


@pytest.mark.parametrize("value", ["3", "two"])
def test_number_of_threads_on_the_cpu_can_be_set(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    value: str,
) -> None:
    """``nnUNetv2_train -device cpu`` takes as many as there are cores."""

    def stop(trainer: nnUNetTrainer, batch: dict) -> dict:
        raise SystemExit(torch.get_num_threads())

    monkeypatch.setattr(nnUNetTrainer, "train_step", stop)
    monkeypatch.setenv(CPU_THREADS, value)
    with pytest.raises(SystemExit) as stopped:
        workspace.train_here("nnUNetTrainerCPR_ki0x0p9_1epochs_2iters_seed1")
    if value == "3":
        assert stopped.value.code == 3
    else:
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said == f"nnunet-cpr: {CPU_THREADS}: expected a positive whole number, got 'two'"


def test_seed_that_does_not_reproduce_is_reported(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: None)
    trainer = workspace.build("nnUNetTrainerSGD_seed5", monkeypatch)
    trainer.on_train_start()
    assert "reproducible" not in capsys.readouterr().err
    trainer.device = torch.device("cuda")
    trainer.on_train_start()
    said = capsys.readouterr().err
    assert (
        "_seed5 does not make this training reproducible: on a GPU" in said and "n_proc_DA" not in said
    )
    trainer.device = torch.device("cpu")
    monkeypatch.setattr("nnunet_cpr.nnunet.parts.seeds.get_allowed_n_proc_DA", lambda: 2)
    trainer.on_train_start()
    assert "set nnUNet_n_proc_DA=0" in capsys.readouterr().err
