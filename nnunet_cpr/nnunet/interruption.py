"""End of a training by a signal: of a cluster's scheduler, or Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import psutil
from torch import distributed

from nnunet_cpr.nnunet.checkpoints import one_line
from nnunet_cpr.nnunet.processes import TERMINATION_SIGNALS, handle_signals


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
