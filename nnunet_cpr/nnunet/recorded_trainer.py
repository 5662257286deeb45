"""nnU-Net's trainer that records what its run is made from, and continues no other one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.nnunet import run_record
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT, PRETRAINED
from nnunet_cpr.nnunet.pretrained import PretrainedWeightsTrainer
from nnunet_cpr.nnunet.run_record import RunRecord
from nnunet_cpr.nnunet.seen_cases import describe_origin


class RecordedTrainer(PretrainedWeightsTrainer):
    """nnU-Net's trainer that records what its run is made from, and continues no other one.

    The record is written when a training begins, and with ``--c`` it is compared: it is another training
    where more than the number of epochs differs.
    """

    __plans: dict[str, Any]
    __split: dict[str, list[str]]
    __loaded = FINAL_CHECKPOINT

    def __init__(self, **arguments: Any) -> None:
        plans, configuration = arguments["plans"], arguments["configuration"]
        self.__plans, self.__split = {}, {}
        with suppress(LookupError):  # nnU-Net refuses a configuration that the plans do not have
            # Other trainers change the plans in memory, here or later.
            self.__plans = copy.deepcopy(run_record.configuration_of(plans, configuration))
        super().__init__(**arguments)

    def do_split(self) -> tuple[list[str], list[str]]:
        """Return the ids of the cases that are trained on, and of those that are validated."""
        train, val = super().do_split()
        self.__split = {"train": sorted(train), "val": sorted(val)}
        return train, val

    @property
    def run_record(self) -> RunRecord:
        """Record of what this run is made from, as far as it is known by now."""
        weights = self.my_init_kwargs.get(PRETRAINED, {})
        if weights:
            weights = describe_origin(
                Path(weights["path"]),
                weights["sha256"],
                self.plans_manager.dataset_name,
                self.__split.get("val", ()),
            )
        return run_record.new_record(
            type(self).__name__,
            dataset=self.plans_manager.dataset_name,
            training=self.training.plain(),
            plans=json.loads(json.dumps(self.__plans)),  # as a file has them
            split=self.__split,
            weights=weights,
            started=self.checkpoint_policy.started,
        )

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.local_rank != 0 or self.disable_checkpointing or self.current_epoch > 0:
            return
        record = self.run_record
        if cases := record.leaked:
            self._warn(
                f"the pretrained weights were trained on {len(cases)} of the {len(self.__split['val'])} "
                f"validation cases of this fold, such as {cases[0]}: its Dice says nothing of new cases"
            )
        for problem in run_record.split_problems(record.split):
            if self.fold != "all":
                self._warn(problem)
        try:
            record.write(Path(self.output_folder))
        except OSError as error:
            self._exit(f"cannot write {error.filename}: {error.strerror}")

    def on_train_end(self) -> None:
        super().on_train_end()
        self.__loaded = FINAL_CHECKPOINT

    def load_checkpoint(self, *arguments: Any, **named: Any) -> None:
        super().load_checkpoint(*arguments, **named)
        if isinstance(path := next(iter((*arguments, *named.values())), None), str):
            self.__loaded = Path(path).name

    def _record_finish(self) -> None:
        fold = Path(self.output_folder)
        if self.local_rank == 0 and (record := run_record.read_record(fold)):
            record.changed(fold, finished_after=self.current_epoch)

    def perform_actual_validation(self, *arguments: Any, **named: Any) -> None:
        super().perform_actual_validation(*arguments, **named)
        fold = Path(self.output_folder)
        record = run_record.read_record(fold) if self.local_rank == 0 else None
        # Not of the checkpoint of an earlier training, which may be beside those of this one.
        if record is not None and record.started == self.checkpoint_policy.started:
            validated = {"checkpoint": self.__loaded, "epochs": self.current_epoch}
            record.changed(fold, validated=validated)

    def _record_differences(self, checkpoint: dict[str, Any]) -> Iterator[str]:
        """Yield what the run of a checkpoint is made from that this one is not."""
        before = run_record.read_record(Path(self.output_folder))
        if before is None:
            before = RunRecord(training=self.__training_of_version_0_3(checkpoint))
        may_change = self._may_change
        training = {key: value for key, value in before.training.items() if key not in may_change}
        own = self.run_record
        now = RunRecord(training=own.training, plans=own.plans)
        yield from now.differences(RunRecord(training=training, plans=before.plans))

    def __training_of_version_0_3(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return what the name of a checkpoint's trainer says, if it is another one of this package."""
        written_by = checkpoint["trainer_name"]
        with suppress(WrongName):  # of another package
            settings = None if written_by == type(self).__name__ else parse_trainer_name(written_by)
            if settings is not None:
                training = self.training_that_began_with(None, settings).plain()
                # The base values of that trainer are not known.
                return {key: training[key] for key in training if key not in ("lr", "weight_decay")}
        return {}
