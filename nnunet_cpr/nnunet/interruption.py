"""Signals with which a cluster announces the end of a job.

The main thread may be inside a collective operation or a long kernel, where Python does not run signal
handlers. Therefore the interpreter writes the numbers of signals to a socket
(``signal.set_wakeup_fd``), and a thread reads them, saves the state and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil
from torch import distributed

from nnunet_cpr.nnunet.stop_signals import TERMINATION_SIGNALS

_STOP = b"\0"  # is no signal
_REPORT_SECONDS = 5.0
_PARENT_SECONDS = 0.5
_RANK_0_SECONDS = 60.0
"""Time for which the other ranks wait for the checkpoint of rank 0."""


def rank_processes() -> list[psutil.Process]:
    """Return the processes of all ranks of a distributed training, else none.

    All ranks must call this function.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    pids: list[int] = [0] * distributed.get_world_size()
    distributed.all_gather_object(pids, os.getpid())
    return [psutil.Process(pid) for pid in pids]


@contextmanager
def watch_signals(
    write: Callable[[], str],
    report: Callable[[str], None],
    ranks: Sequence[psutil.Process] = (),
    afterwards: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """End the process with status 128 + signal when a termination signal comes in this context.

    The child processes end too, and so do the other ranks, after rank 0 has written. Signals that are
    ignored or have a handler are left as they are.

    Args:
        write: function that saves the state and returns a message; another thread calls it once.
        report: function that prints a message.
        ranks: processes of all ranks. The end of the parent process, which started them, ends them too.
        afterwards: function to call when the state is saved; its errors are printed.
    """
    global _active
    if threading.current_thread() is not threading.main_thread():
        report("the training is not in the main thread: signals end it without a checkpoint")
        yield
        return
    watcher = _Watcher(write, report, ranks, afterwards)
    watcher.start()
    _active = watcher
    _reset_forked_children()
    try:
        yield
    finally:
        watcher.stop()
        _active = None


class _Watcher:
    """Thread that waits for signals, and the handlers that keep them from ending the process at once."""

    def __init__(
        self,
        write: Callable[[], str],
        report: Callable[[str], None],
        ranks: Sequence[psutil.Process],
        afterwards: Callable[[], None],
    ) -> None:
        self._write, self._report, self._afterwards = write, report, afterwards
        self._ranks = ranks
        self._parent = os.getppid()
        self._interrupts = False  # True once SIGINT is known not to come from the end of the parent
        self._signals = [s for s in TERMINATION_SIGNALS if signal.getsignal(s) is signal.SIG_DFL]
        self._on_interrupt = signal.getsignal(signal.SIGINT)
        self._takes_interrupts = bool(ranks) and callable(self._on_interrupt)
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)  # as set_wakeup_fd demands
        self._thread = threading.Thread(target=self._watch, name="signal-watcher", daemon=True)

    def start(self) -> None:
        """Replace the signal handlers and start the thread."""
        self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            signal.signal(number, _leave_to_watcher)
            if hasattr(signal, "siginterrupt"):
                signal.siginterrupt(number, False)  # the main thread goes on undisturbed
        if self._takes_interrupts:
            # torch's spawn sends SIGINT to the ranks when their parent process dies.
            signal.signal(signal.SIGINT, self._interrupt_if_decided)
        self._thread.start()

    def stop(self) -> None:
        """Restore the signal handlers and end the thread."""
        self._sender.send(_STOP)
        self._thread.join()  # forever if a signal has come: the thread ends the process
        self.restore_handlers(self._previous_fd)
        self._receiver.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for number in self._receiver.recv(64):  # came after the thread's end
                if number in self._signals:
                    os.kill(os.getpid(), number)
        self._receiver.close()
        self._sender.close()

    def restore_handlers(self, wakeup_fd: int) -> None:
        """Restore the signal handlers."""
        signal.set_wakeup_fd(wakeup_fd)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)
        if self._takes_interrupts:
            signal.signal(signal.SIGINT, self._on_interrupt)

    def _interrupt_if_decided(self, number: int, frame: FrameType | None) -> Any:
        if self._interrupts and callable(self._on_interrupt):
            return self._on_interrupt(number, frame)

    def _is_orphaned_soon(self) -> bool:
        """Return True if the parent process is gone or goes, which the signal may precede."""
        end = time.monotonic() + _PARENT_SECONDS
        while os.getppid() == self._parent and time.monotonic() < end:
            time.sleep(0.02)
        return os.getppid() != self._parent

    def _watch(self) -> None:
        while True:
            (number,) = self._receiver.recv(1)
            if number == _STOP[0]:
                return
            if number in self._signals:
                self._end(number, signal.Signals(number).name)
            if number == signal.SIGINT and self._takes_interrupts and not self._interrupts:
                if self._is_orphaned_soon():
                    self._end(number, "end of the parent process")
                self._interrupts = True  # Ctrl-C, as without this watcher
                os.kill(os.getpid(), number)

    def _end(self, number: int, cause: str) -> None:
        """Save the state and end this process, its children and the other ranks."""
        try:
            others = [rank for rank in self._ranks if rank.pid != os.getpid()]
            is_rank_0 = not others or self._ranks[0] not in others
            for rank in others if is_rank_0 else self._ranks[:1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.send_signal(number)
            message = f"{cause}: {self._write()}"
            # In a thread, since it waits forever if nobody reads a full pipe.
            reporting = threading.Thread(target=self._print, args=[message], daemon=True)
            reporting.start()
            reporting.join(_REPORT_SECONDS)
            self._afterwards()
            if not is_rank_0:
                _wait_for_end(self._ranks[0], _RANK_0_SECONDS)
        except Exception:
            traceback.print_exc()
        finally:
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            os._exit(128 + number)

    def _print(self, message: str) -> None:
        self._report(message)
        sys.stdout.flush()


def _leave_to_watcher(number: int, frame: FrameType | None) -> None:
    """Do nothing; a signal with this handler is written to the watcher's socket."""


def _wait_for_end(process: psutil.Process, seconds: float) -> None:
    end = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
            time.sleep(0.05)


_active: _Watcher | None = None
_resets_forked_children = False


def _reset_forked_children() -> None:
    """Let signals end processes that are forked from now on, such as data loaders, at once."""
    global _resets_forked_children
    if not _resets_forked_children and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_reset)
        _resets_forked_children = True


def _reset() -> None:
    global _active
    if _active is not None:
        _active.restore_handlers(-1)
        _active = None
