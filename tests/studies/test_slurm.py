"""A study on a real Slurm cluster of one node."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import slurm_cluster

MISSING = slurm_cluster.missing_requirement()
TRAINERS = ["nnUNetTrainerCPR_ws4_10epochs_4iters_seed0", "nnUNetTrainerSGD_10epochs_4iters_seed0"]


@pytest.mark.slow
@pytest.mark.skipif(
    slurm_cluster.missing_requirement() is not None, reason=str(slurm_cluster.missing_requirement())
)
def test_killed_slurm_run_continues(study: Callable, waiting: Callable, tmp_path: Path) -> None:
    mine = study("slurm", TRAINERS, [0])
    fold = mine.space.fold(TRAINERS[0])
    options = ("--executor", "slurm", "--gpus", "0", "--cpus", "1", "--device", "cpu")
    options += ("--partition", "tests", "--time", "30", "--jobs", "1", "--sbatch", "comment=ours")
    with slurm_cluster.cluster(tmp_path / "slurm") as environment:
        # A job has the node's PATH where nnU-Net is, as a cluster's users have.
        mine.environment.update({k: environment[k] for k in ("SLURM_CONF", "PATH")})
        said = mine.run(*options)
        assert "submitted 2 jobs" in said
        assert "nothing to submit" in mine.run(*options), "submitted twice"
        assert "in Slurm's queue" in mine.command("status", "--once")

        waiting(lambda: any("Epoch 2" in log.read_text() for log in fold.glob("training_log_*.txt")))
        assert "running" in mine.command("status", "--once")
        for number in mine.trainings():  # looks like a dead node to the study
            os.kill(number, signal.SIGKILL)
        waiting(lambda: not mine.trainings() or "failed" in mine.command("status", "--once"))

        said = mine.run(*options, "--wait")
        assert "all done" in said, said
        status = mine.command("status", "--once")
        assert "2 of 2 done" in status
        assert len(list(fold.glob("training_log_*.txt"))) == 2

        mine.run("--executor", "slurm", "--folds", "1", *options[2:])
        assert mine.command("cancel").strip() in ("1 jobs cancelled", "2 jobs cancelled")
        waiting(lambda: mine.command("cancel").strip() == "0 jobs cancelled")
