"""Writing, safe loading and refusal of checkpoints."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from nnunetv2.run.run_training import maybe_load_checkpoint
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.cpr.algorithm import CPRSettings
from nnunet_cpr.nnunet import checkpoints, processes
from nnunet_cpr.nnunet.base_trainer import parts_of
from nnunet_cpr.nnunet.checkpoint_policy import SAVE_MINUTES, STARTED, CheckpointPolicy
from nnunet_cpr.refusals import Refusal
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
    said = f"nnunet-cpr: cannot write a checkpoint in {path.parent}, is the disk full?"
    assert refusal(capsys).startswith(said)
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
    lines = capsys.readouterr().err.splitlines()
    said, continuing = [line for line in lines if line.startswith("nnunet-cpr:")]
    assert f"{space.fold(CPR) / torn} is damaged: " in said
    assert said.endswith("; it is skipped")
    assert continuing == f"nnunet-cpr: continuing checkpoint_best.pth (7 epochs) in place of {torn}"
    assert said.removeprefix("nnunet-cpr: ") in space.logs(CPR)[-1].read_text()
    halve(space.fold(CPR) / "checkpoint_best.pth")
    with pytest.raises(SystemExit):
        continued(space, monkeypatch)
    assert "has no checkpoint that can be read; train without --c" in capsys.readouterr().err


def test_copied_state_is_what_a_checkpoint_has(
    space: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = space.build(CPR, monkeypatch)
    parts_of(trainer).saves.policy.begin(space.fold(CPR))
    trainer.current_epoch = 3
    for p in trainer.network.parameters():
        p.grad = torch.ones_like(p)
    trainer.optimizer.step()
    for _ in range(2):  # the second time into the same memory
        parts_of(trainer).saves.keep_start_of_epoch()
    expected = tmp_path / "expected.pth"
    trainer.current_epoch = 2  # nnU-Net stores the next one
    trainer.save_checkpoint(str(expected))
    trainer.current_epoch = 3
    trainer.optimizer.step()  # not in the state that was kept
    assert parts_of(trainer).saves.policy.copied_epochs == trainer.current_epoch == 3
    assert parts_of(trainer).saves.policy.end() == (
        "wrote fold_0/checkpoint_latest.pth (start of epoch 3); continue with --c"
    )
    path = space.fold(CPR) / "checkpoint_latest.pth"
    assert not differences(checkpoints.read(path), checkpoints.read(expected))
    assert path.stat().st_size == pytest.approx(expected.stat().st_size, rel=0.01)


@pytest.mark.parametrize(("minutes", "is_written"), [("0", True), ("10", False), (None, False)])
def test_start_of_an_epoch_is_written_after_the_save_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: str | None, is_written: bool
) -> None:
    if minutes is not None:
        monkeypatch.setenv(SAVE_MINUTES, minutes)
    policy = CheckpointPolicy(print)
    policy.begin(tmp_path)
    policy.start_epoch(lambda file: torch.save({"current_epoch": 2}, file), 2, {})
    assert (tmp_path / "checkpoint_latest.pth").exists() == is_written


def test_wrong_save_interval_is_refused(space: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAVE_MINUTES, "often")
    with pytest.raises(SystemExit):
        space.build(CPR, monkeypatch)


STALE = OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (torch, "load", STALE),
        (torch, "load", MemoryError("no memory")),
        (zipfile, "_EndRecData", STALE),  # taken for damage by zipfile
        (Path, "stat", STALE),
    ],
)
def test_error_of_the_machine_ends_the_command(
    space: Workspace, put, monkeypatch, capsys, module: Any, name: str, error: Exception
) -> None:
    """An older checkpoint would repeat epochs that are not lost."""
    latest = put("checkpoint_latest.pth", lambda checkpoint: checkpoint.update(current_epoch=9))
    put("checkpoint_best.pth", lambda checkpoint: checkpoint.update(current_epoch=7))
    function = getattr(module, name)

    def fail(file: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(file, "name", file) in (latest, latest.name, str(latest)):
            raise error
        return function(file, *arguments, **options)

    monkeypatch.setattr(module, name, fail)
    with pytest.raises(SystemExit):
        continued(space, monkeypatch)
    said = refusal(capsys)
    assert said.startswith(f"nnunet-cpr: {latest} cannot be read: ") and said.endswith("; try again")


def test_trainer_whose_checkpoints_cannot_be_continued_is_told_at_once(
    space: Workspace, monkeypatch, capsys
) -> None:
    trainer = space.build(CPR, monkeypatch)
    trainer.my_init_kwargs["folder"] = Path("weights")
    parts_of(trainer).saves.policy.begin(space.fold(CPR))
    capsys.readouterr()
    monkeypatch.setattr(parts_of(trainer).saves.policy, "_interval", 0)
    for _ in range(2):
        parts_of(trainer).saves.keep_start_of_epoch()
    said = refusal(capsys)
    assert "cannot be continued with --c" in said and "pathlib" in said
    assert parts_of(trainer).saves.policy.copied_epochs is None
    trainer.save_checkpoint(str(space.fold(CPR) / "checkpoint_best.pth"))  # nnU-Net's saves go on
    assert "checkpoint_best.pth has the end of epoch" in parts_of(trainer).saves.policy.end()


def test_too_little_memory_for_the_copy_does_not_end_the_training(
    space: Workspace, monkeypatch, capsys
) -> None:
    def fail(*arguments: Any) -> None:
        raise MemoryError

    trainer = space.build(CPR, monkeypatch)
    capsys.readouterr()
    monkeypatch.setattr(nnUNetTrainer, "save_checkpoint", fail)
    parts_of(trainer).saves.keep_start_of_epoch()
    assert "too little memory for a copy of the state" in refusal(capsys)
    assert (
        parts_of(trainer).saves.policy.end() == "ended without writing a checkpoint; continue with --c"
    )


def test_second_process_in_a_fold_is_refused(space: Workspace, monkeypatch, capsys) -> None:
    folder = space.fold(CPR)
    folder.mkdir(parents=True)
    (folder / processes.CLAIM).write_text(processes.describe_process(os.getppid()))
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(SystemExit):
        space.build(CPR, monkeypatch)
    assert f"process {os.getppid()} trains in {folder}; wait for it" in refusal(capsys)
    assert {path.name for path in folder.iterdir()} == before, "nnU-Net's loggers write and remove files"
    (folder / processes.CLAIM).unlink()
    trainer = space.build(CPR, monkeypatch)  # another process begins before this one has loaded its data
    (folder / processes.CLAIM).write_text(processes.describe_process(os.getppid()))
    temporary = folder / ".checkpoint_latest.1@host.tmp.pth"
    temporary.touch()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        trainer.run_training()
    assert f"process {os.getppid()} trains in {folder}; wait for it" in refusal(capsys)
    assert temporary.exists()
    for ended in (f"{processes.describe_process(os.getpid())}1", "torn"):
        (folder / processes.CLAIM).write_text(ended)
        with processes.claimed(folder):
            pass
    assert not (folder / processes.CLAIM).exists()


def test_claim_holds_when_the_clock_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux computes the time at which a process began from the present time."""
    (tmp_path / processes.CLAIM).write_text(processes.describe_process(os.getppid()))
    began = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: began(process) + 2)
    assert processes.running_process(tmp_path) is not None
    with pytest.raises(Refusal):
        processes.refuse_if_claimed(tmp_path)


def test_training_without_checkpoints_keeps_that_of_an_interrupted_one(
    space: Workspace, put, monkeypatch, capsys
) -> None:
    """nnU-Net removes it at the end of every training."""
    latest = put("checkpoint_latest.pth")
    trainer = space.build(CPR, monkeypatch)
    trainer.disable_checkpointing = True
    capsys.readouterr()
    with pytest.raises(SystemExit):
        trainer.run_training()
    assert f"--disable_checkpointing: would remove {latest}" in refusal(capsys)
    latest.unlink()
    monkeypatch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: None)
    trainer.on_train_start()
    ended = "ended without a checkpoint, as --disable_checkpointing asks"
    assert parts_of(trainer).saves.policy.end() == ended


def test_arguments_of_nnunets_main_branch_are_accepted(space: Workspace, put, monkeypatch) -> None:
    path = put("checkpoint_latest.pth")
    for given in (str(path), {"read by": "nnU-Net"}):
        trainer = space.build(CPR, monkeypatch, continues=True)
        trainer.load_checkpoint(checkpoint=given)
        assert trainer.current_epoch == torch.load(path, weights_only=False)["current_epoch"]


def save_epochs(path: Path, epochs: int, start: float | None = 1e9, own: float | None = None) -> None:
    """Write the number of epochs and the start of the training, as nnU-Net and as we do."""
    times = [start + i for i in range(epochs)] if start is not None else []
    entries = {"current_epoch": epochs, "logging": {"epoch_start_timestamps": times}}
    arguments = {} if own is None else {STARTED: own}
    torch.save({**dict.fromkeys(checkpoints.ENTRIES), **entries, "init_args": arguments}, path)


def save_all(folder: Path, files: dict[str, tuple[Any, ...]]) -> None:
    for name, entries in files.items():
        save_epochs(folder / f"checkpoint_{name}.pth", *entries)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"latest": (4,), "best": (9,)}, "best"),
        ({"final": (9,), "latest": (9,), "best": (9,)}, "final"),
        ({"final": (2,), "best": (2,), "latest": (7,)}, "latest"),
        # A training that is started anew leaves the files of the one before until it saves.
        ({"final": (9, 1e9, 1e9), "latest": (0, None, 1.1e9)}, "latest"),
        ({"final": (9,), "latest": (3, 1.1e9)}, "latest"),
        # Stopped by a signal in its first epoch, continued, and killed after it has saved the best.
        ({"latest": (0, None, 1e9), "best": (20, 1e9, 1e9)}, "best"),
        ({"latest": (0, None), "best": (20,)}, "best"),  # of 0.2.0
    ],
)
def test_continuing_takes_the_newest_checkpoint(
    tmp_path: Path, files: dict[str, tuple[Any, ...]], expected: str
) -> None:
    save_all(tmp_path, files)
    chosen = next(n for n in ("final", "latest", "best") if n in files)  # by nnU-Net
    said: list[str] = []
    newest, _ = CheckpointPolicy(said.append).continue_from(tmp_path / f"checkpoint_{chosen}.pth")
    assert newest.name == f"checkpoint_{expected}.pth"
    epochs = files[expected][0]
    instead = "" if chosen == expected else f" in place of checkpoint_{chosen}.pth"
    assert said == [f"continuing checkpoint_{expected}.pth ({epochs} epochs){instead}"]


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
    (CPR, "nnUNetTrainerCPR_ws2_seed1", {}, "training kappa: expected ws2, got ws1"),
    (CPR, "nnUNetTrainerCPR_ws1_ema_seed1", {}, "without averaged weights"),
    (CPR, "nnUNetTrainerCPR_ws1_freezeencoder_seed1", {}, "training freeze: expected encoder, got None"),
    (CPR, "nnUNetTrainerCPR_ws1_constant_seed1", {}, "training schedule: expected constant, got poly"),
    (CPR, "nnUNetTrainerCPR_ws1_seed1_on_nnUNetTrainerDA5", {}, "on: expected nnUNetTrainerDA5"),
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


def test_parameters_with_several_names_count_once(space: Workspace, monkeypatch) -> None:
    """nnU-Net's decoder holds the encoder, and its state dict both."""
    path = write(space, STOCK, monkeypatch)
    network = space.build(STOCK, monkeypatch).network
    distinct = sum(p.numel() for p in network.parameters())
    assert sum(value.numel() for value in network.state_dict().values()) > distinct
    assert checkpoints.count_parameters(path) == distinct


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
