"""Studies through the command, stopped in every way there is."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.nnunet.commands import nnunet_environment

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
def test_stopped_and_run_again_it_ends_with_all_results(
    study: Callable, waiting: Callable, tmp_path: Path
) -> None:
    """With two trainers of somebody else's, one of which does not work."""
    mine = study("stopped", [CPR, BROKEN, THEIRS], [0])
    (tmp_path / "theirs.py").write_text(FILE)
    mine.environment["nnUNet_extTrainer"] = str(tmp_path)
    fold = mine.space.fold(CPR)

    def is_training(attempt: int, epochs: int) -> bool:
        """Whether an attempt, each of which has a log, has begun so many epochs."""
        logs = sorted(fold.glob("training_log_*.txt"))
        return len(logs) == attempt and logs[-1].read_text().count(": Epoch ") > epochs

    process = mine.start()
    waiting(lambda: is_training(attempt=1, epochs=1), process)
    process.send_signal(signal.SIGINT)  # Ctrl-C
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "goes on from the last checkpoints" in err
    assert "Traceback" not in err
    assert mine.trainings() == []
    assert "stopped" in mine.command("status", "--once")

    process = mine.start()
    waiting(lambda: is_training(attempt=2, epochs=1), process)
    assert "running" in mine.command("status", "--once")
    mine.kill_everything(process)
    assert "stopped" in mine.command("status", "--once")

    process = mine.start()
    waiting(lambda: is_training(attempt=3, epochs=0), process)
    os.kill(process.pid, signal.SIGKILL)  # the command alone: what it has started goes on
    process.wait()
    assert mine.trainings() != []

    said = mine.run(status=1)
    assert "2 of 3 done, 1 failed" in said
    assert BROKEN in said and "ValueError: broken on purpose" in said
    logs = list(fold.glob("training_log_*.txt"))
    assert len(logs) == 3, "the training that went on was started again"
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


@pytest.mark.slow
def test_several_at_once_through_a_study_that_needs_planning(study: Callable, waiting: Callable) -> None:
    """The folds of one trainer side by side; nnU-Net's split is made before they start."""
    mine = study("several", ["nnUNetTrainerSGD_1epochs_2iters"], [0, 1])
    split = mine.space.folder / "nnUNet_preprocessed" / mine.space.dataset / "splits_final.json"
    kept = json.loads(split.read_text()) if split.exists() else None
    split.unlink(missing_ok=True)
    assert "all done" in mine.run("--jobs", "2", "--device", "cpu")
    assert len(json.loads(split.read_text())) == 5
    assert kept is None or json.loads(split.read_text()) == kept
    assert "2 of 2 done" in mine.command("status")


def test_what_cannot_be_run_is_said_at_once(study: Callable) -> None:
    mine = study("wrong", [CPR], [9])
    assert "is split into 5 folds, so there is no fold 9" in mine.run(status=1)  # by the command
    assert "has no plans nnUNetPlansX" in mine.refusal("--plans", "nnUNetPlansX")
    assert "no configuration 2d_x" in mine.refusal("--configuration", "2d_x")
    assert "data set 77 is in neither" in mine.refusal("--dataset", "77")
    assert "--folds must be numbers" in mine.refusal("--folds", "a")
    assert "--time must be" in mine.refusal("--executor", "slurm", "--time", "soon")
    misspelt = study("misspelt", [CPR, CPR.replace("epochs", "epochz")], [0])
    assert f"did you mean {CPR}?" in misspelt.refusal()
    assert "a trainer of your own must be" in study("no", ["NoTrainer"], [0]).refusal()
    mine.environment = {k: v for k, v in mine.environment.items() if k != "nnUNet_raw"}
    assert "nnUNet_raw not set" in mine.refusal()


def test_a_preset_as_a_new_user_meets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in nnunet_environment(tmp_path, processes=1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str, status: int = 0) -> str:
        done = CliRunner().invoke(app, ["study", *arguments])
        assert done.exit_code == status, done.output
        return done.output

    assert "The row of Heart" in command("presets")
    command("new", "quick", "mine.yaml")
    assert "is there already" in command("new", "quick", "mine.yaml", status=1)
    assert "no preset 'quik'" in command("new", "quik", "other.yaml", status=1)
    options = ("mine.yaml", "--dataset", "Dataset004_Hippocampus", "--folds", "0,1")
    assert "0 of 4 done" in command("status", *options, "--once")
    assert len(command("report", *options, status=1).strip().splitlines()) == 1
    assert "Dataset004_Hippocampus is not in nnUNet_raw" in command("run", *options, status=1)
    assert command("cancel", "mine.yaml").strip() == "0 jobs cancelled"
