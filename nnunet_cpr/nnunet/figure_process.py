"""Drawing of a training's figures in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

INTERVAL = 60.0
"""Seconds between the starts of two processes; each takes some seconds of processor time."""

_TIMEOUT = 300.0  # seconds after which a process that hangs is killed
_GRACE = 5.0  # seconds that a process has to remove its temporary files
_IDLE = getattr(subprocess, "IDLE_PRIORITY_CLASS", 0)  # on Windows
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class FigureProcess:
    """Process that draws ``progress.png`` and ``cpr_progress.png`` while the training goes on.

    It has the lowest priority, except at the end of the training, which waits for it. It ends by itself,
    also if the training is killed, and there is never more than one. It reads ``cpr_history.csv`` and
    the values of nnU-Net's logger.

    Args:
        folder: the folder of a fold.
        warn: called with one line for each figure that could not be drawn.
        interval: seconds between the starts of two processes, and before the first one.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None], interval: float = INTERVAL) -> None:
        self._folder = folder.absolute()
        self._warn = warn
        self._interval = interval
        self._last_start = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def draw(self, logged: Mapping[str, Any]) -> None:
        """Start a process, unless one is running or the last one was started a short time ago.

        Args:
            logged: values of nnU-Net's local logger, lists of numbers by key.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self._report()
        if time.monotonic() - self._last_start >= self._interval:
            self._start(logged, lowest_priority=True)

    def finish(self, logged: Mapping[str, Any], timeout: float = _TIMEOUT) -> None:
        """Draw the last state and wait for it.

        Args:
            logged: as in :meth:`draw`.
            timeout: seconds after which the process is killed.
        """
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()  # it draws an older state, and slowly
            self._wait(_GRACE)
            self._forget()
        self._report()
        self._start(logged, lowest_priority=False)
        if not self._wait(timeout):
            self._forget()
            self._warn(
                f"the progress was not drawn within {timeout:g} s; draw it with python -m "
                f"nnunet_cpr.nnunet.progress_figure {self._folder}"
            )
        self._report()

    def _start(self, logged: Mapping[str, Any], lowest_priority: bool) -> None:
        self._last_start = time.monotonic()
        try:
            # Files, since a full pipe would stop this process.
            with tempfile.TemporaryFile() as values:
                values.write(json.dumps(logged, default=_number).encode())
                values.seek(0)
                self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the process has ended)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "nnunet_cpr.nnunet.progress_figure", ".", "--nnunet"],
                    cwd=self._folder,  # also because Python searches it for modules
                    env={**os.environ, **dict.fromkeys(_THREADS, "1")},
                    stdin=values,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    creationflags=_IDLE if lowest_priority else 0,
                )
        except (OSError, TypeError, ValueError) as error:  # no process, or values that are no numbers
            self._warn(f"cannot draw the progress: {type(error).__name__}: {error}")
            return
        if lowest_priority and hasattr(os, "setpriority"):
            with suppress(OSError):  # it has ended already
                os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)

    def _wait(self, timeout: float) -> bool:
        """Return True if the process ended by itself, and end it otherwise."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def _forget(self) -> tuple[int, list[str]]:
        """Return the exit status and the errors of the process that has ended, and release it."""
        if self._process is None or self._errors is None:
            return 0, []
        with self._errors as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
        status, self._process, self._errors = self._process.returncode, None, None
        return status, lines

    def _report(self) -> None:
        """Warn of the errors of the process that has ended."""
        status, lines = self._forget()
        if status == 0:
            return
        failed = [line for line in lines if line.startswith("nnunet-cpr: ")]
        for line in failed:
            self._warn(line.removeprefix("nnunet-cpr: "))
        if not failed:
            last = f": {lines[-1]}" if lines else ""
            self._warn(f"cannot draw the progress: exit status {status}{last}")


def _number(value: Any) -> float:
    """Return a NumPy scalar as a float, for JSON."""
    return float(value)
