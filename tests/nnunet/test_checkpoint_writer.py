"""Copies of a training's state, and the times at which they are written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nnunet_cpr.nnunet import checkpoint_writer
from nnunet_cpr.nnunet.checkpoint_writer import SAVE_MINUTES, CheckpointWriter, save_interval
from nnunet_cpr.nnunet.host_copy import HostCopy
from tests.helpers.resume_cases import differences
from tests.helpers.workspace import Workspace

CPR = "nnUNetTrainerCPR_ws1_seed1"


class Clock:
    """Replacement of the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(checkpoint_writer, "time", clock)
    return clock


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def writer(tmp_path: Path, said: list[str]) -> CheckpointWriter:
    return CheckpointWriter(tmp_path / "checkpoint_latest.pth", 600.0, said.append)


def start(writer: CheckpointWriter, epoch: int) -> None:
    writer.start_epoch(lambda path: torch.save({"current_epoch": epoch}, path), epoch)


def written(writer: CheckpointWriter) -> int | None:
    """Return the epoch in the file, None without one."""
    writer.wait()
    return torch.load(writer.path)["current_epoch"] if writer.path.exists() else None


@pytest.mark.parametrize(
    ("interval", "minutes", "expected"),
    [
        (600.0, 3, [None, None, None, 3, 3, 3, 6]),  # saving later could lose 12 minutes
        (600.0, 9, [None, 1, 2, 3]),
        (600.0, 32, [None, 1, 2, 3]),
        (0.0, 3, [None, 1, 2, 3]),
    ],
)
def test_loss_is_limited_to_the_interval_or_an_epoch(
    tmp_path: Path, clock: Clock, interval: float, minutes: int, expected: list[int | None]
) -> None:
    writer = CheckpointWriter(tmp_path / "checkpoint_latest.pth", interval, print)
    for epoch, file in enumerate(expected):
        clock.now = 60.0 * minutes * epoch
        start(writer, epoch)
        assert written(writer) == file
    writer.close()


def test_checkpoints_of_nnunet_count_as_saves(writer: CheckpointWriter, clock: Clock) -> None:
    for epoch in range(4):
        clock.now = 180.0 * epoch
        if epoch == 2:
            with writer.saving(writer.path.with_name("checkpoint_best.pth"), epoch):
                pass
        start(writer, epoch)
    assert written(writer) is None


def test_writes_never_overlap(
    writer: CheckpointWriter, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()

    def write(content: Any, path: Path) -> None:
        order.append("background begins")
        begun.set()
        goes_on.wait(60)
        order.append("background ends")

    monkeypatch.setattr(checkpoint_writer, "atomic_torch_save", write)
    start(writer, 0)
    clock.now = 600.0
    start(writer, 1)
    assert begun.wait(60)

    def save() -> None:
        with writer.saving(writer.path, 2):
            order.append("nnU-Net")
        order.append(writer.write())

    saving = threading.Thread(target=save)
    saving.start()
    goes_on.set()
    saving.join()
    newest = "the newest checkpoint has the start of epoch 2; continue with --c"
    assert order == ["background begins", "background ends", "nnU-Net", newest]


def test_newer_checkpoint_is_not_replaced(writer: CheckpointWriter) -> None:
    start(writer, 3)
    with writer.saving(writer.path, 4):  # at the end of epoch 3
        torch.save({"current_epoch": 4}, writer.path)
    assert writer.write() == "the newest checkpoint has the start of epoch 4; continue with --c"
    assert written(writer) == 4


def test_failed_save_is_repeated_after_the_next_epoch(
    writer: CheckpointWriter, clock: Clock, said: list[str]
) -> None:
    writer.path.mkdir()
    for epoch in range(2):
        clock.now = 600.0 * epoch
        start(writer, epoch)
    writer.wait()
    assert said == [f"cannot write {writer.path}: Is a directory; trying again after the epoch"]
    assert writer.write().startswith(f"cannot write {writer.path}: Is a directory; ")
    writer.path.rmdir()
    clock.now += 1
    start(writer, 2)
    assert written(writer) == 2 and len(said) == 1


def test_no_copy_no_file(writer: CheckpointWriter) -> None:
    assert writer.write() == "ended without writing a checkpoint"
    writer.start_epoch(lambda path: None, 1)  # a trainer that saves nothing
    assert writer.write() == "ended without writing a checkpoint"


@pytest.mark.parametrize("value", ["often", "-1", "nan", "inf"])
def test_wrong_save_interval_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(SAVE_MINUTES, value)
    with pytest.raises(ValueError, match=f"^{SAVE_MINUTES}: expected a finite number, 0 or above, got"):
        save_interval()


def test_save_interval_is_in_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert save_interval() == 600
    monkeypatch.setenv(SAVE_MINUTES, "0.5")
    assert save_interval() == 30


def test_written_copy_equals_a_checkpoint(
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = workspace.with_results_in(tmp_path).build(CPR, monkeypatch)
    monkeypatch.setenv(SAVE_MINUTES, "often")
    with pytest.raises(SystemExit):
        trainer.run_training()
    assert capsys.readouterr().err.count(f"nnunet-cpr: {SAVE_MINUTES}: expected") == 1
    monkeypatch.delenv(SAVE_MINUTES)

    def step() -> None:
        for p in trainer.network.parameters():
            p.grad = torch.full_like(p, 1e-3)
        trainer.optimizer.step()

    step()
    expected, writer = tmp_path / "expected.pth", trainer.checkpoint_writer
    trainer.save_checkpoint(str(expected))
    writer.start_epoch(trainer.save_checkpoint, 1)
    assert not writer.path.exists()
    step()  # not in the copy
    trainer.logger.local_logger.my_fantastic_logging["lrs"].append(0.5)
    assert writer.write().startswith("wrote fold_0/checkpoint_latest.pth (start of epoch 1, ")
    ours, theirs = (torch.load(file, weights_only=False) for file in (writer.path, expected))
    assert not differences(ours, theirs)
    assert writer.path.stat().st_size == pytest.approx(expected.stat().st_size, rel=0.01)


def test_copy_reuses_its_memory_and_keeps_shared_memory() -> None:
    model = torch.nn.Linear(3, 2)
    state = {"weights": model.state_dict(), "again": model.weight.detach().t(), "log": [1.0]}
    copy = HostCopy()
    copy.update(state)
    first = copy.content()
    state["log"].append(2.0)
    assert not differences(first["log"], [1.0])
    assert first["weights"]._metadata == state["weights"]._metadata
    assert first["again"].data_ptr() == first["weights"]["weight"].data_ptr()
    assert first["again"].stride() == (1, 3)
    with torch.no_grad():
        model.weight *= 2
    assert torch.equal(2 * first["again"], model.weight.detach().t())

    copy.update(state)
    second = copy.content()
    assert not differences(second, state)
    assert second["again"].data_ptr() == first["again"].data_ptr()


def test_copy_of_other_tensors_is_independent() -> None:
    sparse = torch.eye(3).to_sparse()
    copy = HostCopy()
    copy.update([sparse, torch.empty(0), torch.tensor(5)])
    sparse._values().zero_()
    assert torch.equal(copy.content()[0].to_dense(), torch.eye(3))
    assert copy.content()[1].shape == (0,) and copy.content()[2] == 5
