"""What the files of a fold say about it."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from rich.console import Console

from nnunet_cpr.nnunet.commands import CommandFailed
from nnunet_cpr.nnunet.fold_files import RESOURCES, read_logs
from nnunet_cpr.studies.definition import Cell, Row, Study
from nnunet_cpr.studies.running import Local, Slurm
from nnunet_cpr.studies.state import Places, Stage, at_work, note_process, state_of
from nnunet_cpr.studies.status import states, summary, table
from nnunet_cpr.studies.training import Training, drop_broken_checkpoints

LOG = """
2026-01-01 10:00:00.0: Epoch {epoch}
2026-01-01 10:00:00.0: Current learning rate: 0.01
2026-01-01 10:00:00.0: train_loss -0.1
2026-01-01 10:00:00.0: val_loss -0.2
2026-01-01 10:00:00.0: Pseudo dice [{dice}]
2026-01-01 10:00:00.0: Epoch time: {seconds} s
"""


@pytest.fixture
def cell() -> Cell:
    return Cell("Dataset001_A", "3d_fullres", "nnUNetPlans", 0, "nnUNetTrainerCPR_10epochs")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "results", tmp_path / "results" / "studies" / "s")


@pytest.fixture
def fold(cell: Cell, places: Places) -> Path:
    folder = cell.folder(places.results)
    (folder / "validation").mkdir(parents=True)
    return folder


def finish(fold: Path, dice: float = 0.5) -> None:
    torch.save({"a": torch.zeros(10)}, fold / "checkpoint_final.pth")
    summary = {"foreground_mean": {"Dice": dice}}
    (fold / "validation" / "summary.json").write_text(json.dumps(summary))


def test_a_cell_that_nobody_has_begun(cell: Cell, places: Places) -> None:
    assert state_of(cell, places).stage is Stage.WAITING
    assert state_of(cell, places, frozenset({cell.key})).stage is Stage.QUEUED
    assert state_of(cell, places).epochs == 10


def test_progress_is_read_from_all_logs(cell: Cell, places: Places, fold: Path) -> None:
    first = LOG.format(epoch=0, dice="np.float32(0.25), np.float32(nan)", seconds=10)
    first += LOG.format(epoch=1, dice="np.float32(0.5), np.float32(0.7)", seconds=30)
    again = LOG.format(epoch=1, dice="0.5, 0.6", seconds=20)  # done again after a stop
    (fold / "training_log_2026_1_1_10_00_00.txt").write_text(first)
    assert state_of(cell, places).pseudo_dice == pytest.approx(0.6)
    (fold / "training_log_2026_1_1_11_00_00.txt").write_text(again)
    with at_work(cell, places) as ours:
        assert ours
        state = state_of(cell, places)
    assert (state.stage, state.epoch, state.epochs) == (Stage.RUNNING, 2, 10)
    assert state.pseudo_dice == pytest.approx(0.55) and state.seconds_left == 8 * 15
    assert state_of(cell, places).stage is Stage.STOPPED


def test_logs_are_read_again_only_when_they_have_grown(
    cell: Cell, places: Places, fold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def read(folder: Path) -> pd.DataFrame:
        reads.append(folder)
        return read_logs(folder)

    monkeypatch.setattr("nnunet_cpr.studies.state.read_logs", read)
    log = fold / "training_log_2026_1_1_10_00_00.txt"
    for epoch in range(3):
        with log.open("a") as file:
            file.write(LOG.format(epoch=epoch, dice="0.5, 0.6", seconds=10))
        assert [state_of(cell, places).epoch for _ in range(5)] == [epoch + 1] * 5
        assert len(reads) == epoch + 1


def test_done_needs_a_whole_checkpoint_and_a_whole_summary(
    cell: Cell, places: Places, fold: Path
) -> None:
    finish(fold, 0.75)
    assert state_of(cell, places).dice == 0.75
    checkpoint, result = fold / "checkpoint_final.pth", fold / "validation" / "summary.json"
    for file in (checkpoint, result):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        assert state_of(cell, places).stage is not Stage.DONE
        file.write_bytes(whole)
    assert state_of(cell, places).stage is Stage.DONE


def test_checkpoints_that_were_being_written_are_dropped(fold: Path) -> None:
    finish(fold)
    whole = (fold / "checkpoint_final.pth").read_bytes()
    (fold / "checkpoint_latest.pth").write_bytes(whole[:-30])
    (fold / "checkpoint_best.pth").write_bytes(b"")
    drop_broken_checkpoints(fold)
    assert [path.name for path in sorted(fold.glob("*.pth"))] == ["checkpoint_final.pth"]


def test_only_one_process_works_on_a_cell(cell: Cell, places: Places) -> None:
    with at_work(cell, places) as ours, at_work(cell, places) as second:
        assert ours and not second
        assert Training(cell, places)() == "busy"
    with at_work(cell, places) as ours:
        assert ours


def test_a_training_whose_worker_was_killed_is_seen(cell: Cell, places: Places, fold: Path) -> None:
    code = "import time; time.sleep(600)"
    training = subprocess.Popen([sys.executable, "-c", code, cell.trainer])
    other = subprocess.Popen([sys.executable, "-c", code])  # has the number by now
    try:
        note_process(cell, places, training.pid)
        assert state_of(cell, places).stage is Stage.RUNNING
        with at_work(cell, places) as ours:
            assert not ours
        note_process(cell, places, other.pid)
        assert state_of(cell, places).stage is Stage.WAITING
    finally:
        for process in (training, other):
            process.kill()
            process.wait()
    note_process(cell, places, training.pid)
    assert state_of(cell, places).stage is Stage.WAITING
    record = json.loads((fold / ".study_running.json").read_text())
    assert record["host"] == socket.gethostname()


def fake_nnunet(folder: Path, script: str) -> dict[str, str]:
    """An environment whose nnUNetv2_train and nvidia-smi are these shell scripts."""
    folder.mkdir()
    for name, text in {
        "nnUNetv2_train": script,
        "nvidia-smi": 'echo "$(cat ' + str(folder / "pid") + '), 100"; echo "1, 900"',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_failure_leaves_the_end_of_its_log(
    cell: Cell, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = tmp_path / "bin"
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(bin_folder))
    environment = fake_nnunet(bin_folder, "echo reading; echo 'out of memory' >&2; exit 3")
    with pytest.raises(CommandFailed, match="nnUNetv2_train failed"):
        Training(cell, places, "cpu", environment)()
    state = state_of(cell, places)
    assert state.stage is Stage.FAILED and state.why[:2] == ("reading", "out of memory")
    study = Study("s", [cell.dataset], [Row(cell.trainer, "with [CPR]")], cell.trainer, folds=[0, 1])
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(study, states(study, places)))
    text = console.export_text()
    assert "0 of 2 done, 1 failed" in text and "out of memory" in text and "with [CPR]" in text
    assert summary(states(study, places).values()) == "0 of 2 done, 1 failed"


def test_a_training_leaves_its_time_and_memory(
    cell: Cell, places: Places, tmp_path: Path, fold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = tmp_path / "bin"
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(bin_folder))
    script = f"""echo $$ > {bin_folder}/pid
echo $CUDA_VISIBLE_DEVICES: $@
sleep 1
cp -r {tmp_path}/done/* {fold}"""
    (tmp_path / "done" / "validation").mkdir(parents=True)
    finish(tmp_path / "done", 0.9)
    environment = {**fake_nnunet(bin_folder, script), "CUDA_VISIBLE_DEVICES": "3"}
    assert Training(cell, places, "cuda", environment)() == "done"
    assert state_of(cell, places).dice == 0.9
    resources = json.loads((fold / RESOURCES).read_text())
    assert resources["seconds"] >= 1 and resources["peak_memory_bytes"] > 100_000
    assert resources["peak_gpu_memory_bytes"] == 100 * 2**20
    said = places.log(cell).read_text().strip()
    expected = f"3: {cell.dataset} 3d_fullres 0 --c -tr {cell.trainer} -p nnUNetPlans -device cuda"
    assert said == expected
    (fold / "validation" / "summary.json").unlink()
    assert Training(cell, places, "cuda", environment)() == "done"
    assert "--val" in places.log(cell).read_text() and "--c " not in places.log(cell).read_text()


def test_gpus_are_shared_out(cell: Cell, places: Places) -> None:
    two = Local(at_once=4, gpus=["2", "5"])
    given = [two._training(cell, slot, places, {"nnUNet_raw": "r"}) for slot in range(4)]
    assert [t.environment["CUDA_VISIBLE_DEVICES"] for t in given] == ["2", "5", "2", "5"]
    assert {t.device for t in given} == {"cuda"} and given[0].environment["nnUNet_raw"] == "r"
    assert "CUDA_VISIBLE_DEVICES" not in Local()._training(cell, 0, places, {}).environment


def test_nnunets_options_reach_its_command(cell: Cell, places: Places) -> None:
    here = Local(device="cpu", options=("--npz",))._training(cell, 0, places, {}).command("--c")
    assert here == [
        *("nnUNetv2_train", cell.dataset, cell.configuration, "0", "--c", "-tr", cell.trainer),
        *("-p", cell.plans, "-device", "cpu", "--npz"),
    ]
    one, two = (Slurm(gpus=n, device="cuda").training(cell, places, {}).command("--val") for n in (1, 2))
    assert two == [*one, "-num_gpus", "2"]


def test_a_full_disk_is_kept_as_the_reason(cell: Cell, places: Places, monkeypatch) -> None:
    def full(self: Training) -> None:
        raise OSError(28, "No space left on device", "/a/file")

    monkeypatch.setattr(Training, "_train_and_validate", full)
    with pytest.raises(OSError, match="No space"):
        Training(cell, places)()
    assert state_of(cell, places).why == ("[Errno 28] No space left on device: '/a/file'",)
