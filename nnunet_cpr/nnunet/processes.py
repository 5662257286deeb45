"""Processes that train: how one is known, its claim of a fold, requests to finish, signals and forks.

Signals come from a terminal, a cluster's scheduler or an operating system. Forked processes, such as
those of a pool or of data loaders, do not inherit the handlers of this module.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from nnunet_cpr.refusals import Refusal, one_line

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


def describe_process(pid: int) -> str:
    """Return the host, process id and start of a process of this machine."""
    return f"{socket.gethostname()} {pid} {process_start(pid)}"


def _is_alive(holder: str) -> bool:
    try:
        return describe_process(int(holder.split()[1])) == holder
    except (IndexError, ValueError, psutil.Error):  # it has ended, or the file is no claim
        return False


def is_of_this_machine(process: str) -> bool:
    """Return True if a description is that of a process of this machine."""
    return process.partition(" ")[0] == socket.gethostname()


# Claim of a fold


CLAIM = ".training_process"
"""File with the host, process id and start of the process that trains in the folder."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Claim a folder for this process.

    A claim holds while its process is alive, so that one that was killed leaves none. Processes
    of other machines cannot be asked; their claims are replaced. Two that start at the same moment may
    both get the folder.

    Raises:
        Refusal: another process of this machine trains there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    refuse_if_claimed(folder)
    path, own = folder / CLAIM, describe_process(os.getpid())
    path.write_text(own)
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text() == own:  # not that of another machine
                path.unlink()


def refuse_if_claimed(folder: Path) -> None:
    """Refuse a folder in which another process trains, before anything in it changes.

    Raises:
        Refusal: another process of this machine trains there.
    """
    with suppress(OSError):
        holder = (folder / CLAIM).read_text()
        if holder != describe_process(os.getpid()) and _is_alive(holder):
            pid = holder.split()[1]
            raise Refusal(f"process {pid} trains in {folder}", f"wait for it, or end it: kill {pid}")


def running_process(folder: Path) -> str | None:
    """Return the description of the process that trains in a folder, None if there is none.

    One of another machine, which cannot be asked, may have ended.
    """
    try:
        holder = (folder / CLAIM).read_text()
    except OSError:
        return None
    return holder if _is_alive(holder) or not is_of_this_machine(holder) else None


# Request to finish


REQUEST = ".finish_after_epoch"
"""File that asks the training to end. One that is continued after a signal still ends, as it was asked
to; one that begins anew removes it."""


def request_finish(fold: Path) -> str:
    """Ask the training in a fold's folder to end after its running epoch.

    Args:
        fold: such as ``nnUNetTrainerCPR_anytime__nnUNetPlans__3d_fullres/fold_0``.

    Returns:
        The process in words. One of another machine, which cannot be asked, may have ended.

    Raises:
        Refusal: no training of this package runs there.
        OSError: the request cannot be written.
    """
    process = running_process(fold)
    if process is None:
        raise Refusal(
            f"{fold}: expected a fold that nnunet-cpr trains now, got a folder without a running "
            "training",
            "to train longer than a finished one, use nnunet-cpr extend",
        )
    (fold / REQUEST).write_text(process)
    host, number, _ = process.split()
    return f"process {number} of {host}"


def is_finish_requested(fold: Path) -> bool:
    """Return True if the training of a fold has been asked to end."""
    return (fold / REQUEST).exists()


def withdraw_request(fold: Path) -> None:
    """Remove a request, after the training, or as another one begins."""
    (fold / REQUEST).unlink(missing_ok=True)


# Signals


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


# End of a training


class Interrupted(SystemExit, KeyboardInterrupt):
    """Ctrl-C, with an exit status.

    After a KeyboardInterrupt the status is 1 where a function that runs at the exit evaluates code, as
    torch's does, since Python then forgets the interrupt.
    """


class Interruption:
    """End of a training by a signal: of a cluster's scheduler, or Ctrl-C.

    Rank 0 saves and ends all ranks and their child processes, with status 128 + signal. The other ranks
    pass signals on to it and go on, since rank 0 may wait for them. Ctrl-C in a training without ranks
    raises :class:`Interrupted`.

    Args:
        save: function that saves the state and returns a message.
        report: function that shows a message.
    """

    def __init__(self, save: Callable[[], str], report: Callable[[str], None]) -> None:
        self._save, self._report = save, report
        self._ranks = [os.getpid()]
        self._is_deferred = False
        self._pending: int | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Act on signals in this context, except on those that somebody else ignores or handles.

        With distributed training, all ranks must enter it. Outside of the main thread, in which Python
        handles signals, it does nothing.
        """
        from torch import distributed  # which takes long, and commands import this module

        if distributed.is_available() and distributed.is_initialized():
            self._ranks = [0] * distributed.get_world_size()
            distributed.all_gather_object(self._ranks, os.getpid())
        numbers: Sequence[signal.Signals] = (signal.SIGINT, *TERMINATION_SIGNALS)
        if threading.current_thread() is not threading.main_thread():
            numbers = ()
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        with handle_signals([n for n in numbers if signal.getsignal(n) in defaults], self._handle):
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Act on signals at the end of this context, in which files or the kept state change."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
            if self._pending is not None:
                self._end(self._pending)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._ranks[0]:
            try:
                os.kill(self._ranks[0], number)
            except ProcessLookupError:  # it has failed
                os._exit(128 + number)
        elif self._is_deferred:
            self._pending = self._pending or number
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        self._is_deferred, self._pending = True, None  # schedulers send several signals
        try:
            message = self._save()
        except Exception as error:  # the process must end in any case
            message = f"cannot save the state: {one_line(error)}; continue from an older one with --c"
        # The signal may have come while the main thread was printing, or nobody reads the output.
        with suppress(RuntimeError, OSError, ValueError):
            self._report(f"{signal.Signals(number).name}: {message}")
            sys.stdout.flush()
        if number == signal.SIGINT and len(self._ranks) == 1:
            self._is_deferred = False
            raise Interrupted(128 + number)
        for pid in self._ranks:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for each in (*process.children(recursive=True), process):
                    if each.pid != os.getpid():
                        each.kill()
        os._exit(128 + number)
