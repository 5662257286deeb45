"""Trainings with nnU-Net's own commands, most of them within this process."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from nnunetv2.inference.predict_from_raw_data import predict_entry_point
from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.bounds import KappaWS
from nnunet_cpr.nnunet.cpr_trainer import LOGGED
from nnunet_cpr.nnunet.poly_lr import warmup_poly
from nnunet_cpr.nnunet.trainer import trainer_class
from nnunet_cpr.optimizers import FusedAdam, FusedSGD
from tests.helpers.matrices import set_gradients
from tests.helpers.workspace import PLANS, Workspace

CPR = "nnUNetTrainerCPR_ws6_4epochs_4iters_seed1"


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def trained(workspace: Workspace) -> Workspace:
    workspace.train_here(CPR)
    return workspace


def test_training_writes_all_files(trained: Workspace) -> None:
    fold = trained.fold(CPR)
    names = {f.name for f in fold.iterdir()}
    assert names >= {"checkpoint_final.pth", "progress.png", "cpr_progress.png", "cpr_history.csv"}
    summary = json.loads((fold / "validation" / "summary.json").read_text())
    assert 0 <= summary["foreground_mean"]["Dice"] <= 1

    history = trained.history(CPR)
    assert history["epoch"].unique().tolist() == [0, 1, 2, 3]
    assert history["step"].unique().tolist() == [4, 8, 12, 16]
    last = history[history["epoch"] == 3]
    assert np.isfinite(last["kappa"]).all() and (last["multiplier"] > 0).any()
    assert np.isinf(history[history["epoch"] == 0]["kappa"]).all()
    assert all(name.endswith(".weight") for name in last["parameter"])

    log = trained.logs(CPR)[-1].read_text()
    assert "parameter matrices with CPR(" in log and "CPR: step 16, measure/bound" in log
    assert "CPR: OK: bounds active and held: " in log


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


def test_continued_training_equals_an_uninterrupted_one(
    trained: Workspace, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception stops it; test_kills.py kills the process."""
    other = trained.with_results_in(tmp_path_factory.mktemp("stopped"))
    begin = nnUNetTrainer.on_epoch_start

    def stop(trainer: nnUNetTrainer) -> None:
        if trainer.current_epoch == 2:
            raise Stopped
        begin(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(nnUNetTrainer, "on_epoch_start", stop)
        with pytest.raises(Stopped):
            other.train_here(CPR)
    assert not (other.fold(CPR) / "checkpoint_final.pth").exists()
    assert other.history(CPR)["epoch"].max() == 1
    other.train_here(CPR, "--c")

    ours, theirs = other.checkpoint(CPR), trained.checkpoint(CPR)
    a, b = ours["optimizer_state"]["cpr"], theirs["optimizer_state"]["cpr"]
    assert a["names"] == b["names"] and a["config"] == b["config"]
    for key, value in a["state"].items():
        assert torch.equal(value, b["state"][key]), key
    for key, value in ours["network_weights"].items():
        assert torch.equal(value, theirs["network_weights"][key]), key
    assert other.history(CPR).equals(trained.history(CPR))
    assert len(ours["logging"]["cpr_active"]) == 4


def test_validation_keeps_the_history(trained: Workspace) -> None:
    before = (trained.fold(CPR) / "cpr_history.csv").read_bytes()
    trained.train_here(CPR, "--val", "--val_best")
    assert (trained.fold(CPR) / "cpr_history.csv").read_bytes() == before


def test_prediction_finds_the_trainer(trained: Workspace) -> None:
    output = trained.folder / "predictions"
    model = ["-d", "901", "-c", "3d_fullres", "-f", "0", "-tr", CPR, "-p", PLANS]
    images = trained.folder / "nnUNet_raw" / trained.dataset / "imagesTs"
    trained.run_here(
        predict_entry_point, "-i", str(images), "-o", str(output), *model, "-device", "cpu",
        "-npp", "0", "-nps", "0",
    )  # fmt: skip
    assert [f.name for f in output.glob("*.nii.gz")] == ["phantom_005.nii.gz"]


@pytest.mark.parametrize(
    "name",
    [
        "nnUNetTrainerAdamCPR_warmup3_ip2_std_ada_mu0p01_2epochs_3iters",
        "nnUNetTrainerAdamW_wd1en2_warmup3_2epochs_3iters",
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
        pytest.approx(warmup_poly(i, 0.01, 3, 6), abs=1e-5) for i in (0, 3)
    ]
    assert (workspace.fold(name) / "cpr_history.csv").exists() == ("CPR" in name)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("nnUNetTrainerSGD_decoupled", {"method": "DecoupledDecay", "weight_decay": 3e-5}),
        ("nnUNetTrainerAdamW_awd_wd0p1", {"method": "AdaptiveWeightDecay", "weight_decay": 0.1}),
        (
            "nnUNetTrainerSGD_cosine0p1_wd1en3_2epochs",
            {"method": "CosineDecay", "weight_decay": 1e-3, "final": 0.1, "steps": 500},
        ),
        ("nnUNetTrainerSGD_rescale0p8", {"method": "NormRescaling", "factor": 0.8}),
        ("nnUNetTrainerSGD_cautious", {"method": "CautiousDecay", "weight_decay": 3e-5}),
        (
            "nnUNetTrainerAdamW_independent_wd1en5",
            {"method": "IndependentDecay", "max_lr": None, "weight_decay": 1e-5},
        ),
        (
            "nnUNetTrainerSGD_norm1_wd1en3",
            {"method": "WeightNormControl", "weight_decay": 1e-3, "start": 0, "factor": 1.0},
        ),
        (
            "nnUNetTrainerSGD_normws200_wd1en3",
            {"method": "WeightNormControl", "weight_decay": 1e-3, "start": 200, "factor": 1.0},
        ),
        ("nnUNetTrainerSGD_hyperball", {"method": "Hyperball", "factor": 1.0}),
    ],
)
def test_comparison_method_replaces_weight_decay(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, name: str, config: dict
) -> None:
    trainer = workspace.build(name, monkeypatch)
    assert trainer.optimizer.state_dict()["baseline"]["config"] == config
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0}
    assert type(trainer.optimizer) is (FusedSGD if "SGD" in name else FusedAdam)


@pytest.mark.parametrize(
    ("name", "build"),
    [
        (
            "nnUNetTrainerSGD_norm1_wd1en3",
            lambda params: torch.optim.SGD(params, 0.01, momentum=0.99, nesterov=True),
        ),
        (
            "nnUNetTrainerAdamW_corrected",
            lambda params: torch.optim.AdamW(
                params, 1e-3, betas=(0.9, 0.99), weight_decay=0, fused=True
            ),
        ),
    ],
)
def test_state_of_torchs_optimizer_with_a_method_is_continued(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, name: str, build
) -> None:
    """Checkpoints from before the trainers took fused steps have such states."""
    trainer = workspace.build(name, monkeypatch)
    older = build(trainer.network.parameters())
    method = trainer.settings.build_baseline(trainer.network, trainer.baseline_decay, 250_000)
    method.attach(older)
    set_gradients(trainer.network.parameters(), 0)
    older.step()
    trainer.optimizer.load_state_dict(older.state_dict())
    start = {key: value.clone() for key, value in trainer.network.state_dict().items()}
    results = []
    for optimizer in (older, trainer.optimizer):
        trainer.network.load_state_dict(start)
        for t in (1, 2):
            set_gradients(trainer.network.parameters(), t)
            optimizer.step()
        results.append([p.detach().clone() for p in trainer.network.parameters()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)
    assert trainer.baseline.step_count == 3


@pytest.mark.parametrize("name", ["nnUNetTrainerSGD_corrected", "nnUNetTrainerAdamW_corrected_lr1en3"])
def test_corrected_decay_finds_blocks_and_learning_rate(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trainer = workspace.build(name, monkeypatch)
    others = set(trainer.baseline.names) - set(trainer.baseline.normalized)
    assert others and all("seg_layers" in n or "transpconvs" in n for n in others)
    state = trainer.optimizer.state_dict()["baseline"]["state"]
    highest = 1e-3 if "lr1en3" in name else 1e-2
    assert state["max_lr"].tolist() == pytest.approx([highest] * len(trainer.baseline.names))


def test_warm_start_share_follows_the_trainers_epochs(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_other = workspace.build("nnUNetTrainerCPR_ws2p_on_nnUNetTrainer_5epochs", monkeypatch)
    assert of_other.total_steps == 1250 and of_other.cpr.bound == KappaWS(25)
    named = workspace.build("nnUNetTrainerAttachCPR_ws0p5p_8epochs_on_nnUNetTrainerAdam", monkeypatch)
    assert named.cpr.bound == KappaWS(10)


@pytest.mark.slow
def test_comparison_method_trains_and_is_saved(workspace: Workspace) -> None:
    name = "nnUNetTrainerSGD_adadecay4_wd1en3_1epochs_3iters_seed1"
    workspace.train_here(name)
    assert "Regularizing with AdaDecay(" in workspace.logs(name)[0].read_text()
    saved = workspace.checkpoint(name)["optimizer_state"]["baseline"]
    assert saved["config"] == {"method": "AdaDecay", "weight_decay": 1e-3, "alpha": 4.0}
    assert int(saved["state"]["step"]) == 3


@pytest.mark.slow
def test_amos_trains(workspace: Workspace) -> None:
    name = "nnUNetTrainerAMOS_wd1en3_warmup1_1epochs_3iters"
    workspace.train_here(name, "--disable_checkpointing")
    summary = json.loads((workspace.fold(name) / "validation" / "summary.json").read_text())
    assert 0 <= summary["foreground_mean"]["Dice"] <= 1


def test_warm_start_after_the_end_is_reported(workspace: Workspace) -> None:
    """Runs the command in a process of its own."""
    name = "nnUNetTrainerCPR_1epochs_2iters"
    workspace.train(name, "--disable_checkpointing")
    text = workspace.logs(name)[0].read_text()
    assert "WARNING! the bounds are set at step 1000 or later, but this training has 2 steps" in text


def test_sgd_trainer_equals_nnunets(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = workspace.build("nnUNetTrainer", monkeypatch)
    ours = workspace.build("nnUNetTrainerSGD", monkeypatch)
    assert type(ours.optimizer) is type(stock.optimizer) is torch.optim.SGD
    assert ours.optimizer.defaults == stock.optimizer.defaults
    assert type(ours.lr_scheduler) is type(stock.lr_scheduler) is PolyLRScheduler
    assert vars(ours.lr_scheduler).keys() == vars(stock.lr_scheduler).keys()
    for attribute in ("num_epochs", "num_iterations_per_epoch", "initial_lr", "weight_decay"):
        assert getattr(ours, attribute) == getattr(stock, attribute)


def test_cpr_trainer_changes_the_optimizer_only(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = workspace.build("nnUNetTrainerCPR", monkeypatch)
    group = ours.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (
        0.01,
        0.99,
        True,
        0,
    )
    assert type(ours.lr_scheduler) is PolyLRScheduler and ours.num_epochs == 1000
    held = {id(p) for g in ours.optimizer.param_groups for p in g["params"]}
    assert held == {id(p) for p in ours.network.parameters()}
    kernels = {n for n, p in ours.network.named_parameters() if p.ndim == 5}
    assert set(ours.cpr.names) == kernels


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
    trainer._record_epoch()
    assert {key for key in logged if key.startswith("cpr_")} == {f"cpr_{key}" for key in LOGGED}
    assert logged["cpr_active"] == (0.0, 0)


def test_plotting_errors_do_not_stop_the_training(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "nnUNetTrainerSGD_seed9"
    trainer = workspace.build(name, monkeypatch)
    trainer.on_train_start()
    (workspace.fold(name) / "progress.png").mkdir()
    for values in trainer.logger.get_checkpoint().values():
        values.append(0.5)
    trainer.finish_training()
    assert "cannot draw progress.png: IsADirectoryError" in workspace.logs(name)[-1].read_text()


def test_figures_are_drawn_as_often_as_the_schedule_allows(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    trainer = workspace.build("nnUNetTrainerCPR_ws1_seed9", monkeypatch)
    trainer.on_train_start()
    drawn: list[int] = []

    def draw(folder: str) -> None:
        drawn.append(trainer.current_epoch)
        now[0] += 4  # seconds

    trainer._draw_nnunets = draw
    for _ in range(40):
        now[0] += 60
        trainer.current_epoch += 1
        trainer.logger.plot_progress_png(trainer.output_folder)  # as nnU-Net does after every epoch
    assert drawn == [7, 21, 35]  # after 200 times the assumed 2 s, then the measured 4 s


def test_unwritable_history_does_not_stop_the_training(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "nnUNetTrainerCPR_ws1_seed8"
    trainer = workspace.build(name, monkeypatch)
    trainer.on_train_start()
    (workspace.fold(name) / "cpr_history.csv").mkdir()
    trainer._record_epoch()
    assert "cannot write cpr_history.csv: [Errno" in workspace.logs(name)[-1].read_text()


def test_suffixes_reach_the_trainer(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "nnUNetTrainerAdamCPR_k0p1_huber_mu0p5_ada_lr1en3_warmup10_7epochs_9iters"
    ours = workspace.build(name, monkeypatch)
    assert (ours.num_epochs, ours.num_iterations_per_epoch, ours.initial_lr) == (7, 9, 1e-3)
    assert ours.optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    assert "kappa=KappaK(value=0.1), regularizer=huber, mu=0.5, adaptive=True" in repr(ours.cpr)
    assert (ours.lr_scheduler.warmup, ours.lr_scheduler.total) == (10, 63)


@pytest.mark.parametrize("family", ["SGD", "CPR", "Muon", "MuonCPR"])
def test_momentum_reaches_the_optimizer(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    trainer = workspace.build(f"nnUNetTrainer{family}_momentum0p9", monkeypatch)
    assert {group["momentum"] for group in trainer.optimizer.param_groups} == {0.9}


def test_same_name_returns_the_same_class() -> None:
    assert trainer_class(CPR) is trainer_class(CPR)
    assert trainer_class(CPR).__name__ == CPR
