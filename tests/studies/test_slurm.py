"""A study on a real Slurm cluster of one node."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.studies import slurm_cluster
from tests.studies.study_run import StudyRun, wait_for

pytestmark = pytest.mark.skipif(
    slurm_cluster.missing_requirement() is not None, reason=str(slurm_cluster.missing_requirement())
)
SLOW = "nnUNetTrainerSlowCPR"
MODULE = """
import time

from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.nnunet.trainer import nnUNetTrainerCPR


class nnUNetTrainerSlowCPR(nnUNetTrainerCPR):
    settings = parse_trainer_name("nnUNetTrainerCPR_ws4_{epochs}epochs_2iters_seed1")

    def __init__(self, plans, configuration, fold, dataset_json, device):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.num_val_iterations_per_epoch = 1

    def train_step(self, batch):
        time.sleep({seconds})
        return super().train_step(batch)
"""
OPTIONS = ("--executor", "slurm", "--gpus", "0", "--cpus", "1", "--device", "cpu")


def slow_study(study: Callable, folder: Path, epochs: int, seconds: float) -> StudyRun:
    """Return a study whose only trainer needs some seconds an iteration."""
    mine: StudyRun = study("slow", [SLOW], [0])
    (folder / "trainers").mkdir()
    (folder / "trainers" / "slow.py").write_text(MODULE.format(epochs=epochs, seconds=seconds))
    mine.environment["nnUNet_extTrainer"] = str(folder / "trainers")
    mine.environment["nnUNet_results"] = str(folder / "results")
    return mine


def attempts(mine: StudyRun) -> list[tuple[list[int], int]]:
    """Return the epochs that each attempt has started, and the number of those that it has finished."""
    results = Path(mine.environment["nnUNet_results"])
    folder = next(iter(mine.study().runs())).folder(results)
    found = []
    for log in sorted(folder.glob("training_log_*.txt")):
        text = log.read_text()
        epochs = [int(number) for number in re.findall(r": Epoch (\d+)", text)]
        found.append((epochs, text.count("Epoch time:")))
    return [attempt for attempt in found if attempt[0]]


def check_only_running_epochs_are_repeated(found: list[tuple[list[int], int]]) -> None:
    for (earlier, _), (later, _) in pairwise(found):
        assert earlier[-1] <= later[0] <= earlier[-1] + 1, found


@pytest.mark.release
def test_training_longer_than_the_time_limit_ends(study: Callable, tmp_path: Path) -> None:
    """The signal comes 20 to 50 seconds after the start, as Slurm checks time limits twice a minute."""
    mine = slow_study(study, tmp_path, epochs=16, seconds=3)
    with slurm_cluster.cluster(tmp_path / "slurm", requeue_seconds=15) as environment:
        mine.environment.update({k: environment[k] for k in ("SLURM_CONF", "PATH")})
        said = mine.run(*OPTIONS, "--time", "1", "--signal-delay", "10", "--wait")
    assert "all done" in said, said
    found = attempts(mine)
    assert len(found) >= 2, "the time limit was not reached"
    check_only_running_epochs_are_repeated(found)
    assert {epoch for epochs, _ in found for epoch in epochs} == set(range(16))
    jobs = Path(mine.environment["nnUNet_results"]) / "studies" / "slow" / "jobs"
    print(*(path.read_text() for path in jobs.glob("*.out")), found)  # shown on failure or with -s


@pytest.mark.slow
def test_requeued_and_preempted_jobs_continue_and_cancelled_ones_end(
    study: Callable, tmp_path: Path
) -> None:
    mine = slow_study(study, tmp_path, epochs=1000, seconds=0.5)

    def slurm(*command: str) -> str:
        done = subprocess.run(command, env=mine.environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def trains(attempt: int) -> bool:
        found = attempts(mine)
        return len(found) == attempt and len(found[-1][0]) >= 2

    with slurm_cluster.cluster(tmp_path / "slurm") as environment:
        mine.environment.update({k: environment[k] for k in ("SLURM_CONF", "PATH")})
        # Accepted by Slurm beside ours: a GPU, a constraint and an option without a value.
        settings = ("gres=gpu:a100:1", "constraint=fast", "--no-kill")
        options = [word for setting in settings for word in ("--sbatch", setting)]
        command = (*OPTIONS[:2], *OPTIONS[4:], "--time", "30", *options)
        job = re.findall(r"submitted 1 job: (\d+)", mine.run(*command))[0]
        assert "nothing to submit" in mine.run(*command), "submitted twice"
        wait_for(lambda: trains(attempt=1))
        assert "running" in mine.command("status", "--once")
        slurm("scontrol", "requeue", job)
        wait_for(lambda: trains(attempt=2))
        urgent = ("--partition=urgent", "--exclusive", "--time=5", f"--output={os.devnull}")
        slurm("sbatch", *urgent, "--wrap", "sleep 1")
        wait_for(lambda: trains(attempt=3))
        slurm("scancel", "--signal=USR2", job)
        wait_for(lambda: trains(attempt=4))
        assert mine.command("cancel").strip() == "1 job cancelled"
        wait_for(lambda: slurm("squeue", "--noheader") == "")
        wait_for(lambda: not mine.trainings())
        assert "1 stopped" in mine.command("status", "--once")
    found = attempts(mine)
    assert len(found) == 4
    check_only_running_epochs_are_repeated(found)
