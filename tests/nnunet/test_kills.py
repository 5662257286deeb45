"""Trainings that are killed repeatedly and continued with ``--c``."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.workspace import Workspace

EPOCHS = 8

TRAINER = "nnUNetTrainerKilled"
MODULE = f"""
from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.nnunet.trainer import nnUNetTrainerCPR


class {TRAINER}(nnUNetTrainerCPR):
    settings = parse_trainer_name("nnUNetTrainerCPR_ws6_{EPOCHS}epochs_4iters_seed1")

    def __init__(self, plans, configuration, fold, dataset_json, device):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.save_every = 1
        self.num_val_iterations_per_epoch = 4
"""


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def checkpoint_files(fold: Path) -> dict[str, tuple[int, int]]:
    """Return all files, including temporary ones, with size and time of change."""
    found = {}
    for name in os.listdir(fold) if fold.is_dir() else ():
        if "checkpoint" in name:
            try:
                status = os.stat(fold / name)
            except FileNotFoundError:
                continue
            found[name] = status.st_mtime_ns, status.st_size
    return found


def wait_for_a_write(fold: Path, process: subprocess.Popen[str]) -> None:
    before = checkpoint_files(fold)
    while process.poll() is None and checkpoint_files(fold) == before:
        pass


def epochs_begun(log: str) -> list[int]:
    return [int(number) for number in re.findall(r"^[\d\-: .]+: Epoch (\d+)\s*$", log, re.M)]


def kill_and_continue(
    workspace: Workspace, seed: int, seconds: float, kills: int, aimed_kills: int
) -> tuple[int, int]:
    """Train to the end despite kills within the given seconds of each start.

    Args:
        aimed_kills: number of the kills that wait for a checkpoint to be written.

    Returns:
        How many kills there were, and how many hit while a checkpoint was written.
    """
    moments = random.Random(seed)
    fold = workspace.fold(TRAINER)
    aimed = [True] * aimed_kills + [False] * (kills - aimed_kills)
    moments.shuffle(aimed)
    output = workspace.folder / "output"
    reached, torn = 0, 0
    for life, aim in enumerate([*aimed, None]):
        logs = set(workspace.logs(TRAINER))
        with open(output, "w") as said:
            # The first life has nothing to continue, and may have been killed before it had.
            process = workspace.start(TRAINER, *(["--c"] if life else []), output=said)
            try:
                if aim is None:
                    assert process.wait(timeout=300) == 0, output.read_text()[-3000:]
                elif aim:
                    wait_for_a_write(fold, process)
                else:
                    time.sleep(moments.uniform(0, seconds))
                assert process.poll() in (None, 0), output.read_text()[-3000:]
            finally:
                kill(process) if process.poll() is None else None
        assert "is damaged" not in output.read_text()
        torn += any(name.startswith(".") for name in checkpoint_files(fold))
        new = set(workspace.logs(TRAINER)) - logs
        begun = epochs_begun("".join(log.read_text() for log in new))
        if begun:
            # Every epoch ends with a checkpoint: only the one that was killed is done again.
            assert begun[0] >= reached, f"life {life} began with epoch {begun[0]}, not {reached}"
            reached = begun[-1]
    return len(aimed), torn


@pytest.mark.parametrize(
    ("kills", "aimed"),
    [pytest.param(3, 2, marks=pytest.mark.slow), pytest.param(10, 4, marks=pytest.mark.release)],
)
def test_kills_do_not_change_the_result(
    kills: int, aimed: int, workspace: Workspace, tmp_path: Path
) -> None:
    """Kill two trainings, each that many times; 3 minutes on two cores for ten kills."""
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "killed_trainer.py").write_text(MODULE)
    spaces = [workspace.with_results_in(tmp_path / name) for name in ("whole", "first", "second")]
    for space in spaces:
        space.environment["nnUNet_extTrainer"] = str(tmp_path / "trainers")
        space.folder.mkdir()
    whole, *killed = spaces
    start = time.monotonic()
    whole.train(TRAINER)
    seconds = (time.monotonic() - start) / 2

    with ThreadPoolExecutor(2) as pool:
        counts = list(
            pool.map(
                partial(kill_and_continue, kills=kills, aimed_kills=aimed),
                killed,
                (1, 2),
                (seconds,) * 2,
            )
        )
    print(f"kills, and those during a write: {counts}")
    assert sum(done for done, _ in counts) == 2 * kills
    assert sum(torn for _, torn in counts) >= aimed, "the kills do not hit the writing of checkpoints"

    expected = whole.checkpoint(TRAINER)
    for space in killed:
        ours = space.checkpoint(TRAINER)
        assert space.history(TRAINER).equals(whole.history(TRAINER))
        for key, value in expected["optimizer_state"]["cpr"]["state"].items():
            assert torch.equal(ours["optimizer_state"]["cpr"]["state"][key], value), key
        for key, value in expected["network_weights"].items():
            assert torch.equal(ours["network_weights"][key], value), key
        assert not list(space.fold(TRAINER).glob(".*")), "what killed writes have left is still there"
        summaries = [s.fold(TRAINER) / "validation" / "summary.json" for s in (space, whole)]
        assert len({re.sub(r'"/.*?"', "", f.read_text()) for f in summaries}) == 1
