"""Distributed training of nnU-Net with CPR on two CPU processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.resume_cases import differences
from tests.helpers.workspace import PLANS, Workspace

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "tests" / "helpers" / "gloo_training.py"
RANKS = 2


class Distributed(Workspace):
    """Workspace with two processes for each training."""

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    def start(self, trainer: str, *options: str) -> subprocess.Popen[bytes]:
        self.folder.mkdir(exist_ok=True)
        command = [sys.executable, str(SCRIPT), str(RANKS), str(self.folder), trainer, PLANS, *options]
        with open(self.output, "w") as output:
            return subprocess.Popen(
                command,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def train_on_all(self, trainer: str, *options: str) -> list[dict[str, Any]]:
        """Train and return the final values of every rank."""
        process = self.start(trainer, *options)
        try:
            assert process.wait(timeout=600) == 0, self.output.read_text()[-4000:]
        finally:
            end(process)
        return [torch.load(self.folder / f"rank_{r}.pth", weights_only=False) for r in range(RANKS)]

    def kill_all(self, trainer: str, when: str) -> None:
        process = self.start(trainer)
        try:
            deadline = time.monotonic() + 300
            while when not in "".join(f.read_text() for f in self.logs(trainer)):
                assert process.poll() is None, self.output.read_text()[-4000:]
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            end(process)


@pytest.fixture
def space(workspace: Workspace) -> Distributed:
    return Distributed(workspace.folder, workspace.dataset, workspace.environment)


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of the group have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check_ranks_agree(states: list[dict[str, Any]]) -> None:
    """Bit for bit: bounds, multipliers, counters; and the weights they were computed from."""
    first, *others = states
    for other in others:
        assert not differences(first["optimizer"]["cpr"], other["optimizer"]["cpr"])
        assert not differences(first["optimizer"]["state"], other["optimizer"]["state"])
        assert not differences(first["network"], other["network"])
    assert [state["writes_history"] for state in states] == [True, False]
    assert [state["batch_size"] for state in states] == [1, 1]  # nnU-Net's two, shared out


def check_history(space: Distributed, trainer: str, state: dict[str, Any], steps: list[int]) -> None:
    """Check that the history has a row for each parameter and epoch and ends with the ranks' values."""
    history = space.history(trainer)
    cpr = state["optimizer"]["cpr"]
    assert history["parameter"].tolist() == cpr["names"] * len(steps)
    assert history["step"].tolist() == list(np.repeat(steps, len(cpr["names"])))
    last = history[history["step"] == steps[-1]]
    for column, key in (("kappa", "kappa"), ("multiplier", "lagrange_multiplier")):
        np.testing.assert_array_equal(last[column].astype(np.float32), cpr["state"][key])
    assert np.isfinite(last["kappa"]).all() and (last["multiplier"] > 0).any()


def test_killed_and_continued_ranks_equal_uninterrupted_ones(space: Distributed, tmp_path: Path) -> None:
    trainer = "nnUNetTrainerCPR_anytime_ema0p5_ws6_4epochs_4iters_seed1"
    whole = space.with_results_in(tmp_path / "whole")
    states = whole.train_on_all(trainer)
    check_ranks_agree(states)
    check_history(whole, trainer, states[0], [4, 8, 12, 16])
    assert (whole.fold(trainer) / "validation" / "summary.json").exists()

    killed = space.with_results_in(tmp_path / "killed")
    killed.kill_all(trainer, when="Epoch 2")
    assert not (killed.fold(trainer) / "checkpoint_final.pth").exists()
    continued = killed.train_on_all(trainer, "--c", "--without-validation")
    check_ranks_agree(continued)
    for before, after in zip(states, continued):
        assert not differences(before, after)
    assert killed.history(trainer).equals(whole.history(trainer))


def test_initial_bounds_are_equal_on_all_ranks(space: Distributed, tmp_path: Path) -> None:
    """Each rank draws its own weights, which DDP replaces by those of the first rank."""
    trainer = "nnUNetTrainerMuonCPR_ki0x0p9_std_ada_warmup2_1epochs_4iters_seed1"
    space = space.with_results_in(tmp_path)
    states = space.train_on_all(trainer, "--without-validation")
    check_ranks_agree(states)
    check_history(space, trainer, states[0], [4])
