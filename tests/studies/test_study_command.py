"""Studies on the command line, stopped in several ways."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from nnunet_cpr.nnunet.tools.extend import extend_model
from tests.studies.study_run import wait_for

CPR = "nnUNetTrainerCPR_ws4_8epochs_4iters_seed0"
THEIRS = "TheirTrainer"
BROKEN = "TheirBrokenTrainer"
FILE = f"""
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

class {BROKEN}(nnUNetTrainer):
    def initialize(self):
        raise ValueError("broken on purpose")

class {THEIRS}(nnUNetTrainer):
    def __init__(self, plans, configuration, fold, dataset_json, device):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.num_epochs, self.num_iterations_per_epoch, self.num_val_iterations_per_epoch = 1, 2, 2
"""


@pytest.mark.slow
def test_stopped_study_continues_to_all_results(study: Callable, tmp_path: Path) -> None:
    """Two of the trainers come from another package, and one of these fails."""
    mine = study("stopped", [CPR, BROKEN, THEIRS], [0])
    (tmp_path / "theirs.py").write_text(FILE)
    mine.environment["nnUNet_extTrainer"] = str(tmp_path)
    fold = mine.space.fold(CPR)

    def is_training(attempt: int, epochs: int) -> bool:
        """Return True if an attempt, each of which has a log, has started so many epochs."""
        logs = sorted(fold.glob("training_log_*.txt"))
        return len(logs) == attempt and logs[-1].read_text().count(": Epoch ") > epochs

    process = mine.start()
    wait_for(lambda: is_training(attempt=1, epochs=1), process)
    process.send_signal(signal.SIGINT)  # Ctrl-C
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "continue from the last checkpoints" in err
    assert "Traceback" not in err
    assert mine.trainings() == []
    assert "stopped" in mine.command("status", "--once")

    process = mine.start()
    wait_for(lambda: is_training(attempt=2, epochs=1), process)
    assert "running" in mine.command("status", "--once")
    mine.kill_everything(process)
    assert "stopped" in mine.command("status", "--once")

    process = mine.start()
    wait_for(lambda: is_training(attempt=3, epochs=0), process)
    os.kill(process.pid, signal.SIGKILL)  # only the command: the training continues
    process.wait()
    assert mine.trainings() != []

    said = mine.run(status=1)
    assert "2 of 3 done, 1 failed" in said
    assert BROKEN in said and "ValueError: broken on purpose" in said
    logs = list(fold.glob("training_log_*.txt"))
    assert len(logs) == 3, "the running training was started again"
    lines = (fold / "cpr_history.csv").read_text().splitlines()
    assert {line.split(",")[0] for line in lines[1:]} == set(map(str, range(8)))
    for trainer in (CPR, THEIRS):
        summary = json.loads((mine.space.fold(trainer) / "validation" / "summary.json").read_text())
        assert len(summary["metric_per_case"]) == 1
        assert json.loads((mine.space.fold(trainer) / "resources.json").read_text())["seconds"] > 1

    before = {path: path.stat().st_mtime_ns for path in mine.space.folder.rglob("checkpoint_final.pth")}
    mine.run(status=1)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    status = mine.command("status", "--once")
    assert "2 of 3 done, 1 failed" in status and "broken on purpose" in status


@pytest.mark.release
def test_folds_run_side_by_side_after_the_split(study: Callable) -> None:
    """nnU-Net's split is made before the folds of a trainer start side by side."""
    mine = study("several", ["nnUNetTrainerSGD_1epochs_2iters"], [0, 1])
    split = mine.space.folder / "nnUNet_preprocessed" / mine.space.dataset / "splits_final.json"
    kept = json.loads(split.read_text()) if split.exists() else None
    split.unlink(missing_ok=True)
    assert "all done" in mine.run("--jobs", "2", "--device", "cpu")
    assert len(json.loads(split.read_text())) == 5
    assert kept is None or json.loads(split.read_text()) == kept
    assert "2 of 2 done" in mine.command("status")


@pytest.mark.slow
def test_study_with_more_epochs_continues_runs_that_were_extended(study: Callable) -> None:
    short, longer = (f"nnUNetTrainerCPR_anytime_ws1_{n}epochs_2iters_seed0" for n in (1, 2))
    mine = study("longer", [short], [0])
    mine.run()
    mine.file.write_text(mine.file.read_text().replace(short, longer))
    said = mine.run(status=1)
    assert f"exists with trainers {short}, which it would lose; choose another --name, or --repl" in said
    extend_model(mine.space.model(short), 2, print)
    mine.run("--replace")
    (log,) = mine.logs.glob(f"*{longer}*.log")
    assert "Epoch 1" in log.read_text() and "Epoch 0" not in log.read_text()
    assert mine.space.checkpoint(longer)["current_epoch"] == 2
    assert mine.space.checkpoint(short)["current_epoch"] == 1
