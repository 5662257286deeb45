"""Work of one job: train a run with nnU-Net's own command, then validate it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import submitit

from nnunet_cpr._files import atomic_write
from nnunet_cpr.nnunet import commands
from nnunet_cpr.nnunet.commands import CommandFailed, last_lines
from nnunet_cpr.nnunet.fold_files import CHECKPOINTS, FINAL_CHECKPOINT, is_complete_checkpoint
from nnunet_cpr.studies.definition import Run
from nnunet_cpr.studies.resource_usage import ResourceUsage
from nnunet_cpr.studies.run_state import (
    StudyPaths,
    claim,
    record_process,
    validation_dice,
)


@dataclass
class Worker:
    """Callable that trains and validates one run; an executor sends it to a job.

    Attributes:
        run: the run.
        paths: the study's folders.
        device: nnU-Net's ``-device``; None selects a GPU if there is one.
        environment: environment variables to set for nnU-Net.
        options: further options of ``nnUNetv2_train``.
    """

    run: Run
    paths: StudyPaths
    device: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def __call__(self) -> str:
        """Train, or continue an earlier attempt, and validate.

        Returns:
            "done", or "busy" if another process works on the run.

        Raises:
            CommandFailed: nnU-Net failed; the end of its log is kept for ``study status``.
            OSError: a file cannot be written; the error is kept as well if possible.
        """
        with claim(self.run, self.paths) as claimed:
            if not claimed:
                return "busy"
            self.paths.failure(self.run).unlink(missing_ok=True)
            try:
                self._train_and_validate()
            except CommandFailed as error:
                log = self.paths.log(self.run)
                lines = last_lines(log, 5) if log.exists() else []
                self._record_failure([*lines, str(error).split(": ")[0]])
                raise
            except OSError as error:
                self._record_failure([str(error)])
                raise
            return "done"

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Return the job to submit at the time limit; submitit calls the method by this name."""
        return submitit.helpers.DelayedSubmission(self)

    def command(self, option: str) -> list[str]:
        """Return the command that trains (``--c``) or validates (``--val``)."""
        run = self.run
        return [
            *("nnUNetv2_train", run.dataset, run.configuration, str(run.fold), option),
            *("-tr", run.trainer, "-p", run.plans, "-device", self.nnunet_device()),
            *self.options,
        ]

    def nnunet_device(self) -> str:
        """Return nnU-Net's ``-device``."""
        return self.device or _default_device()

    def _train_and_validate(self) -> None:
        fold = self.run.folder(self.paths.results)
        remove_incomplete_checkpoints(fold)
        if not (fold / FINAL_CHECKPOINT).exists():
            self._run_nnunet("--c")  # starts from scratch if there is no checkpoint
        if validation_dice(fold) is None:
            self._run_nnunet("--val")
        if validation_dice(fold) is None:
            raise CommandFailed(
                f"nnUNetv2_train: expected {fold / 'validation' / 'summary.json'}, got none; "
                f"see {self.paths.log(self.run)}"
            )

    def _run_nnunet(self, option: str) -> None:
        usage = ResourceUsage(self.run.folder(self.paths.results))
        training = 0

        def on_start(pid: int) -> None:
            nonlocal training
            training = pid
            record_process(self.run, self.paths, pid)

        log = self.paths.log(self.run)
        if log.exists():
            os.replace(log, log.with_suffix(".before.log"))
        try:
            commands.run(
                self.command(option),
                log,
                {**os.environ, **self.environment},
                on_wait=lambda: usage.measure(training),
                on_start=on_start,
            )
        finally:
            usage.save()

    def _record_failure(self, lines: list[str]) -> None:
        failure = self.paths.failure(self.run)
        failure.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(failure) as temporary:
            temporary.write_text("\n".join(lines) + "\n")


def remove_incomplete_checkpoints(fold: Path) -> None:
    """Remove checkpoints that nnU-Net was writing when it was stopped and could not load."""
    for name in CHECKPOINTS:
        path = fold / name
        if path.exists() and not is_complete_checkpoint(path):
            path.unlink()


def _default_device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
