"""Signals that ask a process to end: from a terminal, a cluster's scheduler or an operating system."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

TERMINATION_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
"""Signals that schedulers send before they kill a job; Windows has the first only."""


class Terminated(KeyboardInterrupt):
    """One of :data:`TERMINATION_SIGNALS`, raised as Ctrl-C is.

    Attributes:
        status: exit status of the process, 128 + signal as in shells.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.status = 128 + signal_number


@dataclass
class StopRequest:
    """Signals that have asked this process to end.

    Attributes:
        signals: the signals in the order of their arrival.
    """

    signals: list[signal.Signals] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.signals)


@contextmanager
def raise_on_termination() -> Iterator[None]:
    """Raise :class:`Terminated` at the first termination signal and ignore later ones."""

    def raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
        for each in TERMINATION_SIGNALS:  # a scheduler may send several
            signal.signal(each, signal.SIG_IGN)
        raise Terminated(number)

    with handle_signals(TERMINATION_SIGNALS, raise_terminated):
        yield


@contextmanager
def record_stop_signals() -> Iterator[StopRequest]:
    """Yield a request that records termination signals and Ctrl-C instead of acting on them."""
    request = StopRequest()

    def record(number: int, frame: FrameType | None) -> None:
        request.signals.append(signal.Signals(number))

    with handle_signals((signal.SIGINT, *TERMINATION_SIGNALS), record):
        yield request


@contextmanager
def handle_signals(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals that are not ignored, as they are under nohup or in the background.

    Forked processes, such as those of a multiprocessing pool, which ends them by SIGTERM, die of them.
    """
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            handler(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
