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

from nnunet_cpr.nnunet.checkpoint_policy import SAVE_MINUTES
from tests.helpers.resume_cases import differences
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
        self.num_val_iterations_per_epoch = 4
"""


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill_and_continue(workspace: Workspace, seed: int, seconds: float, kills: int) -> None:
    """Train to the end despite kills within the given seconds of each start."""
    moments = random.Random(seed)
    output = workspace.folder / "output"
    for life in range(kills + 1):
        with open(output, "w") as said:
            # The first life has nothing to continue, and may have been killed before it had.
            process = workspace.start(TRAINER, *(["--c"] if life else []), output=said)
            try:
                if life == kills:
                    assert process.wait(timeout=300) == 0, output.read_text()[-3000:]
                else:
                    time.sleep(moments.uniform(0, seconds))
                    assert process.poll() in (None, 0), output.read_text()[-3000:]
            finally:
                kill(process) if process.poll() is None else None
        assert "is damaged" not in output.read_text()


@pytest.mark.parametrize(
    "kills", [pytest.param(1, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.release)]
)
def test_kills_do_not_change_the_result(kills: int, workspace: Workspace, tmp_path: Path) -> None:
    """Kill two trainings, each that many times; 3 minutes on two cores for ten kills."""
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "killed_trainer.py").write_text(MODULE)
    spaces = [workspace.with_results_in(tmp_path / name) for name in ("whole", "first", "second")]
    for space in spaces:
        space.environment["nnUNet_extTrainer"] = str(tmp_path / "trainers")
        space.environment[SAVE_MINUTES] = "0"  # after every epoch
        space.folder.mkdir()
    whole, *killed = spaces
    start = time.monotonic()
    whole.train(TRAINER)
    seconds = (time.monotonic() - start) / 2

    with ThreadPoolExecutor(2) as pool:
        work = partial(kill_and_continue, seconds=seconds, kills=kills)
        list(pool.map(work, killed, (1, 2)))

    expected = whole.checkpoint(TRAINER)
    for space in killed:
        ours = space.checkpoint(TRAINER)
        assert space.history(TRAINER).equals(whole.history(TRAINER))
        for key in ("optimizer_state", "network_weights"):
            assert not differences(ours[key], expected[key])
        assert not list(space.fold(TRAINER).glob(".*")), "what killed writes have left is still there"
        summaries = [s.fold(TRAINER) / "validation" / "summary.json" for s in (space, whole)]
        assert len({re.sub(r'"/.*?"', "", f.read_text()) for f in summaries}) == 1
