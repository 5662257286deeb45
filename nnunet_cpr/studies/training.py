"""What a job of a study does: train one cell through nnU-Net's own command, then validate it."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import submitit

from nnunet_cpr._files import atomic_write, read_json
from nnunet_cpr.nnunet.commands import CommandFailed, last_lines, run
from nnunet_cpr.nnunet.fold_files import RESOURCES, measurement
from nnunet_cpr.studies.definition import Cell
from nnunet_cpr.studies.state import (
    Places,
    at_work,
    is_whole,
    note_process,
    validation_dice,
    write_json,
)

_SECONDS_BETWEEN_LOOKS = 10.0  # at the GPU's memory


@dataclass
class Training:
    """One cell; submitit sends it to where it runs and calls it there.

    Attributes:
        device: nnU-Net's ``-device``; None takes a GPU where there is one.
        environment: variables to set where it runs.
        options: further ones of ``nnUNetv2_train``.
    """

    cell: Cell
    places: Places
    device: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def __call__(self) -> str:
        """Train, or go on where an earlier attempt was stopped.

        Returns:
            One word on how it went: "done", or "busy" where another process is at work on it.

        Raises:
            CommandFailed: nnU-Net failed; the end of its log is kept for ``study status``.
            OSError: a file cannot be written; that is kept, too, if it can be.
        """
        with at_work(self.cell, self.places) as ours:
            if not ours:
                return "busy"
            self.places.failure(self.cell).unlink(missing_ok=True)
            try:
                self._train_and_validate()
            except CommandFailed as error:
                log = self.places.log(self.cell)
                lines = last_lines(log, 5) if log.exists() else []
                self._note_failure([*lines, str(error).split(": ")[0]])
                raise
            except OSError as error:
                self._note_failure([str(error)])
                raise
            return "done"

    def _note_failure(self, lines: list[str]) -> None:
        failure = self.places.failure(self.cell)
        failure.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(failure) as temporary:
            temporary.write_text("\n".join(lines) + "\n")

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """What Slurm shall run when the time is over: the same again, from nnU-Net's checkpoint."""
        return submitit.helpers.DelayedSubmission(self)

    def _train_and_validate(self) -> None:
        fold = self.cell.folder(self.places.results)
        drop_broken_checkpoints(fold)
        if not (fold / "checkpoint_final.pth").exists():
            self._nnunet("--c")  # from the start where there is no checkpoint
        if validation_dice(fold) is None:
            self._nnunet("--val")
        if validation_dice(fold) is None:
            log = self.places.log(self.cell)
            raise CommandFailed(
                f"nnUNetv2_train left no {fold / 'validation' / 'summary.json'}, see {log}"
            )

    def command(self, option: str) -> list[str]:
        """The command that trains (``--c``) or validates (``--val``)."""
        cell = self.cell
        return [
            *("nnUNetv2_train", cell.dataset, cell.configuration, str(cell.fold), option),
            *("-tr", cell.trainer, "-p", cell.plans, "-device", self.device or _device()),
            *self.options,
        ]

    def _nnunet(self, option: str) -> None:
        cell = self.cell
        environment = {**os.environ, **self.environment}
        usage = _Usage(cell.folder(self.places.results), environment)

        def on_start(pid: int) -> None:
            note_process(cell, self.places, pid)
            usage.watch(pid)

        log = self.places.log(cell)
        if log.exists():  # of an earlier attempt
            os.replace(log, log.with_suffix(".before.log"))
        try:
            run(
                self.command(option),
                log,
                environment,
                on_wait=usage.look,
                on_start=on_start,
            )
        finally:
            usage.write()


def drop_broken_checkpoints(fold: Path) -> None:
    """Remove what nnU-Net was writing when it was stopped, which it could not load."""
    for name in ("checkpoint_final.pth", "checkpoint_latest.pth", "checkpoint_best.pth"):
        path = fold / name
        if path.exists() and not is_whole(path):
            path.unlink()


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


class _Usage:
    """Seconds and peak memory of a cell, over all attempts."""

    def __init__(self, fold: Path, environment: Mapping[str, str]) -> None:
        self._path = fold / RESOURCES
        self._start = time.monotonic()
        self._smi = shutil.which("nvidia-smi", path=environment.get("PATH"))
        self._next_look = 0.0
        self._group = 0
        self._gpu_bytes: int | None = None

    def watch(self, pid: int) -> None:
        """Look at the processes of this group."""
        self._group = pid

    def look(self) -> None:
        """At the GPU's memory, now and then."""
        if self._smi is None or not self._group or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS
        query = ["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        answer = subprocess.run([self._smi, *query], capture_output=True, text=True, check=False)
        used = 0
        for line in answer.stdout.splitlines():
            pid, _, mebibytes = line.partition(",")
            if pid.strip().isdigit() and mebibytes.strip().isdigit() and self._is_ours(int(pid)):
                used += int(mebibytes) * 2**20
        if used:
            self._gpu_bytes = max(used, self._gpu_bytes or 0)

    def _is_ours(self, pid: int) -> bool:
        try:
            return os.getpgid(pid) == self._group
        except ProcessLookupError:
            return False

    def write(self) -> None:
        """Add this attempt to what the file says of earlier ones."""
        unit = 1 if sys.platform == "darwin" else 1024
        before = self._before()
        known = [n for n in (before.get("peak_gpu_memory_bytes"), self._gpu_bytes) if n]
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
        write_json(
            self._path,
            {
                "seconds": before.get("seconds", 0.0) + time.monotonic() - self._start,
                "peak_memory_bytes": max(peak, before.get("peak_memory_bytes", 0)),
                "peak_gpu_memory_bytes": max(known) if known else None,
            },
        )

    def _before(self) -> dict[str, float]:
        """Return the numbers of earlier attempts; those that cannot be used are left out."""
        try:
            entries = dict(read_json(self._path))
        except (OSError, ValueError, TypeError):
            return {}
        numbers = {key: measurement(value) for key, value in entries.items()}
        return {key: number for key, number in numbers.items() if number is not None}
