"""The life of a training: saves, signals, kills, damaged files, ``--c``, early ends, extensions.

A state machine plays it with nnU-Net's own methods on a network of a few weights and a clock of its own.
The training has CPR with a history, averaged weights and a constant learning rate, so that nothing
depends on its length.
The model is a table of the states of uninterrupted trainings; the files are read with ``torch.load``.
"""

from __future__ import annotations

import copy
import errno
import functools
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from nnunetv2.run.run_training import maybe_load_checkpoint
from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as nnunet_module
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr import files
from nnunet_cpr.nnunet import checkpoint_policy, checkpoints, moments, processes
from nnunet_cpr.nnunet.base_trainer import parts_of
from nnunet_cpr.nnunet.parts import part
from nnunet_cpr.nnunet.parts.average import TRAINING_WEIGHTS
from nnunet_cpr.nnunet.parts.saves import Finished
from nnunet_cpr.nnunet.run_record import read_record
from nnunet_cpr.nnunet.tools.extend import extend_model
from nnunet_cpr.refusals import Refusal, counted
from tests.golden.tiny_trainer import build_trainer, nnunet_folders, set_gradients, set_weights
from tests.helpers import examples
from tests.helpers.resume_cases import differences

EPOCHS, STEPS = 12, 2
LONGEST = EPOCHS + 8
INTERVAL = 10.0  # minutes
FILES = ("checkpoint_final.pth", "checkpoint_latest.pth", "checkpoint_best.pth")
RUN = "run of the test"
"""Entry of ``init_args`` that tells a file's training apart; nnU-Net keeps it."""

minutes = strategies.sampled_from([0.5, 4.0, 6.0, 25.0])
one_epoch = strategies.tuples(strategies.booleans(), minutes)
several_epochs = strategies.lists(one_epoch, min_size=1, max_size=5)


class Killed(BaseException):
    """Kill of the process in the middle of a call."""


def raise_killed(*arguments: Any) -> None:
    raise Killed


def raise_disk_full(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def raise_stale(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ESTALE, "Stale file handle")


def start_weights(trainer: Any, run: int) -> None:
    set_weights(trainer)
    with torch.no_grad():
        for p in trainer.network.parameters():
            p.mul_(1 + run / 8)


def trainer_name(epochs: int) -> str:
    return f"nnUNetTrainerCPR_anytime_ema0p5_ws3_{epochs}epochs_{STEPS}iters"


def state_of(trainer: Any) -> Any:
    """Return the averaged weights, the states of optimizer and CPR, and the weights that train."""
    optimizer = trainer.optimizer.state_dict()
    parts = optimizer["state"], optimizer["cpr"]["state"], optimizer[TRAINING_WEIGHTS]
    averaged = parts_of(trainer).average.weights
    assert averaged is not None
    return copy.deepcopy([*map(dict, (averaged.network.state_dict(), *parts))])


def step_on_given_gradients(trainer: Any, batch: Any) -> None:
    set_gradients(trainer, batch["number"])
    trainer.optimizer.step()


def take_step(trainer: Any, epoch: int, step: int) -> None:
    if step == 0:
        trainer.on_train_epoch_start()
    trainer.train_step({"number": STEPS * epoch + step})
    if step == STEPS - 1:
        trainer.on_train_epoch_end([{"loss": np.float32(0.5)}])


@functools.lru_cache(maxsize=64)  # each rule asks
def content_of(path: Path, written: int) -> tuple[int, int] | None:
    """Return training and epochs of a file, None for a damaged one."""
    try:
        content = torch.load(path, weights_only=False)
        return content["init_args"][RUN], content["current_epoch"]
    except Exception:
        return None


class TrainingLife(RuleBasedStateMachine):
    """One fold's folder, and at most one process that trains in it."""

    uninterrupted: dict[int, list[Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.root = Path(tempfile.mkdtemp())
        self.stack.enter_context(nnunet_folders(self.root))
        self.patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        self.now = 1e9
        self.offset = 0.0  # of the clock, which may be set
        clock = SimpleNamespace(time=lambda: self.now + self.offset, monotonic=lambda: self.now)
        self.patch.setattr(checkpoint_policy, "time", clock)
        self.patch.setattr(nnunet_module, "time", clock.time)
        self.patch.setattr(nnUNetTrainer, "on_train_start", lambda trainer: None)
        self.patch.setattr(nnUNetTrainer, "train_step", step_on_given_gradients)
        self.patch.setattr(nnUNetTrainer, "perform_actual_validation", lambda *_: None)
        self.said: list[str] = []
        for module in (part, moments):
            self.patch.setattr(module, "warn", lambda _, message: self.said.append(message))
        self.trainer: Any = None
        self.length = EPOCHS
        self.finished: dict[int, int] = {}  # epochs of a training that was ended early
        self.asked: set[int] = set()  # trainings that were asked to end
        self.validated: set[int] = set()  # trainings whose validation has ended
        # All processes of an example are this one.
        process = lambda: f"life {self.lives} now"  # noqa: E731
        real = processes.describe_process
        describe = lambda pid: process() if pid == os.getpid() else real(pid)  # noqa: E731
        self.patch.setattr(processes, "describe_process", describe)
        self.patch.setattr(
            processes, "running_process", lambda fold: process() if self.trainer else None
        )
        self.lives = 0
        self.is_in_epoch = False
        self.done: set[str] = set()  # rules that are played once in an example
        self.runs = 0
        self.recorded = -1  # training of the record
        self.reached: dict[tuple[int, int], float] = {}  # when a training first had so many epochs
        self.seconds: dict[tuple[int, int], float] = {}  # of an epoch

    def teardown(self) -> None:
        self.stack.close()
        shutil.rmtree(self.root)

    # The model

    @property
    def run(self) -> int:
        return self.trainer.my_init_kwargs[RUN]

    def expected(self, run: int, epochs: int) -> Any:
        if run not in self.uninterrupted:
            with tempfile.TemporaryDirectory() as folder, nnunet_folders(Path(folder)):
                self.uninterrupted[run] = self.train_without_interruption(run)
        return self.uninterrupted[run][epochs]

    @staticmethod
    def train_without_interruption(run: int) -> list[Any]:
        trainer = build_trainer(trainer_name(LONGEST))
        start_weights(trainer, run)
        trainer.on_train_start()
        states = []
        for epoch in range(LONGEST + 1):
            states.append(state_of(trainer))
            if epoch < LONGEST:
                trainer.on_epoch_start()
            for step in range(STEPS if epoch < LONGEST else 0):
                take_step(trainer, epoch, step)
            trainer.current_epoch += 1
        return states

    @property
    def folder(self) -> Path:
        return self.model_of(self.length) / "fold_0"

    def model_of(self, epochs: int) -> Path:
        models = (self.root / "nnUNet_results").glob(f"*/{trainer_name(epochs)}__*")
        return next(models, self.root / "none")

    def files(self) -> dict[str, tuple[int, int] | None]:
        """Return training and epochs of each file, None for a damaged one."""
        paths = filter(Path.exists, map(self.folder.joinpath, FILES))
        return {path.name: content_of(path, path.stat().st_mtime_ns) for path in paths}

    def newest(self) -> tuple[int, int] | None:
        return max(filter(None, self.files().values()), default=None)

    def check_loss(self) -> None:
        """At most the interval and one epoch of this training are lost by a kill now."""
        newest = self.newest()
        kept = newest[1] if newest is not None and newest[0] == self.run else 0
        lost = self.now - self.reached[self.run, kept]
        epochs = range(kept, LONGEST)
        assert lost <= 60 * INTERVAL + max(
            (self.seconds.get((self.run, epoch), 0) for epoch in epochs), default=0
        )

    def is_new(self, name: str) -> bool:
        return name not in self.done

    def end_process(self) -> None:
        self.trainer, self.is_in_epoch = None, False
        self.claim.close()

    def begin(self, trainer: Any, setup: float) -> None:
        self.trainer = trainer
        self.lives += 1
        self.now += 60 * setup
        self.claim = ExitStack()
        self.claim.enter_context(processes.claimed(Path(trainer.output_folder)))
        trainer.on_train_start()
        trainer.logger.plot_progress_png = lambda folder: None
        self.reached.setdefault((self.run, trainer.current_epoch), self.now)
        if trainer.current_epoch in [epochs for run, epochs in self.reached if run == self.run]:
            self.reached[self.run, trainer.current_epoch] = self.now  # the time before is gone

    # What happens

    @precondition(lambda self: self.trainer is None)
    @rule(setup=minutes, stops_at_once=strategies.booleans())
    def start(self, setup: float, stops_at_once: bool) -> None:
        trainer = build_trainer(trainer_name(self.length))
        trainer.my_init_kwargs[RUN] = self.runs
        start_weights(trainer, self.runs)
        self.runs += 1
        self.begin(trainer, setup)
        self.validated.clear()  # its record replaces that of the one before
        self.recorded = self.run
        if stops_at_once:
            self.begin_epoch()
            self.signal()

    @precondition(lambda self: self.trainer is None and self.files())
    @rule(setup=minutes)
    def continue_(self, setup: float) -> None:
        files, newest, before = self.files(), self.newest(), len(self.said)
        trainer = build_trainer(trainer_name(self.length), continues=True)
        # The final checkpoint alone tells that the training was ended early.
        is_finished = newest is not None and newest[1] == self.finished.get(newest[0])
        is_final = is_finished and files.get(FILES[0]) == newest
        if newest is None or (is_final and newest[0] in self.validated):
            with pytest.raises(SystemExit):
                maybe_load_checkpoint(trainer, True, False)
            assert newest is None or "nnunet-cpr extend" in self.said[-1]
            return
        maybe_load_checkpoint(trainer, True, False)
        run, epochs = newest
        assert (trainer.my_init_kwargs[RUN], trainer.current_epoch) == (run, epochs), files
        if epochs < self.length:
            self.begin(trainer, setup)
            if epochs == 0:  # it starts anew, and so does its record
                self.recorded = run
                self.validated.discard(run)
            assert not differences(state_of(trainer), self.expected(run, epochs))
            assert [*parts_of(trainer).progress.history.epochs] == [*range(epochs)]
            if is_final:  # only its validation is left
                self.begin_epoch()
                assert self.trainer is None
        said = self.said[before:]
        chosen = next(name for name in FILES if name in files)  # by nnU-Net
        damaged = [name for name, content in files.items() if content is None]
        if chosen != FILES[2]:
            assert all(any(name in line and "skipped" in line for line in said) for name in damaged)
        if files[chosen] not in (None, newest):
            done = counted(epochs, "epoch")
            assert any(f"({done}) in place of {chosen}" in line for line in said)

    @precondition(lambda self: self.trainer and not self.is_in_epoch)
    @rule()
    def begin_epoch(self) -> None:
        try:
            self.trainer.on_epoch_start()
        except Finished:  # which run_training takes for the end
            self.end_training(self.trainer.current_epoch)
            return
        self.is_in_epoch = True
        take_step(self.trainer, self.trainer.current_epoch, 0)

    def end_epoch(self, is_better: bool, minutes: float) -> None:
        trainer, epoch = self.trainer, self.trainer.current_epoch
        take_step(trainer, epoch, 1)
        self.now += 60 * minutes
        self.seconds[self.run, epoch] = 60 * minutes
        self.check_loss()
        trainer.logger.log("val_losses", 0.5, epoch)
        trainer.logger.log("dice_per_class_or_region", [0.5], epoch)
        trainer.logger.log("mean_fg_dice", 0.1 * (epoch + 1) if is_better else 0.0, epoch)
        self.reached[self.run, epoch + 1] = self.now
        trainer.on_epoch_end()
        self.is_in_epoch = False
        if trainer.current_epoch == self.length:
            self.end_training(self.length)

    def end_training(self, epochs: int) -> None:
        self.trainer.on_train_end()
        assert self.files()["checkpoint_final.pth"] == (self.run, epochs)
        if epochs < self.length:
            assert self.run in self.asked or self.finished.get(self.run) == epochs
            self.finished[self.run] = epochs
        self.asked.discard(self.run)
        if (self.lives + epochs) % 3:  # otherwise the validation is killed
            self.trainer.perform_actual_validation()
            self.check_validation(self.run, epochs)
        processes.withdraw_request(self.folder)
        self.end_process()

    def check_validation(self, run: int, epochs: int) -> None:
        record = read_record(self.folder)
        assert record is not None
        if run == self.recorded:
            assert record.validated == {"checkpoint": FILES[0], "epochs": epochs}
            self.validated.add(run)
        elif self.recorded not in self.validated:
            assert not record.validated

    @precondition(lambda self: self.trainer is None and self.files().get(FILES[0]))
    @rule()
    def validate(self) -> None:
        """By nnU-Net's ``--val``."""
        content = self.files()[FILES[0]]
        assert content is not None
        trainer = build_trainer(trainer_name(self.length))
        maybe_load_checkpoint(trainer, False, True)
        trainer.perform_actual_validation()
        self.check_validation(*content)

    @precondition(lambda self: self.trainer is None)
    @rule()
    def try_out(self) -> None:
        """Train an epoch with nnU-Net's ``--disable_checkpointing``."""
        before, record = self.files(), read_record(self.folder)
        trainer = build_trainer(trainer_name(self.length))
        trainer.disable_checkpointing = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nnUNetTrainer, "run_training", lambda trainer: trainer.on_train_start())
            if FILES[1] in before:
                with pytest.raises(SystemExit):
                    trainer.run_training()
            else:
                trainer.run_training()
        assert (self.files(), read_record(self.folder)) == (before, record)

    @rule(hours=strategies.sampled_from([-3, 2]))
    def set_clock(self, hours: int) -> None:
        self.offset += 3600 * hours

    @precondition(lambda self: self.is_in_epoch)
    @rule()
    def ask_to_finish(self) -> None:
        self.asked.add(self.run)
        processes.request_finish(self.folder)

    @precondition(lambda self: self.trainer and not self.is_in_epoch)
    @rule(is_better=strategies.booleans(), minutes=minutes)
    def finish(self, is_better: bool, minutes: float) -> None:
        """Train an epoch as the last one, and end the training."""
        self.begin_epoch()
        if self.trainer is not None:
            self.ask_to_finish()
            self.end_epoch(is_better, minutes)
        if self.trainer is not None:
            self.begin_epoch()
        assert self.trainer is None

    @precondition(lambda self: self.trainer is None and self.length < LONGEST and self.newest())
    @rule()
    def extend(self) -> None:
        newest = self.newest()
        assert newest is not None
        self.length += 4
        extend_model(self.model_of(self.length - 4), self.length, self.said.append)
        assert self.newest() == newest
        self.finished.pop(newest[0], None)
        self.validated.discard(newest[0])
        self.asked.clear()  # of the shorter one, in its folder

    @precondition(lambda self: self.is_in_epoch)
    @rule(is_better=strategies.booleans(), minutes=minutes)
    def finish_epoch(self, is_better: bool, minutes: float) -> None:
        self.end_epoch(is_better, minutes)

    @precondition(lambda self: self.trainer and not self.is_in_epoch)
    @rule(
        epochs=strategies.lists(
            strategies.tuples(strategies.booleans(), minutes), min_size=1, max_size=5
        )
    )
    def train(self, epochs: list[tuple[bool, float]]) -> None:
        for is_better, duration in epochs:
            if self.trainer is not None:
                self.begin_epoch()
            if self.trainer is not None:
                self.end_epoch(is_better, duration)

    @precondition(lambda self: self.is_in_epoch)
    @rule(minutes=minutes, fail=strategies.sampled_from([raise_killed, raise_disk_full]))
    def fail_while_saving(self, minutes: float, fail: Any) -> None:
        before = self.newest()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "_sync", fail)
            try:
                self.end_epoch(True, minutes)
            except (Killed, SystemExit):
                self.end_process()
                assert self.newest() == before

    @precondition(lambda self: self.trainer)
    @rule()
    def signal(self) -> None:
        """Lose the running epoch only, which lasts until the next one begins."""
        run, epochs = self.run, self.trainer.current_epoch
        kept = parts_of(self.trainer).saves.policy.copied_epochs
        parts_of(self.trainer).saves.policy.end()
        if self.is_in_epoch:
            assert self.newest() == (run, epochs)
        elif kept is not None:
            assert self.newest() in ((run, epochs), (run, epochs - 1))
        self.end_process()

    @precondition(lambda self: self.trainer)
    @rule()
    def kill(self) -> None:
        self.check_loss()
        self.end_process()

    @precondition(lambda self: self.trainer is None and self.files())
    @rule(name=strategies.sampled_from(FILES))
    def truncate(self, name: str) -> None:
        path = self.folder / name
        if path.exists():
            os.truncate(path, path.stat().st_size // 2)

    @precondition(
        lambda self: self.trainer is None and self.is_new("read") and any(self.files().values())
    )
    @rule()
    def continue_with_a_read_error(self) -> None:
        """Stop, since a file that cannot be read at the moment is not lost."""
        self.done.add("read")
        trainer = build_trainer(trainer_name(self.length), continues=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoints.torch, "load", raise_stale)
            with pytest.raises(SystemExit):
                maybe_load_checkpoint(trainer, True, False)
        assert any("try again" in line for line in self.said[-1:])

    @precondition(lambda self: self.trainer and self.is_new("second"))
    @rule()
    def train_in_a_second_process(self) -> None:
        self.done.add("second")
        claim = self.folder / processes.CLAIM
        own = claim.read_text()
        claim.write_text(processes.describe_process(os.getppid()))  # the first, to the second
        with pytest.raises(Refusal), processes.claimed(self.folder):
            pass
        claim.write_text(own)

    @precondition(lambda self: self.trainer is None and self.is_new("unreadable"))
    @rule()
    def start_with_a_state_that_cannot_be_continued(self) -> None:
        self.done.add("unreadable")
        trainer = build_trainer(trainer_name(self.length))
        trainer.my_init_kwargs[RUN] = trainer.my_init_kwargs["weights"] = Path("weights")
        trainer.on_train_start()
        trainer.on_epoch_start()
        assert any("cannot be continued with --c" in line for line in self.said[-1:])
        self.recorded = -1  # the record is of this training, which leaves no checkpoint


def play(count: int = 40, search: int = 300, **options: Any) -> None:
    chosen = settings(examples.examples(count, search), stateful_step_count=40, **options)
    run_state_machine_as_test(TrainingLife, settings=chosen)


def test_short_lives_continue_where_they_ended() -> None:
    """Without a search for the smallest example, as for the long ones."""
    play(4, 4, phases=[Phase.generate])


@pytest.mark.slow
@pytest.mark.release
def test_any_life_continues_where_it_ended() -> None:
    play()
