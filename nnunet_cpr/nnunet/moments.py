"""Order of a training: nnU-Net's methods, and the moments of the parts before and after them.

Each method is replaced on the trainer itself, so that it runs around the method of the trainer's class,
whatever that is: classes in between, which people derive and combine, need not call ``super()``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.nnunet.parts.part import warn
from nnunet_cpr.nnunet.parts.parts import Parts
from nnunet_cpr.nnunet.parts.saves import Finished
from nnunet_cpr.refusals import Refusal

Method = Callable[..., Any]


class Moments:
    """nnU-Net's methods with the moments of the parts, in the order of a training.

    The first argument of each is the method of the trainer's class; others are handed on to it, and its
    result is returned.
    """

    def __init__(self, trainer: Any, parts: Parts) -> None:
        self._trainer, self._parts = trainer, parts
        self._own: dict[str, Method] = {}  # methods that were set on the trainer itself
        self._is_started = self._is_starting = False
        self._epoch: int | None = None  # that was started
        self._iteration = 0  # the next one

    def initialize(self, method: Method, *arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        self.each("initialized")
        return result

    def do_split(self, method: Method, *arguments: Any, **named: Any) -> Any:
        return self._parts.record.keep_split(*method(*arguments, **named))

    def run_training(self, method: Method, *arguments: Any, **named: Any) -> Any:
        result = None
        with self._parts.saves.watched():
            try:
                result = method(*arguments, **named)
            except Finished:
                self._trainer.on_train_end()
            self.each("end")
        return result

    def on_train_start(self, method: Method, *arguments: Any, **named: Any) -> Any:
        self._is_starting = True
        self.each("check")
        result = method(*arguments, **named)
        self._start()
        return result

    def on_epoch_start(self, method: Method, *arguments: Any, **named: Any) -> Any:
        self._make_up_for_start()
        self._start_epoch()
        return method(*arguments, **named)

    def on_train_epoch_start(self, method: Method, *arguments: Any, **named: Any) -> Any:
        self._parts.average.unbind()
        return method(*arguments, **named)

    def train_step(self, method: Method, *arguments: Any, **named: Any) -> Any:
        if not self._is_starting:
            self._make_up_for_start()
        if self._is_started and self._epoch != self._trainer.current_epoch:
            self._missed("on_epoch_start")
            self._start_epoch()
        self._parts.average.unbind()
        self.each("start_iteration", self._iteration)
        self._iteration += 1
        return method(*arguments, **named)

    def on_validation_epoch_start(self, method: Method, *arguments: Any, **named: Any) -> Any:
        with self._parts.average.bound(stays=True):
            return method(*arguments, **named)

    def validation_step(self, method: Method, *arguments: Any, **named: Any) -> Any:
        with self._parts.average.bound(stays=self._parts.average.is_bound):
            return method(*arguments, **named)

    def on_validation_epoch_end(self, method: Method, *arguments: Any, **named: Any) -> Any:
        with self._parts.average.bound():
            return method(*arguments, **named)

    def on_epoch_end(self, method: Method, *arguments: Any, **named: Any) -> Any:
        self._parts.average.unbind()
        self.each("end_epoch")
        result = method(*arguments, **named)
        self.each("draw")
        return result

    def save_checkpoint(self, method: Method, filename: str, *arguments: Any, **named: Any) -> Any:
        was_bound = self._parts.average.is_bound
        with self._parts.average.bound(stays=was_bound):
            return self._parts.saves.save(lambda file: method(file, *arguments, **named), filename)

    def load_checkpoint(self, method: Method, *arguments: Any, **named: Any) -> Any:
        # The main branch of nnU-Net gives the argument another name, or the content in its place.
        if not arguments:
            arguments = (named.pop(next(iter(named))),)
        with self._parts.average.released():
            return self._parts.saves.load(
                lambda file: method(file, *arguments[1:], **named), arguments[0]
            )

    def perform_actual_validation(self, method: Method, *arguments: Any, **named: Any) -> Any:
        with self._parts.average.bound():
            result = method(*arguments, **named)
        self._parts.record.note_validation()
        return result

    # Moments of the parts

    def each(self, moment: str, *arguments: Any) -> None:
        """Let every part act, in their order."""
        for part in self._parts:
            getattr(part, moment)(*arguments)

    def _start(self) -> None:
        self._is_started, self._is_starting = True, False
        self.each("start")

    def _make_up_for_start(self) -> None:
        if not self._is_started:
            self._missed("on_train_start")
            self.each("check")
            self._start()

    def _start_epoch(self) -> None:
        self._epoch, self._iteration = self._trainer.current_epoch, 0
        self._parts.average.unbind()
        self.each("start_epoch")

    def _missed(self, method: str) -> None:
        warn(
            self._trainer,
            f"{type(self._trainer).__name__} has not called {method}; it is made up for now",
        )

    # Their place on the trainer

    def install(self) -> None:
        """Put all methods on the trainer."""
        for name in METHODS:
            if name in vars(self._trainer):
                self._own[name] = vars(self._trainer)[name]
            vars(self._trainer)[name] = functools.partial(self._run, name)

    def set_method(self, name: str, method: Method) -> None:
        """Take a method that is set on the trainer in place of that of its class."""
        self._own[name] = method

    def _run(self, name: str, *arguments: Any, **named: Any) -> Any:
        own = getattr(type(self._trainer), name).__get__(self._trainer)
        try:
            return getattr(self, name)(self._own.get(name, own), *arguments, **named)
        except Refusal as error:
            end(self._trainer, str(error), self._parts)


METHODS = [name for name in vars(Moments) if hasattr(nnUNetTrainer, name) and name[0] != "_"]
"""Methods of nnU-Net's trainer that have moments."""


def end(trainer: Any, message: str, parts: Parts | None = None) -> NoReturn:
    """End a command with a message in one line, and remove empty folders of a start."""
    warn(trainer, message)
    rank = getattr(trainer, "local_rank", 0)
    if rank != 0:  # the others may go on, and would wait for this one
        print(f"nnunet-cpr: rank {rank}: {message}", file=sys.stderr)
    elif parts is not None:
        parts.saves.remove_folders()
    raise SystemExit(1)
