"""State of a run from its files, its lock and its processes."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from nnunet_cpr.nnunet.commands import CommandFailed
from nnunet_cpr.nnunet.fold_files import RESOURCES, LoggedProgress, read_progress
from nnunet_cpr.nnunet.stop_signals import StopRequest
from nnunet_cpr.studies.definition import Run, Study, TrainerEntry
from nnunet_cpr.studies.executors import Local, Slurm
from nnunet_cpr.studies.run_state import Stage, StudyPaths, claim, record_process, state_of
from nnunet_cpr.studies.status_table import states, status_table, summary
from nnunet_cpr.studies.worker import Worker, remove_incomplete_checkpoints

LOG = """
2026-01-01 10:00:00.0: Epoch {epoch}
2026-01-01 10:00:00.0: Current learning rate: 0.01
2026-01-01 10:00:00.0: train_loss -0.1
2026-01-01 10:00:00.0: val_loss -0.2
2026-01-01 10:00:00.0: Pseudo dice [{dice}]
2026-01-01 10:00:00.0: Epoch time: {seconds} s
"""


@pytest.fixture
def fold(run: Run, paths: StudyPaths) -> Path:
    folder = run.folder(paths.results)
    (folder / "validation").mkdir(parents=True)
    return folder


def finish(fold: Path, dice: float = 0.5) -> None:
    torch.save({"a": torch.zeros(10)}, fold / "checkpoint_final.pth")
    summary = {"foreground_mean": {"Dice": dice}}
    (fold / "validation" / "summary.json").write_text(json.dumps(summary))


def test_new_run_is_waiting_or_queued(run: Run, paths: StudyPaths) -> None:
    assert state_of(run, paths).stage is Stage.WAITING
    assert state_of(run, paths, frozenset({run.key})).stage is Stage.QUEUED
    assert state_of(run, paths).epochs == 10


def test_progress_combines_all_logs(run: Run, paths: StudyPaths, fold: Path) -> None:
    first = LOG.format(epoch=0, dice="np.float32(0.25), np.float32(nan)", seconds=10)
    first += LOG.format(epoch=1, dice="np.float32(0.5), np.float32(0.7)", seconds=30)
    again = LOG.format(epoch=1, dice="0.5, 0.6", seconds=20)  # repeated after a stop
    (fold / "training_log_2026_1_1_10_00_00.txt").write_text(first)
    assert state_of(run, paths).pseudo_dice == pytest.approx(0.6)
    (fold / "training_log_2026_1_1_11_00_00.txt").write_text(again)
    with claim(run, paths) as ours:
        assert ours
        state = state_of(run, paths)
    assert (state.stage, state.epoch, state.epochs) == (Stage.RUNNING, 2, 10)
    assert state.pseudo_dice == pytest.approx(0.55) and state.seconds_left == 8 * 15
    assert state_of(run, paths).stage is Stage.STOPPED


def test_unchanged_logs_are_read_once(
    run: Run, paths: StudyPaths, fold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def read(folder: Path) -> LoggedProgress:
        reads.append(folder)
        return read_progress(folder)

    monkeypatch.setattr("nnunet_cpr.studies.run_state.read_progress", read)
    log = fold / "training_log_2026_1_1_10_00_00.txt"
    for epoch in range(3):
        with log.open("a") as file:
            file.write(LOG.format(epoch=epoch, dice="0.5, 0.6", seconds=10))
        assert [state_of(run, paths).epoch for _ in range(5)] == [epoch + 1] * 5
        assert len(reads) == epoch + 1


def test_done_needs_complete_checkpoint_and_summary(run: Run, paths: StudyPaths, fold: Path) -> None:
    finish(fold, 0.75)
    assert state_of(run, paths).dice == 0.75
    checkpoint, result = fold / "checkpoint_final.pth", fold / "validation" / "summary.json"
    for file in (checkpoint, result):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        assert state_of(run, paths).stage is not Stage.DONE
        file.write_bytes(whole)
    assert state_of(run, paths).stage is Stage.DONE


def test_incomplete_checkpoints_are_removed(fold: Path) -> None:
    finish(fold)
    whole = (fold / "checkpoint_final.pth").read_bytes()
    (fold / "checkpoint_latest.pth").write_bytes(whole[:-30])
    (fold / "checkpoint_best.pth").write_bytes(b"")
    remove_incomplete_checkpoints(fold)
    assert [path.name for path in sorted(fold.glob("*.pth"))] == ["checkpoint_final.pth"]


def test_checkpoints_that_cannot_be_read_are_kept(fold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(fold)
    read = open

    def fail(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(".pth"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path, mode, *arguments, **options)

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(OSError, match=r"Input/output error.*checkpoint_final\.pth"):
        remove_incomplete_checkpoints(fold)
    assert (fold / "checkpoint_final.pth").exists()


def test_result_of_an_earlier_training_does_not_count(
    run: Run, paths: StudyPaths, fold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(fold, 0.5)
    whole = (fold / "checkpoint_final.pth").read_bytes()
    (fold / "checkpoint_final.pth").unlink()
    options = []

    def train(self: Worker, option: str, request: StopRequest) -> None:
        options.append(option)
        (fold / "checkpoint_final.pth").write_bytes(whole)
        if option == "--val":
            finish(fold, 0.75)

    monkeypatch.setattr(Worker, "_run_nnunet", train)
    assert Worker(run, paths, "cpu")() == "done"
    assert options == ["--c", "--val"] and state_of(run, paths).dice == 0.75


def test_run_that_cannot_be_claimed_has_failed(run: Run, paths: StudyPaths) -> None:
    folder = run.folder(paths.results).parent
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in place of the model's folder")
    with pytest.raises(OSError, match=folder.name):
        Worker(run, paths, "cpu")()
    state = state_of(run, paths)
    assert state.stage is Stage.FAILED and folder.name in state.reason[0]


def test_files_of_other_users_do_not_hide_a_state(
    run: Run, paths: StudyPaths, fold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fold / "training_log_2026_1_1_10_00_00.txt").write_text(
        LOG.format(epoch=0, dice="0.5, 0.6", seconds=10)
    )
    (fold / "training_log_2026_1_1_11_00_00.txt").mkdir()  # cannot be read
    with claim(run, paths):
        pass

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("nnunet_cpr.studies.run_state.FileLock", refuse)
    assert (state_of(run, paths).stage, state_of(run, paths).epoch) == (Stage.STOPPED, 1)


def test_only_one_process_claims_a_run(run: Run, paths: StudyPaths) -> None:
    with claim(run, paths) as ours, claim(run, paths) as second:
        assert ours and not second
        assert Worker(run, paths)() == "busy"
    with claim(run, paths) as ours:
        assert ours


def test_training_of_killed_worker_is_running(run: Run, paths: StudyPaths, fold: Path) -> None:
    code = "import time; time.sleep(600)"
    training = subprocess.Popen([sys.executable, "-c", code, run.trainer])
    other = subprocess.Popen([sys.executable, "-c", code])  # has the process number now
    try:
        record_process(run, paths, training.pid)
        assert state_of(run, paths).stage is Stage.RUNNING
        with claim(run, paths) as ours:
            assert not ours
        record_process(run, paths, other.pid)
        assert state_of(run, paths).stage is Stage.WAITING
    finally:
        for process in (training, other):
            process.kill()
            process.wait()
    record_process(run, paths, training.pid)
    assert state_of(run, paths).stage is Stage.WAITING
    record = json.loads((fold / ".study_running.json").read_text())
    assert record["host"] == socket.gethostname()


def fake_nnunet(folder: Path, script: str) -> dict[str, str]:
    """Return an environment whose nnUNetv2_train is a shell script."""
    folder.mkdir()
    (folder / "nnUNetv2_train").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nnUNetv2_train").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def fake_nvml() -> SimpleNamespace:
    """Return a pynvml with two GPUs, each used by a foreign process and by nnUNetv2_train."""

    def processes(gpu: int) -> list[SimpleNamespace]:
        ours = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "nnUNetv2_train" in " ".join(child.cmdline()):
                    ours.append(child.pid)
        sizes = {1: 900, **dict.fromkeys(ours, 100)}
        return [SimpleNamespace(pid=pid, usedGpuMemory=size * 2**20) for pid, size in sizes.items()]

    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=processes,
    )


def test_failure_keeps_the_end_of_its_log(
    run: Run, paths: StudyPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = tmp_path / "bin"
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(bin_folder))
    environment = fake_nnunet(bin_folder, "echo reading; echo 'out of memory' >&2; exit 3")
    with pytest.raises(CommandFailed, match="nnUNetv2_train failed"):
        Worker(run, paths, "cpu", environment)()
    state = state_of(run, paths)
    assert state.stage is Stage.FAILED and state.reason[:2] == ("reading", "out of memory")
    study = Study(
        "s", [run.dataset], [TrainerEntry(run.trainer, "with [CPR]")], run.trainer, folds=[0, 1]
    )
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(status_table(study, states(study, paths)))
    text = console.export_text()
    assert "0 of 2 done, 1 failed" in text and "out of memory" in text and "with [CPR]" in text
    assert summary(states(study, paths).values()) == "0 of 2 done, 1 failed"


def test_worker_records_time_and_memory(
    run: Run, paths: StudyPaths, tmp_path: Path, fold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = tmp_path / "bin"
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(bin_folder))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    script = f"""echo $CUDA_VISIBLE_DEVICES: $@
sleep 1
cp -r {tmp_path}/done/* {fold}"""
    (tmp_path / "done" / "validation").mkdir(parents=True)
    finish(tmp_path / "done", 0.9)
    environment = {**fake_nnunet(bin_folder, script), "CUDA_VISIBLE_DEVICES": "3"}
    assert Worker(run, paths, "cuda", environment)() == "done"
    assert state_of(run, paths).dice == 0.9
    resources = json.loads((fold / RESOURCES).read_text())
    assert resources["seconds"] >= 1 and resources["peak_memory_bytes"] > 100_000
    assert resources["peak_gpu_memory_bytes"] == 2 * 100 * 2**20
    said = paths.log(run).read_text().strip()
    expected = f"3: {run.dataset} 3d_fullres 0 --c -tr {run.trainer} -p nnUNetPlans -device cuda"
    assert said == expected
    (fold / "validation" / "summary.json").unlink()
    assert Worker(run, paths, "cuda", environment)() == "done"
    assert "--val" in paths.log(run).read_text() and "--c " not in paths.log(run).read_text()


def test_local_executor_shares_gpus(run: Run, paths: StudyPaths) -> None:
    two = Local(at_once=4, gpus=["2", "5"])
    given = [two.worker(run, slot, paths, {"nnUNet_raw": "r"}) for slot in range(4)]
    assert [t.environment["CUDA_VISIBLE_DEVICES"] for t in given] == ["2", "5", "2", "5"]
    assert {t.device for t in given} == {"cuda"} and given[0].environment["nnUNet_raw"] == "r"
    assert "CUDA_VISIBLE_DEVICES" not in Local().worker(run, 0, paths, {}).environment


class FakeExecutor:
    """Executor of submitit whose jobs take a second; it notes the GPU and the jobs at each start."""

    def __init__(self, folder: Path) -> None:
        self.jobs: list[SimpleNamespace] = []
        self.started: list[tuple[str, int]] = []

    def update_parameters(self, **options: Any) -> None: ...

    def submit(self, worker: Worker) -> SimpleNamespace:
        end = time.monotonic() + 1
        others = sum(not job.done() for job in self.jobs)
        self.started.append((worker.environment["CUDA_VISIBLE_DEVICES"], others))
        # As of a worker that finds its run in use.
        is_busy = state_of(worker.run, worker.paths).stage is Stage.RUNNING
        result = "busy" if is_busy else "done"
        self.jobs.append(SimpleNamespace(done=lambda: time.monotonic() > end, result=lambda: result))
        return self.jobs[-1]


def test_trainings_of_a_killed_command_keep_their_slots(
    run: Run, paths: StudyPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train two at once on two GPUs, while a killed command's training is left on the first."""
    runs = [replace(run, fold=fold) for fold in range(4)]
    earlier = subprocess.Popen(["sh", "-c", "sleep 4; exit", run.trainer])
    threading.Thread(target=earlier.wait).start()  # else it stays a zombie
    runs[0].folder(paths.results).mkdir(parents=True)
    record_process(runs[0], paths, earlier.pid, "2")
    executor = FakeExecutor(paths.jobs)
    monkeypatch.setattr("submitit.LocalExecutor", lambda folder: executor)
    Local(at_once=2, gpus=["2", "5"]).run(runs, paths, {}, lambda: None)
    assert executor.started[:2] == [("5", 0), ("5", 0)] and len(executor.started) == 4

    assert Local(at_once=4, gpus=["2", "5"]).free_slots([0], ["2", None, "5"]) == []
    assert Local(at_once=5, gpus=["2", "5"]).free_slots([0], ["5", None]) == [3, 4]
    assert Local(at_once=2).free_slots([], [None]) == [1]


def test_local_executor_shares_cores(
    run: Run, paths: StudyPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("OMP_NUM_THREADS", "NNUNET_CPR_CPU_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    three = Local(at_once=3, device="cpu").worker(run, 0, paths, {}).environment
    variables = ("OMP_NUM_THREADS", "NNUNET_CPR_CPU_THREADS", "nnUNet_n_proc_DA")
    assert [three[variable] for variable in variables] == ["2", "2", "2"]
    assert "NNUNET_CPR_CPU_THREADS" not in Local(device="cpu").worker(run, 0, paths, {}).environment
    monkeypatch.setenv("NNUNET_CPR_CPU_THREADS", "5")
    again = Local(at_once=3, device="cpu").worker(run, 0, paths, {}).environment
    assert again["NNUNET_CPR_CPU_THREADS"] == "5"


def test_options_reach_nnunets_command(run: Run, paths: StudyPaths) -> None:
    here = Local(device="cpu", options=("--npz",)).worker(run, 0, paths, {}).command("--c")
    assert here == [
        *("nnUNetv2_train", run.dataset, run.configuration, "0", "--c", "-tr", run.trainer),
        *("-p", run.plans, "-device", "cpu", "--npz"),
    ]
    one, two = (Slurm(gpus=n, device="cuda").worker(run, paths, {}).command("--val") for n in (1, 2))
    assert two == [*one, "-num_gpus", "2"]


def test_full_disk_is_kept_as_the_reason(run: Run, paths: StudyPaths, monkeypatch) -> None:
    def full(self: Worker, request: StopRequest) -> None:
        raise OSError(28, "No space left on device", "/a/file")

    monkeypatch.setattr(Worker, "_train_and_validate", full)
    with pytest.raises(OSError, match="No space"):
        Worker(run, paths)()
    assert state_of(run, paths).reason == ("[Errno 28] No space left on device: '/a/file'",)
