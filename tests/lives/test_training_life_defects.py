"""Defects that the state machine of a training's life must find when they are put back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase

from nnunet_cpr.nnunet import checkpoint_policy, checkpoints, processes
from nnunet_cpr.nnunet.checkpoint_policy import CheckpointPolicy
from nnunet_cpr.nnunet.fold_files import CHECKPOINTS
from nnunet_cpr.nnunet.parts import saves
from nnunet_cpr.nnunet.parts.average import Average
from nnunet_cpr.nnunet.tools import extend
from nnunet_cpr.refusals import Refusal, RefusedItem
from tests.lives.test_training_life import TrainingLife, play

pytestmark = pytest.mark.release

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", autouse=True)
def uninterrupted() -> None:
    """Train without interruption before a defect is put back, for the first trainings of an example."""
    life = TrainingLife()
    for run in range(12):
        life.expected(run, 0)
    life.teardown()


def first_epoch_counts_as_infinitely_new(patch: Patch) -> None:
    """0.2.0: continue at epoch 0 after a signal there, twenty epochs with a better Dice, and a kill."""

    def age(checkpoint: Any) -> tuple[float, int]:
        starts = checkpoint["logging"].get("epoch_start_timestamps") or [float("inf")]
        return starts[0], checkpoint["current_epoch"]

    patch.setattr(checkpoint_policy, "_age", age)


def start_of_the_training_is_not_known(patch: Patch) -> None:
    """Continue an old training in whose folder another one was started."""
    patch.setattr(checkpoint_policy, "start_of", lambda checkpoint: None)


def read_error_is_taken_for_damage(patch: Patch) -> None:
    read = checkpoints.read

    def read_or_skip(path: Path) -> Any:
        try:
            return read(path)
        except Refusal as error:
            raise RefusedItem(path, str(error)) from error

    patch.setattr(checkpoints, "read", read_or_skip)


def two_processes_train_in_a_fold(patch: Patch) -> None:
    patch.setattr(processes, "_is_alive", lambda holder: False)


def first_copy_is_not_read_back(patch: Patch) -> None:
    patch.setattr(CheckpointPolicy, "_check_copy", lambda policy: None)


def files_outside_the_fold_restart_the_interval(patch: Patch) -> None:
    """Let each epoch restart the interval, as a save that ``--c`` does not continue from."""
    start = CheckpointPolicy.start_epoch

    def restart(policy: Any, *arguments: Any) -> None:
        start(policy, *arguments)
        policy._saved_at = checkpoint_policy.time.monotonic()

    patch.setattr(CheckpointPolicy, "start_epoch", restart)


def copy_is_not_renewed(patch: Patch) -> None:
    copy = CheckpointPolicy._copy

    def copy_once(policy: Any, *arguments: Any) -> None:
        if policy.copied_epochs is None:
            copy(policy, *arguments)

    patch.setattr(CheckpointPolicy, "_copy", copy_once)


def weights_that_train_are_not_saved(patch: Patch) -> None:
    def restore(average: Any, checkpoint: Any) -> None:
        average._begin().steps = checkpoint["optimizer_state"]["training_weights"]["steps"]

    patch.setattr(Average, "restore", restore)


def averaged_weights_are_not_bound(patch: Patch) -> None:
    patch.setattr(Average, "bind", lambda average: None)


def request_ends_with_its_process(patch: Patch) -> None:
    """0.3.0: a training that a signal ends after it was asked to finish goes on with ``--c``."""

    def is_requested(fold: Path) -> bool:
        file = fold / processes.REQUEST
        return file.exists() and file.read_text() == processes.describe_process(os.getpid())

    patch.setattr(processes, "is_finish_requested", is_requested)


def finished_training_is_not_validated_again(patch: Patch) -> None:
    """0.3.0: ``--c`` is refused after ``finish``, also if the validation was killed."""
    patch.setattr(saves, "is_validated", lambda fold: True)


def extension_has_no_history(patch: Patch) -> None:
    patch.setattr(extend, "_COPIED", ())


def average_begins_its_window_again(patch: Patch) -> None:
    restore = Average.restore

    def restore_without_steps(average: Any, checkpoint: Any) -> None:
        restore(average, checkpoint)
        average.weights.steps = 0

    patch.setattr(Average, "restore", restore_without_steps)


def finished_training_is_continued(patch: Patch) -> None:
    continue_from = CheckpointPolicy.continue_from

    def continue_without_the_mark(policy: Any, chosen: Path) -> Any:
        path, checkpoint = continue_from(policy, chosen)
        checkpoint["init_args"].pop(checkpoint_policy.FINISHED, None)
        return path, checkpoint

    patch.setattr(CheckpointPolicy, "continue_from", continue_without_the_mark)


def extended_training_is_still_finished(patch: Patch) -> None:
    patch.setattr(extend, "FINISHED", "unknown")


def extension_takes_the_final_checkpoint(patch: Patch) -> None:
    """Not the newest one."""
    patch.setattr(extend, "read_checkpoints", read_in_order)


def read_in_order(fold: Path, report: Any) -> Any:
    newest_first = checkpoint_policy.read_checkpoints(fold, report)
    return {path: newest_first[path] for path in map(fold.joinpath, CHECKPOINTS) if path in newest_first}


@pytest.mark.parametrize(
    "put_back",
    [
        first_epoch_counts_as_infinitely_new,
        start_of_the_training_is_not_known,
        read_error_is_taken_for_damage,
        two_processes_train_in_a_fold,
        first_copy_is_not_read_back,
        files_outside_the_fold_restart_the_interval,
        copy_is_not_renewed,
        weights_that_train_are_not_saved,
        averaged_weights_are_not_bound,
        request_ends_with_its_process,
        finished_training_is_not_validated_again,
        extension_has_no_history,
        average_begins_its_window_again,
        finished_training_is_continued,
        extended_training_is_still_finished,
        extension_takes_the_final_checkpoint,
    ],
)
def test_state_machine_finds_the_defect(put_back: Callable[[Patch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        put_back(patch)
        with pytest.raises((AssertionError, SystemExit, pytest.fail.Exception)):
            play(60, 400, phases=[Phase.generate], report_multiple_bugs=False)  # stops once it is found
