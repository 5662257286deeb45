"""Processes that share a folder of results."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from filelock import FileLock

from nnunet_cpr.names.run_name import parse_run_name
from nnunet_cpr.vision.engine import train
from nnunet_cpr.vision.folder import LOCK, lock_folder, run_folder
from nnunet_cpr.vision.task import InUse, Options
from nnunet_cpr.vision.tasks import TASKS

DIGITS, NAME = TASKS["digits"], parse_run_name("SGD_24steps_warmup4")

SWEEP = """
import dataclasses, os, sys, time
from nnunet_cpr import cli
from nnunet_cpr.vision import engine, sweeps, tasks

results, log = sys.argv[1:]
tasks.TASKS["digits"] = dataclasses.replace(tasks.TASKS["digits"], steps=12, warmup=2)
whole = sweeps.SWEEPS["digits"]
panels = tuple(panel for panel in whole.panels if panel.title == "SGD")
sweeps.SWEEPS["digits"] = dataclasses.replace(whole, panels=panels, seeds=(1,))
train = engine._TrainingLoop.train


def log_run(self):
    with open(log, "a") as file:
        file.write(f"{os.getpid()} {self.run}\\n")
    # Each process waits until both have started their first run.
    while len({line.split()[0] for line in open(log)}) < 2:
        time.sleep(0.02)
    return train(self)


engine._TrainingLoop.train = log_run
sys.argv[1:] = ["vision", "sweep", "digits", "--results", results, "--device", "cpu"]
cli.main()
"""

KILLED_SAVING = """
import pathlib, sys, time
import torch
from nnunet_cpr.vision.engine import train
from nnunet_cpr.names.run_name import parse_run_name
from nnunet_cpr.vision.task import Options
from nnunet_cpr.vision.tasks import TASKS


def save_half(state, file):
    file.write(b"half a checkpoint")
    file.flush()
    print("saving", flush=True)
    time.sleep(600)


torch.save = save_half
train(TASKS["digits"], parse_run_name(sys.argv[2]), pathlib.Path(sys.argv[1]), Options())
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, **pipes)


@pytest.mark.slow
def test_two_processes_share_one_sweep(tmp_path: Path) -> None:
    """Each run is trained once."""
    results, log = tmp_path / "results", tmp_path / "log"
    both = [start(SWEEP, str(results), str(log)) for _ in range(2)]
    try:
        outputs = [process.communicate(timeout=500)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], outputs
    trained = [line.split() for line in log.read_text().splitlines()]
    assert set(Counter(run for _, run in trained).values()) == {1}
    assert {pid for pid, _ in trained} == {str(process.pid) for process in both}
    done = [json.loads(file.read_text())["run"] for file in results.glob("digits/*/result.json")]
    assert sorted(done) == sorted(run for _, run in trained) and len(done) == 3
    assert re.search(r"skipped: \S+ is in use: another process trains this run", "".join(outputs))
    # The last process draws all runs.
    assert (results / "digits.csv").read_text().count(",1,") == 3


@pytest.mark.slow
def test_killed_process_leaves_no_lock_or_temporary_file(tmp_path: Path) -> None:
    whole = train(DIGITS, NAME, tmp_path / "whole", Options())
    process = start(KILLED_SAVING, str(tmp_path), str(NAME))
    try:
        assert process.stdout is not None and process.stdout.readline() == "saving\n"
        folder = run_folder(tmp_path, DIGITS, NAME)
        half = f".checkpoint*{process.pid}*.pt"
        assert len(list(folder.glob(half))) == 1
        with pytest.raises(InUse, match=f"{folder.name} is in use: another process trains this run"):
            train(DIGITS, NAME, tmp_path, Options())
        assert len(list(folder.glob(half))) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with lock_folder(folder):
        assert [file.name for file in folder.iterdir()] == [LOCK]
    assert train(DIGITS, NAME, tmp_path, Options())["loss"] == whole["loss"]


def test_run_finished_by_another_process_is_not_repeated(tmp_path: Path) -> None:
    def finish_elsewhere(options: Options):
        first.append(train(DIGITS, NAME, tmp_path, Options()))
        return DIGITS.setup(options)

    first: list[dict] = []
    again = train(dataclasses.replace(DIGITS, setup=finish_elsewhere), NAME, tmp_path, Options())
    assert [again] == first


def test_file_system_without_locks_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    written = tmp_path / ".checkpoint.1@here.tmp.pt"
    written.touch()
    monkeypatch.setattr(FileLock, "acquire", raise_no_locks)
    with (
        pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\); do not train"),
        lock_folder(tmp_path),
    ):
        assert written.exists()  # another process may write it
