"""Trainers with a ``GradScaler``, as on a GPU, and a tiny network on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.nnunet.base_trainer import parts_of
from nnunet_cpr.nnunet.history import History
from tests.golden.goldens import DATA
from tests.golden.tiny_trainer import (
    CHECKPOINTS,
    OLD_CHECKPOINTS,
    build_trainer,
    nnunet_folders,
    set_gradients,
    set_weights,
)
from tests.helpers import ROOT
from tests.helpers.resume_cases import differences
from tests.optimizers.fused.test_gradient_scaler import HostReads

SAVED = [("now", name) for name in CHECKPOINTS] + [("0.1.0", name) for name in OLD_CHECKPOINTS]
NEVER_WAIT = ("sgdcpr", "adamcpr", "sgd", "rescaling", "norm_control")
EMA = "_ema0p5_ws3_10epochs_5iters"
TRAINERS = [
    "nnUNetTrainerSGD_10epochs_5iters",
    "nnUNetTrainerSGD_cautious_wd1en2_10epochs_5iters",
    "nnUNetTrainerAdamW_warmup0_10epochs_5iters",
    "nnUNetTrainerAdamW_decoupled_wd1en2_warmup0_10epochs_5iters",
    "nnUNetTrainerTimm_adamw_warmup0_10epochs_5iters",
    "nnUNetTrainerTimmCPR_adamw_ws3_warmup0_10epochs_5iters",
    f"nnUNetTrainerCPR{EMA}",
    f"nnUNetTrainerAdamCPR_warmup0{EMA}",
]

ACCUMULATING = """
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer


class nnUNetTrainerAccumulates(nnUNetTrainer):
    iterations = 0

    def train_step(self, batch):
        self.iterations += 1
        if self.iterations % 4 == 0:
            self.optimizer.step()
        return {"loss": 0.5}
"""


@pytest.fixture
def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give each trainer a scaler before it builds its optimizer, as nnU-Net does on a GPU."""
    initialize = nnUNetTrainer.initialize

    def initialize_scaled(trainer: nnUNetTrainer) -> None:
        trainer.grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        initialize(trainer)

    monkeypatch.setattr(nnUNetTrainer, "initialize", initialize_scaled)
    monkeypatch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: None)
    with nnunet_folders(tmp_path):
        yield


def take_steps(trainer: Any, iterations: range, overflows: tuple[int, ...] = ()) -> int:
    """Take steps as nnU-Net's ``train_step`` does, and return the number of host reads."""
    scaler, reads = trainer.grad_scaler, HostReads()
    for t in iterations:
        trainer.optimizer.zero_grad(set_to_none=True)
        scaler.scale(torch.zeros(()))  # of the loss
        set_gradients(trainer, t)
        for p in trainer.network.parameters():
            p.grad *= scaler.get_scale()
        if t in overflows:
            next(trainer.network.parameters()).grad.view(-1)[0] = float("nan")
        with reads:
            scaler.unscale_(trainer.optimizer)
            torch.nn.utils.clip_grad_norm_(trainer.network.parameters(), 12)
            scaler.step(trainer.optimizer)
            scaler.update()
    return reads.count


@pytest.mark.parametrize(("version", "family"), SAVED)
def test_checkpoints_of_all_versions_continue_with_a_scaler(
    version: str, family: str, scaled: None
) -> None:
    trainer = build_trainer(CHECKPOINTS[family], continues=True)
    trainer.load_checkpoint(str(DATA / "checkpoints" / version / f"{family}.pth"))
    before = [p.detach().clone() for p in trainer.network.parameters()]
    reads = take_steps(trainer, range(20, 24), overflows=(21,))
    assert (reads == 0) == (family in NEVER_WAIT)
    assert all(p.isfinite().all() for p in trainer.network.parameters())
    assert any(not torch.equal(p, q) for p, q in zip(trainer.network.parameters(), before))


@pytest.mark.parametrize("name", TRAINERS)
def test_overflows_change_nothing_and_nothing_is_read(name: str, scaled: None) -> None:
    results = []
    for iterations in (range(8), [0, 3, 4, 6, 7]):
        trainer = build_trainer(name)
        set_weights(trainer)
        trainer.on_train_start()
        trainer.on_train_epoch_start()
        overflows = (1, 2, 5) if len(iterations) == 8 else ()
        assert take_steps(trainer, iterations, overflows) == 0
        results.append([p.detach().clone() for p in trainer.network.parameters()])
        parts = parts_of(trainer)
        if (averaged := parts.average.weights) is not None:
            assert averaged.steps == 5
            results[-1] += [p.detach().clone() for p in averaged.network.parameters()]
        if "CPR" in name:
            assert trainer.cpr.step_count == 5 and trainer.cpr.kappa.isfinite().all()
            assert isinstance(parts.progress.history, History)
    assert not differences(*results)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("CPR_ws50p", "bound"),
        ("SGD_cooldown25p", None),
        ("AdamCPR", "learning rate and bound"),
        ("CPR_ws3", None),
        ("SGD", None),
    ],
)
def test_lengths_in_steps_are_refused_where_iterations_are_no_steps(
    name: str, part: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "accumulating.py").write_text(ACCUMULATING)
    folders = os.pathsep.join([str(tmp_path), str(ROOT / "trainers")])
    monkeypatch.setenv("nnUNet_extTrainer", folders)
    monkeypatch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: None)
    monkeypatch.setattr(nnUNetTrainer, "on_epoch_end", lambda trainer: None)
    with nnunet_folders(tmp_path):
        name, _, suffix = name.partition("_")
        tokens = "_".join(filter(None, [name, suffix, "4epochs", "20iters"]))
        trainer = build_trainer(f"nnUNetTrainer{tokens}_on_nnUNetTrainerAccumulates")
        set_weights(trainer)
        trainer.on_train_start()
        trainer.on_epoch_start()
        for t in range(20):
            set_gradients(trainer, t)
            trainer.train_step(None)
        if part is None:
            trainer.on_epoch_end()
            return
        with pytest.raises(SystemExit):
            trainer.on_epoch_end()
    assert f"from the number of which its {part} is computed, got 5 in 20;" in capsys.readouterr().err
