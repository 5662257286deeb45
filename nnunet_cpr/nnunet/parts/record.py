"""Record of what a run is made from, which continues no other one."""

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
from nnunet_cpr.nnunet.checkpoint_policy import FINISHED
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT, PRETRAINED
from nnunet_cpr.nnunet.parts.part import Part
from nnunet_cpr.nnunet.run_record import RunRecord, read_record
from nnunet_cpr.nnunet.seen_cases import describe_origin
from nnunet_cpr.refusals import Refusal


class Record(Part):
    """Record of what the run is made from.

    It is written when a training begins, and with ``--c`` it is compared: it is another training where
    more than the number of epochs differs.
    """

    def before(self, arguments: dict[str, Any]) -> None:
        self._plans: dict[str, Any] = {}
        self._split: dict[str, list[str]] = {}
        self._loaded = FINAL_CHECKPOINT
        with suppress(LookupError):  # nnU-Net refuses a configuration that the plans do not have
            # Other trainers change the plans in memory, from here on.
            given = run_record.configuration_of(arguments["plans"], arguments["configuration"])
            self._plans = copy.deepcopy(given)

    def keep_split(self, train: list[str], val: list[str]) -> tuple[list[str], list[str]]:
        """Keep the ids of the cases that are trained on and validated, and return them."""
        self._split = {"train": sorted(train), "val": sorted(val)}
        return train, val

    def present(self) -> RunRecord:
        """Return the record of this run, as far as it is known by now."""
        trainer = self.trainer
        weights = trainer.my_init_kwargs.get(PRETRAINED, {})
        if weights:
            weights = describe_origin(
                Path(weights["path"]),
                weights["sha256"],
                trainer.plans_manager.dataset_name,
                self._split.get("val", ()),
            )
        return run_record.new_record(
            self.name,
            dataset=trainer.plans_manager.dataset_name,
            training=trainer.training.plain(),
            plans=json.loads(json.dumps(self._plans)),  # as a file has them
            split=self._split,
            weights=weights,
            started=self.parts.saves.policy.started,
        )

    def start(self) -> None:
        trainer = self.trainer
        if trainer.local_rank != 0 or trainer.disable_checkpointing or trainer.current_epoch > 0:
            return
        record = self.present()
        if cases := record.leaked:
            self.warn(
                f"the pretrained weights were trained on {len(cases)} of the {len(self._split['val'])} "
                f"validation cases of this fold, such as {cases[0]}: its Dice says nothing of new cases"
            )
        for problem in run_record.split_problems(record.split):
            if trainer.fold != "all":
                self.warn(problem)
        try:
            record.write(Path(trainer.output_folder))
        except OSError as error:
            raise Refusal(f"cannot write {error.filename}: {error.strerror}") from error

    def note_checkpoint(self, name: str) -> None:
        """Note the name of the checkpoint whose weights the network has."""
        self._loaded = name

    def note_finish(self) -> None:
        """Record that the training ends before the number of epochs in its name."""
        fold = Path(self.trainer.output_folder)
        if self.trainer.local_rank == 0 and (record := read_record(fold)):
            record.changed(fold, finished_after=self.trainer.current_epoch, validated={})

    def note_validation(self) -> None:
        """Record which checkpoint was validated, unless it was amid the training."""
        trainer, saves = self.trainer, self.parts.saves
        ended = trainer.num_epochs, trainer.my_init_kwargs.get(FINISHED)
        if saves.has_started and not saves.has_ended and trainer.current_epoch not in ended:
            return
        fold = Path(self.trainer.output_folder)
        record = read_record(fold) if self.trainer.local_rank == 0 else None
        # Not of the checkpoint of an earlier training, which may be beside those of this one.
        if record is not None and record.started == saves.policy.started:
            validated = {"checkpoint": self._loaded, "epochs": self.trainer.current_epoch}
            record.changed(fold, validated=validated)

    def differences(self, checkpoint: dict[str, Any]) -> Iterator[str]:
        before = read_record(Path(self.trainer.output_folder))
        if before is None:
            before = RunRecord(training=self._training_of_version_0_3(checkpoint))
        may_change = self.parts.settings.may_change
        training = {key: value for key, value in before.training.items() if key not in may_change}
        own = self.present()
        now = RunRecord(training=own.training, plans=own.plans)
        yield from now.differences(RunRecord(training=training, plans=before.plans))

    def _training_of_version_0_3(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return what the name of a checkpoint's trainer says, if it is another one of this package."""
        written_by = checkpoint["trainer_name"]
        with suppress(WrongName):  # of another package
            settings = None if written_by == self.name else parse_trainer_name(written_by)
            if settings is not None:
                training = self.parts.settings.training_that_began_with(None, settings).plain()
                # The base values of that trainer are not known.
                return {key: training[key] for key in training if key not in ("lr", "weight_decay")}
        return {}
