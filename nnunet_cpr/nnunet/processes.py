"""Processes: how one is known, and the signals that ask it to end.

Signals come from a terminal, a cluster's scheduler or an operating system. Forked processes, such as
those of a pool or of data loaders, do not inherit the handlers of this module.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

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


# Identity


def process_start(pid: int) -> str:
    """Return what tells a process from a later one with its number, whatever is done to the clock.

    On Linux it is the boot and the clock ticks from it to the start of the process. The time of the
    start, which other systems keep, is computed there from the present time, and moves with the clock.

    Raises:
        psutil.NoSuchProcess: there is no such process.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # another system, or no such process
        return f"{psutil.Process(pid).create_time():.2f}"
    # The name of the program, in parentheses, may have spaces; the start is the 20th value after it.
    return f"{boot.strip()}:{status.rpartition(')')[2].split()[19]}"


# Handlers


_before_ours: dict[signal.Signals, Any] = {}
"""Handlers that :func:`handle_signals` has replaced at present, of nested contexts the outermost."""


@contextmanager
def handle_signals(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals that are not ignored, as they are under nohup or in the background."""

    def handle(number: int, frame: FrameType | None) -> None:
        if _fork.is_running:  # Python drops what a handler raises there, so the signal is sent again
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
        else:
            handler(number, frame)

    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in numbers}
    before = {number: each for number, each in before.items() if each is not signal.SIG_IGN}
    outermost = before.keys() - _before_ours.keys()
    _before_ours.update({number: before[number] for number in outermost})
    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
        for number in outermost:
            _before_ours.pop(number, None)  # a forked process has none any more


# Forks


class _Fork(threading.local):
    """State of a fork of this thread.

    Attributes:
        is_running: True from the first hook of the fork to the last one.
        mask: signals that the thread blocked before the fork; None if no handler of ours was set.
    """

    is_running = False
    mask: set[int] | None = None


_fork = _Fork()


def _before_fork() -> None:
    """Block the handled signals, so that none reaches the child before it has its own handlers.

    One that did would be lost: Python forgets the signals that came before a child's first instruction,
    and ``Pool.terminate()`` would wait for ever for a process that was asked to end once.
    """
    if _before_ours:
        _fork.is_running = True
        _fork.mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, _before_ours))


def _after_fork_in_parent() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)
    _fork.mask, _fork.is_running = None, False


def _after_fork_in_child() -> None:
    """Give the child the handlers from before ours, which know nothing of this process."""
    for number, handler in _before_ours.items():
        signal.signal(number, handler)
    _before_ours.clear()
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
