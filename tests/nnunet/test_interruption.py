"""Trainings that a signal ends, and their checkpoints."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.nnunet.processes import Interruption
from tests.helpers import ROOT
from tests.helpers.resume_cases import differences
from tests.helpers.workspace import Workspace

TRAINER = "nnUNetTrainerHeld"
EPOCHS = 2
MODULE = f"""
import os
import time
from pathlib import Path

import torch

from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.nnunet.trainer import nnUNetTrainerCPR


class {TRAINER}(nnUNetTrainerCPR):
    settings = parse_trainer_name("nnUNetTrainerCPR_ws2_{EPOCHS}epochs_3iters_seed1")

    def __init__(self, plans, configuration, fold, dataset_json, device):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.num_val_iterations_per_epoch = 2
        self.logger.plot_progress_png = lambda folder: None  # it is slow

    def hold(self, place):
        file = Path(os.environ["nnUNet_results"]) / place
        if file.exists():
            file.with_suffix(".reached").touch()
            while file.exists():
                time.sleep(0.02)

    def train_step(self, batch):
        loss = super().train_step(batch)
        self.hold(f"epoch {{self.current_epoch}}")
        return loss
"""
WROTE = "wrote fold_0/checkpoint_latest.pth (start of epoch 1); continue with --c"


@pytest.fixture
def space(workspace: Workspace, tmp_path: Path) -> Workspace:
    """Workspace with a trainer that waits where it is told to."""
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "held_trainer.py").write_text(MODULE)
    return with_results(workspace, tmp_path / "interrupted")


def with_results(space: Workspace, folder: Path) -> Workspace:
    (folder / "nnUNet_results").mkdir(parents=True)
    made = space.with_results_in(folder)
    made.environment["nnUNet_extTrainer"] = str(folder.parent / "trainers")
    return made


class Held:
    """Training in a process of its own that is held at a place, and its child processes."""

    def __init__(self, space: Workspace, place: str, command: list[str] | None = None) -> None:
        self.space = space
        self.results = Path(space.environment["nnUNet_results"])
        (self.results / place).touch()
        self.output = space.folder / "output.txt"
        command = command or space.command("nnUNetv2_train", *space.train_arguments(TRAINER))
        self.process = start(command, self.output, space.environment)
        try:
            wait_until((self.results / place).with_suffix(".reached").exists, self.process, self.output)
        except BaseException:
            self.kill()
            raise
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def end(self, *numbers: int) -> int:
        """Send signals and return the exit status; no child process may be left."""
        try:
            for number in numbers:
                self.process.send_signal(number)
            status = self.process.wait(timeout=120)
            _, left = psutil.wait_procs(self.children, timeout=60)
            assert not left
        finally:
            self.kill()
        for place in self.results.glob("* [0-9]"):
            place.unlink()
        return status

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of the group have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def messages(self) -> list[str]:
        """Return our lines of the output."""
        lines = [line for line in self.output.read_text().splitlines() if line.startswith("nnunet-cpr:")]
        return [line for line in lines if "does not make this training reproducible" not in line]


def start(
    command: list[str], output: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own."""
    with open(output, "w") as file:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_until(is_done: Callable[[], bool], process: subprocess.Popen, output: Path) -> None:
    deadline = time.monotonic() + 300
    while not is_done():
        assert process.poll() is None, output.read_text()[-3000:]
        assert time.monotonic() < deadline, output.read_text()[-3000:]
        time.sleep(0.02)


@pytest.mark.slow  # 20 seconds
def test_sigterm_loses_the_running_epoch_only(
    space: Workspace, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Held(space, "epoch 1")
    assert training.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert training.messages() == [f"nnunet-cpr: SIGTERM: {WROTE}"]
    assert "SIGTERM: wrote fold_0/checkpoint_latest.pth" in space.logs(TRAINER)[0].read_text()
    assert space.checkpoint(TRAINER, "checkpoint_latest.pth")["current_epoch"] == 1
    assert not list(space.fold(TRAINER).glob(".checkpoint*"))

    monkeypatch.setattr(nnUNetTrainer, "perform_actual_validation", lambda self, probabilities: None)
    space.train_here(TRAINER, "--c")
    # Both may have begun within one second, and then have one log.
    assert "".join(log.read_text() for log in space.logs(TRAINER)).count(": Epoch 0 ") == 1
    whole = with_results(workspace, tmp_path / "whole")
    whole.train_here(TRAINER)
    ours, expected = space.checkpoint(TRAINER), whole.checkpoint(TRAINER)
    for key in ("network_weights", "optimizer_state", "_best_ema", "current_epoch"):
        assert not differences(ours[key], expected[key]), key
    assert space.history(TRAINER).equals(whole.history(TRAINER))


@pytest.mark.slow  # 15 seconds each
@pytest.mark.parametrize("numbers", [[signal.SIGUSR2] * 3, [signal.SIGINT]])
def test_signals_end_the_data_loaders_too(space: Workspace, numbers: list[int]) -> None:
    space.environment["nnUNet_n_proc_DA"] = "2"
    training = Held(space, "epoch 1")
    assert len(training.children) >= 3  # two that augment the training cases, one for validation cases
    assert training.end(*numbers) == 128 + numbers[0]
    assert training.messages() == [f"nnunet-cpr: {signal.Signals(numbers[0]).name}: {WROTE}"]
    assert "KeyboardInterrupt" not in training.output.read_text()
    assert space.checkpoint(TRAINER, "checkpoint_latest.pth")["current_epoch"] == 1


@pytest.mark.slow  # 12 seconds
def test_documented_batch_script_passes_the_signal_on(space: Workspace) -> None:
    page = (ROOT / "docs" / "how-to" / "slurm.md").read_text()
    script = page.partition("```bash\n#!/bin/bash")[2].partition("```")[0]
    documented = "nnUNetv2_train 4 3d_fullres 0 -tr nnUNetTrainerCPR --c"
    command = space.command("nnUNetv2_train", *space.train_arguments(TRAINER, "--c"))
    assert documented in script
    (space.folder / "job.sh").write_text(script.replace(documented, shlex.join(command)))
    (space.folder / "scontrol").write_text('#!/bin/bash\necho "$@" > "$(dirname "$0")/requeued"\n')
    (space.folder / "scontrol").chmod(0o755)
    environment = space.environment
    environment["PATH"] = f"{space.folder}{os.pathsep}{environment['PATH']}"
    environment["SLURM_JOB_ID"] = "17"

    training = Held(space, "epoch 1", command=["bash", str(space.folder / "job.sh")])
    assert training.end(signal.SIGUSR1) == 128 + signal.SIGUSR1
    assert training.messages() == [f"nnunet-cpr: SIGUSR1: {WROTE}"]
    assert (space.folder / "requeued").read_text() == "requeue 17\n"


@pytest.mark.slow  # 8 seconds each
@pytest.mark.parametrize("target", ["parent", "rank 1", "all"])
def test_all_ranks_end_after_rank_0_has_written(tmp_path: Path, target: str) -> None:
    output = tmp_path / "output.txt"
    process = start([sys.executable, "-m", "tests.helpers.signalled_ranks", str(tmp_path)], output)
    try:
        files = [tmp_path / f"pid_{rank}" for rank in range(2)]
        wait_until(lambda: all(f.exists() for f in files), process, output)
        ranks = [psutil.Process(int(f.read_text())) for f in files]
        reached = {"parent": [process], "all": [process, *ranks]}.get(target) or [ranks[int(target[-1])]]
        for one in reached:
            one.send_signal(signal.SIGUSR1)
        _, left = psutil.wait_procs(ranks, timeout=100)
        assert not left
        assert process.wait(100) == (1 if target.startswith("rank") else -signal.SIGUSR1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert [file.name for file in tmp_path.glob("written_*")] == ["written_0"]
    # torch's spawn interrupts the ranks when their parent has died, which may come first.
    signals = {"parent": {"SIGINT"}, "rank 1": {"SIGUSR1"}, "all": {"SIGUSR1", "SIGINT"}}[target]
    assert any(f"{name}: wrote" in output.read_text() for name in signals)


def test_signal_while_a_file_is_written_acts_afterwards() -> None:
    said: list[str] = []
    interruption = Interruption(lambda: "saved", said.append)

    def write() -> None:
        with interruption.watched(), interruption.deferred():
            signal.raise_signal(signal.SIGINT)
            said.append("written")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert said == ["written", "SIGINT: saved"]


def test_process_ends_although_the_state_cannot_be_saved() -> None:
    said: list[str] = []

    def save() -> str:
        raise RuntimeError("unexpected pos")

    with pytest.raises(KeyboardInterrupt), Interruption(save, said.append).watched():
        signal.raise_signal(signal.SIGINT)
    assert said == ["SIGINT: cannot save the state: unexpected pos; continue from an older one with --c"]
