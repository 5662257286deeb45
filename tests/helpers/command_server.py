"""nnU-Net's commands in processes that need not import nnU-Net again.

A process that has imported nnU-Net forks for every command. The fork runs the function that the
installed command calls, with its arguments and environment, and signals reach it as a command.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.helpers import ROOT

ENTRIES = {
    "nnUNetv2_train": "nnunetv2.run.run_training:run_training_entry",
    "nnUNetv2_predict": "nnunetv2.inference.predict_from_raw_data:predict_entry_point",
}
PATIENCE = 300  # seconds


class CommandServer:
    """Process that starts commands.

    Args:
        prepare: function, given as ``module:name``, that each command's process calls first.
    """

    def __init__(self, prepare: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, prepare],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def start(self, arguments: list[str], environment: Mapping[str, str], log: Path) -> int:
        """Start a command and return its process number."""
        started: int = self._ask(arguments=arguments, environment=dict(environment), log=str(log))
        return started

    def wait(self, number: int) -> int:
        """Return the exit status of a command, negative for a signal."""
        end = time.monotonic() + PATIENCE
        while (status := self._ask(wait=number)) is None:
            assert time.monotonic() < end, "the command hangs"
            time.sleep(0.02)
        return int(status)

    def run(self, arguments: list[str], environment: Mapping[str, str], log: Path) -> int:
        """Run a command and return its exit status."""
        return self.wait(self.start(arguments, environment, log))

    def run_and_kill(
        self, arguments: list[str], environment: Mapping[str, str], log: Path, text: str
    ) -> None:
        """Start a command and send SIGKILL once a text is in its output."""
        number = self.start(arguments, environment, log)
        end = time.monotonic() + PATIENCE
        while text not in log.read_text():
            assert self._ask(wait=number) is None, log.read_text()[-3000:]
            assert time.monotonic() < end, "the command hangs"
            time.sleep(0.01)
        os.kill(number, signal.SIGKILL)
        assert self.wait(number) == -signal.SIGKILL

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _serve(prepare: str) -> None:
    functions = {name: _import(entry) for name, entry in ENTRIES.items()}
    before = _import(prepare)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            ended, status = os.waitpid(question["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            answer = _fork(functions[question["arguments"][0]], before, question)
        print(json.dumps(answer), file=answers, flush=True)


def _fork(function: Callable[[], None], before: Callable[[], None], question: dict[str, Any]) -> int:
    log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    number = os.fork()
    if number:
        os.close(log)
        return number
    status = 1
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(question["environment"])
        sys.argv = question["arguments"]
        before()
        function()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _import(entry: str) -> Callable[[], None]:
    module, name = entry.split(":")
    found: Callable[[], None] = getattr(importlib.import_module(module), name)
    return found


if __name__ == "__main__":
    _serve(sys.argv[1])
