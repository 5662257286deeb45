"""nnU-Net's trainer whose training is saved, ended and continued by one policy."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.file_path_utilities import get_output_folder
from torch import distributed

from nnunet_cpr.files import remove_temporary_files
from nnunet_cpr.nnunet import checkpoints, processes
from nnunet_cpr.nnunet.checkpoint_policy import FINISHED, STARTED, CheckpointPolicy, start_of
from nnunet_cpr.nnunet.checkpoints import START_ANEW
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT, LATEST_CHECKPOINT
from nnunet_cpr.nnunet.guarded_trainer import GuardedTrainer
from nnunet_cpr.nnunet.is_finished import find_validation
from nnunet_cpr.nnunet.processes import Interruption
from nnunet_cpr.nnunet.run_record import read_record
from nnunet_cpr.refusals import Refusal, one_line


class _NoLog:
    """nnU-Net's logger for a checkpoint without what was logged."""

    get_checkpoint = dict


class _Finished(Exception):
    """End of a training before the number of epochs in its name."""


def _is_validated(fold: Path) -> bool:
    """Return True if the training of a fold was validated, not an earlier one."""
    record = read_record(fold)
    return bool(record.validated) if record is not None else find_validation(fold) is not None


class ResumingTrainer(GuardedTrainer):
    """nnU-Net's trainer that loses at most the save interval and an epoch.

    :class:`CheckpointPolicy` decides what is saved when, and what ``--c`` continues from;
    :class:`Interruption` ends the training at a signal, and :func:`claimed` keeps other processes out of
    the fold's folder. This class calls them where nnU-Net trains, saves and loads.
    """

    logger: Any

    def __init__(self, **arguments: Any) -> None:
        # nnU-Net's command for --c; its trainer removes the entry.
        plans = arguments["plans"]
        self.__continues: bool = plans.get("continue_training", False)
        configuration, fold = arguments["configuration"], arguments["fold"]
        folder = get_output_folder(
            plans["dataset_name"], type(self).__name__, plans["plans_name"], configuration, fold
        )
        try:  # before nnU-Net's loggers, which write there and remove files of earlier trainings
            processes.refuse_if_claimed(Path(folder))
        except Refusal as error:
            self._exit(str(error))
        super().__init__(**arguments)
        try:
            before = read_record(Path(folder))
            self.__policy = CheckpointPolicy(self._warn, None if before is None else before.started)
        except ValueError as error:
            self._exit(str(error))
        self.my_init_kwargs[STARTED] = self.__policy.started
        self.__interruption = Interruption(self.__policy.end, self._warn)

    @property
    def checkpoint_policy(self) -> CheckpointPolicy:
        """Policy of what is saved when, and of what ``--c`` continues from."""
        return self.__policy

    @property
    def continues(self) -> bool:
        """True if nnU-Net's command was given ``--c``."""
        return self.__continues

    def run_training(self) -> None:
        latest = Path(self.output_folder) / LATEST_CHECKPOINT
        if self.disable_checkpointing and latest.exists():
            self._exit(
                f"--disable_checkpointing: would remove {latest} of an interrupted training; continue "
                "that with --c and without the option, or move it away"
            )
        claim = processes.claimed(Path(self.output_folder)) if self.local_rank == 0 else nullcontext()
        try:
            with self.__interruption.watched(), claim:
                try:
                    super().run_training()
                except _Finished:
                    self.on_train_end()
                if self.local_rank == 0:
                    processes.withdraw_request(Path(self.output_folder))
        except Refusal as error:
            self._exit(str(error))

    def on_train_start(self) -> None:
        folder = Path(self.output_folder)
        super().on_train_start()
        if self.local_rank == 0:
            remove_temporary_files(folder, "cpr_*", "checkpoint_*", "nnunet_cpr_*")
            if self.current_epoch == 0:
                processes.withdraw_request(folder)
        self.__policy.begin(folder, writes=not self.disable_checkpointing)

    def on_epoch_start(self) -> None:
        # One that was finished is only validated, if that was interrupted.
        is_finished = self.my_init_kwargs.get(FINISHED) == self.current_epoch
        if self.current_epoch > 0 and (is_finished or self.__is_finish_requested()):
            self.my_init_kwargs[FINISHED] = self.current_epoch
            self._record_finish()
            self.print_to_log_file(
                f"Finished after {self.current_epoch} of {self.num_epochs} epochs by nnunet-cpr finish"
            )
            raise _Finished
        # Before anything of the epoch, so that a training that is continued here does the same.
        if self.local_rank == 0 and self.__saves_as_nnunet:
            self._keep_start_of_epoch()
        super().on_epoch_start()

    def _record_finish(self) -> None:
        """Record that the training ends before the number of epochs in its name."""

    def __is_finish_requested(self) -> bool:
        answer = [self.local_rank == 0 and processes.is_finish_requested(Path(self.output_folder))]
        if self.is_ddp:
            distributed.broadcast_object_list(answer)
        return answer[0]

    @property
    def __saves_as_nnunet(self) -> bool:
        """True if nnU-Net's own method saves; those of other trainers may write several files."""
        is_own = type(self).save_checkpoint is ResumingTrainer.save_checkpoint
        is_nnunets = self.other_trainer().save_checkpoint is nnUNetTrainer.save_checkpoint
        return is_own and is_nnunets and not self.disable_checkpointing

    def _keep_start_of_epoch(self) -> None:
        logger, self.logger = self.logger, _NoLog()  # thousands of numbers, which are slow to pickle
        self.current_epoch -= 1  # nnU-Net stores the next epoch; its on_train_end does the same
        try:
            with self.__interruption.deferred(), self.__exit_if_not_written():
                self.__policy.start_epoch(
                    super().save_checkpoint, self.current_epoch + 1, logger.get_checkpoint()
                )
        finally:
            self.logger = logger
            self.current_epoch += 1

    def save_checkpoint(self, filename: str) -> None:
        if self.local_rank != 0 or not self.__saves_as_nnunet:
            super().save_checkpoint(filename)
            return
        with self.__interruption.deferred(), self.__exit_if_not_written():
            self.__policy.save(Path(filename), super().save_checkpoint, self.current_epoch + 1)

    @contextmanager
    def __exit_if_not_written(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch's writer does not say what failed
            self._exit(
                f"cannot write a checkpoint in {self.output_folder}, is the disk full? "
                f"Continue with --c ({one_line(error)})"
            )

    def load_checkpoint(
        self, filename_or_checkpoint: str | dict[str, Any] | None = None, **renamed: Any
    ) -> None:
        # The main branch of nnU-Net gives the argument another name, or the content in its place.
        given = next(iter(renamed.values()), filename_or_checkpoint)
        if not self.was_initialized:
            self.initialize()
        path = Path(given) if isinstance(given, str) else Path(self.output_folder) / FINAL_CHECKPOINT
        try:
            if self.__continues:
                path, checkpoint = self.__policy.continue_from(path)
                given = str(path)
                epochs = checkpoint["init_args"].get(FINISHED)
                if epochs is not None and _is_validated(path.parent):
                    raise Refusal(
                        f"{path} was finished after {epochs} epochs; to train longer: nnunet-cpr "
                        f"extend {path.parents[1]} --epochs <N>",
                        "to validate it, give --val in place of --c",
                    )
            else:
                checkpoint = given if isinstance(given, dict) else checkpoints.read(path)
            self._continue_as_begun(checkpoint["init_args"])
            for difference in self._differences(checkpoint):
                written_by = f"was written by {checkpoint['trainer_name']}"
                expected = f"expected {type(self).__name__}: {difference}"
                raise Refusal(f"{path} {written_by}, {expected}", f"{START_ANEW}")
            with checkpoints.restricted_loading():
                super().load_checkpoint(given)
            self._restore(checkpoint)
        except Refusal as error:
            self._exit(str(error))
        except Exception as error:  # of another network, or crafted
            self.print_to_log_file(traceback.format_exc(), also_print_to_console=False)
            reason = one_line(error)
            self._exit(f"{path} does not match this training: {reason}; {START_ANEW}")
        self.__policy.started = start_of(checkpoint) or self.__policy.started
        self.my_init_kwargs[STARTED] = self.__policy.started  # nnU-Net takes those of the file
        written_by = checkpoint["trainer_name"]
        if written_by != type(self).__name__:
            self._warn(f"continuing {path}, which was written by {written_by}")

    def _continue_as_begun(self, arguments: dict[str, Any]) -> None:
        """Take over from ``init_args`` of a checkpoint how its training began, before it is loaded."""

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        """Load what nnU-Net does not know of."""

    def _differences(self, checkpoint: dict[str, Any]) -> Iterator[str]:
        """Yield each difference between this training and that of a checkpoint."""
        own, saved = self.my_init_kwargs, checkpoint["init_args"]
        for key in ("configuration", "fold"):
            if own.get(key) != saved.get(key):
                yield f"{key}: expected {own.get(key)}, got {saved.get(key)}"
