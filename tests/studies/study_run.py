"""Studies run by the command in processes that tests may kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import yaml

from nnunet_cpr.studies.study import Study
from nnunet_cpr.studies.study_file import load
from tests.helpers.workspace import PLANS, Workspace

COMMAND = [sys.executable, "-c", "from nnunet_cpr.cli import main; main()"]


class StudyRun:
    """Study on the tests' small data set, run by the command as users do."""

    def __init__(self, space: Workspace, name: str, trainers: list[str], folds: list[int]) -> None:
        self.space = space
        self.file = space.folder / f"{name}.yaml"
        self.logs = space.folder / "nnUNet_results" / "studies" / name / "logs"
        content = {"datasets": space.dataset, "plans": PLANS, "folds": folds, "trainers": trainers}
        self.file.write_text(yaml.safe_dump(content))
        self.environment = dict(space.environment)

    def study(self) -> Study:
        return load(str(self.file))

    def start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, "study", "run", str(self.file), *options],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, preexec_fn=_interruptible,
        )  # fmt: skip

    def run(self, *options: str, status: int = 0) -> str:
        process = self.start(*options)
        out, err = process.communicate(timeout=900)
        assert process.returncode == status, out + err
        return out + err

    def command(self, name: str, *options: str) -> str:
        done = subprocess.run(
            [*COMMAND, "study", name, str(self.file), *options],
            env=self.environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def trainings(self) -> list[int]:
        """Return the numbers of all nnU-Net processes that work in this test's folder."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            command, variables = process.info["cmdline"], process.info["environ"]
            if "nnUNetv2_train" in str(command) and str(self.space.folder) in str(variables):
                found.append(process.pid)
        return found

    def kill_everything(self, process: subprocess.Popen[str]) -> None:
        """Kill the command and all trainings, as a power cut would."""
        os.killpg(process.pid, signal.SIGKILL)  # the command, submitit's controller and its worker
        for number in self.trainings():
            os.kill(number, signal.SIGKILL)
        process.wait()


def wait_for(
    what: Callable[[], Any], process: subprocess.Popen[str] | None = None, seconds: float = 900
) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.1)


def _interruptible() -> None:
    """Enable SIGINT, which shells ignore for commands in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
