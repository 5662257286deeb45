"""Saving, ending and continuing of a training, by one policy."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.file_path_utilities import get_output_folder
from torch import distributed

from nnunet_cpr.files import remove_temporary_files
from nnunet_cpr.nnunet import checkpoints, processes
from nnunet_cpr.nnunet.checkpoint_policy import FINISHED, STARTED, CheckpointPolicy, start_of
from nnunet_cpr.nnunet.checkpoints import START_ANEW
from nnunet_cpr.nnunet.fold_files import BEST_CHECKPOINT, FINAL_CHECKPOINT, LATEST_CHECKPOINT
from nnunet_cpr.nnunet.is_finished import find_validation
from nnunet_cpr.nnunet.parts.part import Part
from nnunet_cpr.nnunet.processes import Interruption
from nnunet_cpr.nnunet.run_record import read_record
from nnunet_cpr.refusals import Refusal, counted, one_line


class _NoLog:
    """nnU-Net's logger for a checkpoint without what was logged."""

    get_checkpoint = dict


class Finished(Exception):
    """End of a training before the number of epochs in its name."""


def is_validated(fold: Path) -> bool:
    """Return True if the training of a fold was validated, not an earlier one."""
    record = read_record(fold)
    return bool(record.validated) if record is not None else find_validation(fold) is not None


class Saves(Part):
    """Saves, signals and ``--c``: a training loses at most the save interval and an epoch.

    :class:`CheckpointPolicy` decides what is saved when, and what ``--c`` continues from;
    :class:`Interruption` ends the training at a signal, and :func:`processes.claimed` keeps other
    processes out of the fold's folder.

    Attributes:
        continues: True if nnU-Net's command was given ``--c``.
        has_started: True once the training has begun in this process.
        has_ended: True once it has ended.
        policy: policy of what is saved when.
    """

    policy: CheckpointPolicy
    has_started = has_ended = False
    _created: Sequence[Path] = ()

    def before(self, arguments: dict[str, Any]) -> None:
        # nnU-Net's command for --c; its trainer removes the entry.
        plans = arguments["plans"]
        self.continues: bool = plans.get("continue_training", False)
        configuration, fold = arguments["configuration"], arguments["fold"]
        folder = get_output_folder(
            plans["dataset_name"], self.name, plans["plans_name"], configuration, fold
        )
        fold = Path(folder)
        self._created = [each for each in (fold, *fold.parents) if not each.exists()]
        # Before nnU-Net's loggers, which write there and remove files of earlier trainings.
        processes.refuse_if_claimed(fold)
        before = read_record(fold)
        try:
            self.policy = CheckpointPolicy(self.warn, None if before is None else before.started)
        except ValueError as error:
            raise Refusal(str(error)) from error
        self._interruption = Interruption(lambda: self.policy.end(), self.warn)

    def begin(self) -> None:
        self.trainer.my_init_kwargs[STARTED] = self.policy.started

    def remove_folders(self) -> None:
        """Remove the folders that a refused start has created, if they hold at most its log."""
        if self.has_started or not self._created:
            return
        log = Path(getattr(self.trainer, "log_file", ""))
        if [path.name for path in self._created[0].glob("*")] == [log.name]:
            log.unlink()
        for folder in self._created:
            with suppress(OSError):  # it holds something
                folder.rmdir()

    @property
    def _folder(self) -> Path:
        return Path(self.trainer.output_folder)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Claim the fold's folder and end at a signal while the training runs."""
        is_first = self.trainer.local_rank == 0
        claim = processes.claimed(self._folder) if is_first else nullcontext()
        try:
            with self._interruption.watched(), claim:
                yield
                if is_first:
                    processes.withdraw_request(self._folder)
        except SystemExit:
            if is_first:
                self.remove_folders()
            raise

    def check(self) -> None:
        latest, best = self._folder / LATEST_CHECKPOINT, self._folder / BEST_CHECKPOINT
        is_finished = (self._folder / FINAL_CHECKPOINT).exists()
        interrupted = latest if latest.exists() or is_finished else best
        if self.trainer.disable_checkpointing and interrupted.exists():
            raise Refusal(
                f"--disable_checkpointing: would remove {interrupted} of an interrupted training",
                "continue that with --c and without the option, or move it away",
            )

    def start(self) -> None:
        self.has_started = True
        if self.trainer.local_rank == 0:
            remove_temporary_files(self._folder, "cpr_*", "checkpoint_*", "nnunet_cpr_*")
            if self.trainer.current_epoch == 0:
                processes.withdraw_request(self._folder)
        self.policy.begin(self._folder, writes=not self.trainer.disable_checkpointing)

    def end(self) -> None:
        self.has_ended = True

    def start_epoch(self) -> None:
        trainer = self.trainer
        # One that was finished is only validated, if that was interrupted.
        is_finished = trainer.my_init_kwargs.get(FINISHED) == trainer.current_epoch
        if trainer.current_epoch > 0 and (is_finished or self._is_finish_requested()):
            trainer.my_init_kwargs[FINISHED] = trainer.current_epoch
            self.parts.record.note_finish()
            self.log(
                f"Finished after {trainer.current_epoch} of {trainer.num_epochs} epochs by "
                "nnunet-cpr finish"
            )
            raise Finished
        # Before anything of the epoch, so that a training that is continued here does the same.
        if trainer.local_rank == 0 and self._saves_as_nnunet:
            self.keep_start_of_epoch()

    def _is_finish_requested(self) -> bool:
        answer = [self.trainer.local_rank == 0 and processes.is_finish_requested(self._folder)]
        if self.trainer.is_ddp:
            distributed.broadcast_object_list(answer)
        return answer[0]

    @property
    def _saves_as_nnunet(self) -> bool:
        """True if nnU-Net's own method saves; those of other trainers may write several files."""
        is_nnunets = type(self.trainer).save_checkpoint is nnUNetTrainer.save_checkpoint
        return is_nnunets and not self.trainer.disable_checkpointing

    def keep_start_of_epoch(self) -> None:
        """Copy the state to memory, and write it if the save interval has passed."""
        trainer, logger = self.trainer, self.trainer.logger
        trainer.logger = _NoLog()  # thousands of numbers, which are slow to pickle
        trainer.current_epoch -= 1  # nnU-Net stores the next epoch; its on_train_end does the same
        try:
            with (
                self.parts.average.bound(),
                self._interruption.deferred(),
                self._refused_if_not_written(),
            ):
                self.policy.start_epoch(
                    lambda file: nnUNetTrainer.save_checkpoint(trainer, file),
                    trainer.current_epoch + 1,
                    logger.get_checkpoint(),
                )
        finally:
            trainer.logger = logger
            trainer.current_epoch += 1

    def save(self, method: Callable[[Any], Any], filename: str) -> Any:
        """Save to a file that nnU-Net has chosen, by the policy if nnU-Net's own method does it."""
        result = None
        if self.trainer.local_rank != 0 or not self._saves_as_nnunet:
            result = method(filename)
        else:
            with self._interruption.deferred(), self._refused_if_not_written():
                self.policy.save(Path(filename), method, self.trainer.current_epoch + 1)
        self.parts.record.note_checkpoint(Path(filename).name)
        return result

    @contextmanager
    def _refused_if_not_written(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch's writer does not say what failed
            raise Refusal(
                f"cannot write a checkpoint in {self._folder}, is the disk full? Continue with --c "
                f"({one_line(error)})"
            ) from error

    def load(self, method: Callable[[Any], Any], given: Any) -> Any:
        """Load the checkpoint that nnU-Net has chosen, or with ``--c`` the newest one.

        Args:
            method: loads a file, or its content.
            given: file or content.

        Raises:
            Refusal: it is of another training, or cannot be read.
        """
        if not self.trainer.was_initialized:
            self.trainer.initialize()
        path = Path(given) if isinstance(given, str) else self._folder / FINAL_CHECKPOINT
        try:
            path, checkpoint = self._read(path, given)
            for part in self.parts:
                part.continue_as_begun(checkpoint["init_args"])
            for part in self.parts:
                for difference in part.differences(checkpoint):
                    written_by = f"was written by {checkpoint['trainer_name']}"
                    expected = f"expected {self.name}: {difference}"
                    raise Refusal(f"{path} {written_by}, {expected}", START_ANEW)
            # What has been read without executing code can be read by any trainer's method, which may
            # read other files as well, and this one with torch's default.
            is_file = isinstance(given, str) or self.continues
            with torch.serialization.safe_globals([*checkpoints.SAFE_GLOBALS]):
                result = method(str(path) if is_file else given)
            for part in self.parts:
                part.restore(checkpoint)
        except Refusal:
            raise
        except Exception as error:  # of another network, or crafted
            self.trainer.print_to_log_file(traceback.format_exc(), also_print_to_console=False)
            raise Refusal(
                f"{path} does not match this training: {one_line(error)}", START_ANEW
            ) from error
        self.policy.started = start_of(checkpoint) or self.policy.started
        self.trainer.my_init_kwargs[STARTED] = self.policy.started  # nnU-Net takes those of the file
        if isinstance(given, str):
            self.parts.record.note_checkpoint(path.name)
        written_by = checkpoint["trainer_name"]
        if written_by != self.name:
            self.warn(f"continuing {path}, which was written by {written_by}")
        return result

    def _read(self, path: Path, given: Any) -> tuple[Path, dict[str, Any]]:
        if not self.continues or self.has_started:
            return path, given if isinstance(given, dict) else checkpoints.read(path)
        path, checkpoint = self.policy.continue_from(path)
        epochs = checkpoint["init_args"].get(FINISHED)
        if epochs is not None and is_validated(path.parent):
            raise Refusal(
                f"{path} was finished after {counted(epochs, 'epoch')}; to train longer: nnunet-cpr "
                f"extend {path.parents[1]} --epochs <N>",
                "to validate it, give --val in place of --c",
            )
        return path, checkpoint

    def differences(self, checkpoint: dict[str, Any]) -> Iterator[str]:
        own, saved = self.trainer.my_init_kwargs, checkpoint["init_args"]
        for key in ("configuration", "fold"):
            if own.get(key) != saved.get(key):
                yield f"{key}: expected {own.get(key)}, got {saved.get(key)}"
