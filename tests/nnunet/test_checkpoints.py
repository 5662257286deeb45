"""Writing, safe loading and refusal of checkpoints."""

from __future__ import annotations

import os
import resource
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nnunetv2.run.run_training import maybe_load_checkpoint
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.cpr import CPRSettings
from nnunet_cpr.nnunet import checkpoints
from nnunet_cpr.nnunet.checkpoints import SAVE_MINUTES
from tests.helpers.resume_cases import differences
from tests.helpers.workspace import Workspace

CPR = "nnUNetTrainerCPR_ws1_seed1"
STOCK = "nnUNetTrainer"


@pytest.fixture
def space(workspace: Workspace, tmp_path: Path) -> Workspace:
    return workspace.with_results_in(tmp_path)


@pytest.fixture(scope="module")
def written(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of a finished training."""
    space = workspace.with_results_in(tmp_path_factory.mktemp("written"))
    return space.finish(CPR) / "checkpoint_final.pth"


@pytest.fixture
def put(space: Workspace, written: Path) -> Callable[..., Path]:
    """Return a function that puts the checkpoint, optionally changed, into a fold's folder."""

    def put(name: str = "checkpoint_latest.pth", change: Callable[[dict], Any] | None = None) -> Path:
        path = space.fold(CPR) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if change is None:
            shutil.copy(written, path)
        else:
            checkpoint = torch.load(written, weights_only=False)
            change(checkpoint)
            torch.save(checkpoint, path)
        return path

    return put


def continued(space: Workspace, monkeypatch: pytest.MonkeyPatch, name: str = CPR) -> nnUNetTrainer:
    """Return the trainer as ``nnUNetv2_train ... --c`` prepares it."""
    trainer = space.build(name, monkeypatch, continues=True)
    maybe_load_checkpoint(trainer, continue_training=True, validation_only=False)
    return trainer


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nnunet-cpr:")]
    assert len(said) == 1
    return said[0]


def test_failed_write_keeps_the_previous_checkpoint(
    space: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = space.build(CPR, monkeypatch)
    path = space.fold(CPR) / "checkpoint_latest.pth"
    trainer.save_checkpoint(str(path))
    before = path.read_bytes()
    capsys.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(SystemExit) as stopped:
            trainer.save_checkpoint(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stopped.value.code == 1
    assert refusal(capsys).startswith(f"nnunet-cpr: cannot write {path}, is the disk full?")
    assert path.read_bytes() == before
    assert [f.name for f in path.parent.iterdir() if "checkpoint" in f.name] == [path.name]
    left = path.with_name(".checkpoint_latest.1@host.tmp.pth")  # of a killed training
    left.write_text("torn")
    trainer.on_train_start()
    assert not left.exists()


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Flip a bit in a tensor, which torch does not verify."""
    content = bytearray(path.read_bytes())
    weight = torch.load(path, weights_only=False)["network_weights"][
        "encoder.stages.3.0.convs.0.conv.weight"
    ]
    content[content.index(weight.numpy().tobytes()) + 100] ^= 1
    path.write_bytes(content)


def mark(path: Path) -> None:
    """Mark a tensor as a folder in the list of contents, which has no checksum."""
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"/data/0"))
    content[entry + 38] |= stat.FILE_ATTRIBUTE_DIRECTORY
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("torn", "damage"),
    [("checkpoint_final.pth", halve), ("checkpoint_latest.pth", flip), ("checkpoint_final.pth", mark)],
)
def test_continuing_falls_back_from_a_damaged_checkpoint(
    space: Workspace, put, monkeypatch, capsys, torn: str, damage: Callable[[Path], None]
) -> None:
    damage(put(torn, lambda checkpoint: checkpoint.update(current_epoch=9)))
    put("checkpoint_best.pth", lambda checkpoint: checkpoint.update(current_epoch=7))
    trainer = continued(space, monkeypatch)
    assert trainer.current_epoch == 7
    said = refusal(capsys)
    assert f"{space.fold(CPR) / torn} is damaged or cannot be read: " in said
    assert said.endswith("; it is skipped")
    assert said.removeprefix("nnunet-cpr: ") in space.logs(CPR)[-1].read_text()
    halve(space.fold(CPR) / "checkpoint_best.pth")
    with pytest.raises(SystemExit):
        continued(space, monkeypatch)
    assert "has no checkpoint that can be read; train without --c" in capsys.readouterr().err


def test_renewed_state_is_what_a_checkpoint_has(
    space: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = space.build(CPR, monkeypatch)
    trainer.current_epoch = 3
    for p in trainer.network.parameters():
        p.grad = torch.ones_like(p)
    trainer.optimizer.step()
    for _ in range(2):  # the second time into the same memory
        trainer._save_start_of_epoch()
    expected = tmp_path / "expected.pth"
    trainer.current_epoch = 2  # nnU-Net stores the next one
    trainer.save_checkpoint(str(expected))
    trainer.current_epoch = 3
    trainer.optimizer.step()  # not in the state that was kept
    assert trainer.epoch_start.epoch == trainer.current_epoch == 3
    assert trainer.epoch_start.write_file() == (
        "wrote fold_0/checkpoint_latest.pth (start of epoch 3); continue with --c"
    )
    path = space.fold(CPR) / "checkpoint_latest.pth"
    assert not differences(checkpoints.read(path), checkpoints.read(expected))
    assert path.stat().st_size == pytest.approx(expected.stat().st_size, rel=0.01)


def test_checkpoint_is_written_after_the_save_interval(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = space.fold(CPR) / "checkpoint_latest.pth"
    space.build(CPR, monkeypatch).on_epoch_start()
    assert not path.exists()
    monkeypatch.setenv(SAVE_MINUTES, "0")
    trainer = space.build(CPR, monkeypatch)
    trainer.current_epoch = 2
    trainer.on_epoch_start()
    assert torch.load(path, weights_only=False)["current_epoch"] == 2
    monkeypatch.setenv(SAVE_MINUTES, "often")
    with pytest.raises(SystemExit):
        space.build(CPR, monkeypatch)


def save_epochs(path: Path, epochs: int, start: float = 1e9) -> None:
    """Write the number of epochs and their times, as nnU-Net does."""
    logging = {"epoch_start_timestamps": [start + i for i in range(epochs)]}
    others = dict.fromkeys(checkpoints.ENTRIES)
    torch.save({**others, "current_epoch": epochs, "logging": logging}, path)


@pytest.mark.parametrize(
    ("finished", "expected"),
    [
        ({"latest": 4, "best": 9}, "best"),
        ({"final": 9, "latest": 9, "best": 9}, "final"),
    ],
)
def test_continuing_takes_the_newest_checkpoint(
    tmp_path: Path, finished: dict[str, int], expected: str
) -> None:
    for name, epochs in finished.items():
        save_epochs(tmp_path / f"checkpoint_{name}.pth", epochs)
    chosen = next(n for n in ("final", "latest", "best") if n in finished)  # by nnU-Net
    newest, _ = checkpoints.read_newest(tmp_path / f"checkpoint_{chosen}.pth", print)
    assert newest.name == f"checkpoint_{expected}.pth"
    # A training that is started anew leaves the final checkpoint of the one before until its end.
    save_epochs(tmp_path / "checkpoint_latest.pth", 0, start=1.1e9)
    newest, _ = checkpoints.read_newest(tmp_path / "checkpoint_final.pth", print)
    assert newest.name == "checkpoint_latest.pth"


def write(space: Workspace, name: str, monkeypatch: pytest.MonkeyPatch, **differing: int) -> Path:
    """Write the checkpoint of a training that has just started."""
    trainer = space.build(name, monkeypatch, **differing)
    path = space.folder / "written.pth"
    trainer.current_epoch = 4
    trainer._best_ema = np.float32(0.5)
    for key, value in trainer.logger.local_logger.my_fantastic_logging.items():
        value += [np.float64(0.25)] * 5 if key != "dice_per_class_or_region" else [[0.25]] * 5
    trainer.save_checkpoint(str(path))
    return path


def test_equivalent_checkpoints_are_loaded(space: Workspace, monkeypatch, capsys) -> None:
    path = write(space, STOCK, monkeypatch)
    trainer = space.build("nnUNetTrainerSGD", monkeypatch)
    capsys.readouterr()
    trainer.load_checkpoint(str(path))
    assert refusal(capsys) == f"nnunet-cpr: continuing {path}, which was written by {STOCK}"
    checkpoint = torch.load(path, weights_only=False)
    assert trainer.current_epoch == 5 and trainer._best_ema == 0.5
    assert not differences(dict(trainer.network.state_dict()), dict(checkpoint["network_weights"]))


REFUSED = [
    (STOCK, CPR, {}, f"was written by nnUNetTrainer, expected {CPR}: without CPR"),
    (CPR, "nnUNetTrainerSGD", {}, f"was written by {CPR}, expected nnUNetTrainerSGD: with CPR; "),
    (STOCK, "nnUNetTrainerSGD_wd1en3", {}, "weight_decay: expected 0.001, got 3e-05"),
    ("nnUNetTrainerAdamW", "nnUNetTrainerSGD", {}, "momentum: expected 0.99, got None"),
    (CPR, "nnUNetTrainerCPR_ws2", {}, "kappa: expected 'KappaWS(steps=2)', got 'KappaWS(steps=1)'"),
    (CPR, CPR, {"fold": 1}, f"was written by {CPR}, expected {CPR}: fold: expected 0, got 1"),
    (CPR, CPR, {"features": 8}, "does not match this training: Error(s) in loading state_dict for "
        "PlainConvUNet: size mismatch for encoder.stages.0.0.convs.0.conv.weight: "),
]  # fmt: skip


@pytest.mark.parametrize(("writer", "reader", "differing", "reason"), REFUSED)
def test_other_checkpoints_are_refused(
    space: Workspace, monkeypatch, capsys, writer: str, reader: str, differing: dict, reason: str
) -> None:
    path = write(space, writer, monkeypatch, **differing)
    trainer = space.build(reader, monkeypatch)
    before = {key: value.clone() for key, value in trainer.network.state_dict().items()}
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        trainer.load_checkpoint(str(path))
    assert stopped.value.code == 1
    said = refusal(capsys)
    assert said.startswith(f"nnunet-cpr: {path} ") and reason in said
    assert said.endswith("to start a new training from its weights, pass it to -pretrained_weights")
    if reason.split(":")[0] not in CPRSettings.KEYS and "features" not in differing:
        assert not differences(dict(trainer.network.state_dict()), before)


def test_other_options_of_muon_are_refused(space: Workspace, monkeypatch, capsys) -> None:
    name = "nnUNetTrainerMuonCPR_ws1"
    path = write(space, name, monkeypatch)
    trainer = space.build(name, monkeypatch)
    monkeypatch.setattr(type(trainer), "muon_options", {"adamw_for": ("head",)})
    trainer.optimizer, _ = trainer.configure_optimizers()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        trainer.load_checkpoint(str(path))
    assert "adamw_for: expected ('head',), got ('first', 'head', 'depthwise')" in refusal(capsys)


def test_pretrained_weights_load_weights_only(space: Workspace, monkeypatch) -> None:
    path = write(space, STOCK, monkeypatch)
    weights = torch.load(path, weights_only=False)["network_weights"]
    trainer = space.build(CPR, monkeypatch)
    maybe_load_checkpoint(trainer, False, False, str(path))
    own = trainer.network.state_dict()
    taken = [key for key in own if ".seg_layers." not in key]
    assert all(torch.equal(own[key], weights[key]) for key in taken)
    assert trainer.current_epoch == 0 and trainer.cpr.step_count == 0
    assert trainer.cpr.kappa.isinf().all()


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.target}",)


def test_trainings_do_not_execute_code(
    space: Workspace, put, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    created = tmp_path / "created"
    path = put("checkpoint_final.pth", lambda checkpoint: checkpoint.update(more=Payload(created)))
    trainer = space.build(CPR, monkeypatch)
    with pytest.raises(SystemExit):
        maybe_load_checkpoint(trainer, continue_training=False, validation_only=True)
    assert f"{path} contains objects that checkpoints of nnU-Net do not" in capsys.readouterr().err
    assert not created.exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    torch.load(path, weights_only=False)
    assert created.exists(), "the payload does nothing"
