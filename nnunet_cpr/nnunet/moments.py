"""What runs when: nnU-Net's methods, and the moments of the parts before and after them.

Each method is replaced on the trainer itself, so that it runs around the method of the trainer's class,
whatever that is: classes in between, which people derive and combine, need not call ``super()``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from nnunet_cpr.nnunet.parts.part import warn
from nnunet_cpr.nnunet.parts.parts import Parts
from nnunet_cpr.nnunet.parts.saves import Finished
from nnunet_cpr.refusals import Refusal

Method = Callable[..., Any]


class Moments:
    """nnU-Net's methods with the moments of the parts, in the order of a training.

    The first argument of each is the method of the trainer's class.
    """

    def __init__(self, trainer: Any, parts: Parts) -> None:
        self._trainer, self._parts = trainer, parts
        self._is_started = False
        self._epoch: int | None = None  # that was started
        self._iteration = 0  # the next one

    def initialize(self, method: Method) -> None:
        method()
        self.each("initialized")

    def do_split(self, method: Method) -> Any:
        return self._parts.record.keep_split(*method())

    def run_training(self, method: Method) -> None:
        with self._parts.saves.watched():
            try:
                method()
            except Finished:
                self._trainer.on_train_end()
            self.each("end")

    def on_train_start(self, method: Method) -> None:
        self.each("check")
        method()
        self._start()

    def on_epoch_start(self, method: Method) -> None:
        if not self._is_started:
            self._missed("on_train_start")
            self._start()
        self._start_epoch()
        method()

    def train_step(self, method: Method, *arguments: Any, **named: Any) -> Any:
        if self._epoch != self._trainer.current_epoch:
            self._missed("on_epoch_start")
            self._start_epoch()
        self.each("start_iteration", self._iteration)
        self._iteration += 1
        return method(*arguments, **named)

    def on_validation_epoch_start(self, method: Method) -> None:
        self._parts.average.bind()
        method()

    def validation_step(self, method: Method, *arguments: Any, **named: Any) -> Any:
        with self._parts.average.bound():
            return method(*arguments, **named)

    def on_validation_epoch_end(self, method: Method, *arguments: Any, **named: Any) -> None:
        with self._parts.average.bound():
            method(*arguments, **named)
        self._parts.average.unbind()

    def on_epoch_end(self, method: Method) -> None:
        self._parts.average.unbind()
        self.each("end_epoch")
        method()
        self.each("draw")

    def save_checkpoint(self, method: Method, filename: str) -> None:
        with self._parts.average.bound():
            self._parts.saves.save(method, filename)

    def load_checkpoint(self, method: Method, *arguments: Any, **named: Any) -> None:
        # The main branch of nnU-Net gives the argument another name, or the content in its place.
        given = next(iter((*arguments, *named.values())), None)
        self._parts.saves.load(method, given)

    def perform_actual_validation(self, method: Method, *arguments: Any, **named: Any) -> None:
        with self._parts.average.bound():
            method(*arguments, **named)
        self._parts.record.note_validation()

    # Moments of the parts

    def each(self, moment: str, *arguments: Any) -> None:
        """Let every part act, in their order."""
        for part in self._parts:
            getattr(part, moment)(*arguments)

    def _start(self) -> None:
        self._is_started = True
        self.each("start")

    def _start_epoch(self) -> None:
        self._epoch, self._iteration = self._trainer.current_epoch, 0
        self.each("start_epoch")

    def _missed(self, method: str) -> None:
        warn(
            self._trainer,
            f"{type(self._trainer).__name__} has not called {method}; it is made up for now",
        )

    # Their place on the trainer

    def install(self) -> None:
        """Put all methods on the trainer."""
        for name, moment in vars(Moments).items():
            if not name.startswith("_") and name not in ("each", "install"):
                vars(self._trainer)[name] = functools.partial(self._run, name, moment)

    def _run(self, name: str, moment: Method, *arguments: Any, **named: Any) -> Any:
        method = getattr(type(self._trainer), name).__get__(self._trainer)
        try:
            return moment(self, method, *arguments, **named)
        except Refusal as error:
            end(self._trainer, str(error))


def end(trainer: Any, message: str) -> NoReturn:
    """End a command with a message in one line."""
    warn(trainer, message)
    rank = getattr(trainer, "local_rank", 0)
    if rank != 0:  # the others may go on, and would wait for this one
        print(f"nnunet-cpr: rank {rank}: {message}", file=sys.stderr)
    raise SystemExit(1)
