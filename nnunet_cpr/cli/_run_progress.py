"""Progress of several runs: a live line in a terminal, otherwise a few plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

_SECONDS_BETWEEN_LINES = 600
"""Interval of the plain lines within a run."""
_MEASURED_SECONDS = 3
"""Training time after which the speed of this command is known."""


class RunProgress:
    """Display of the running run, its number, its steps and the time left for all runs.

    Runs that an earlier command has finished count as finished. The time left is estimated from the
    steps that are left, at the speed of this command so far.

    Args:
        console: where to print. In a terminal the display is one live line. Otherwise a line is printed
            when one of several runs starts, and every ten minutes.
        steps: number of steps of each run, by its name.
        finished: names of the runs that are finished already.
        seconds_per_step: speed of finished runs, used until this command has its own.
        clock: function that returns the time in seconds.

    Example:
        >>> with RunProgress(Console(), {"SGD_seed1": 100, "SGD_seed2": 100}, ["SGD_seed1"]) as progress:
        ...     progress.start("SGD_seed2")
        ...     progress.update(0, 100)
        ...     progress.end("accuracy 95.00")
        run 2 of 2: SGD_seed2
        SGD_seed2: accuracy 95.00
    """

    def __init__(
        self,
        console: Console,
        steps: Mapping[str, int],
        finished: Collection[str] = (),
        seconds_per_step: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._steps = dict(steps)
        self._ended = set(finished)
        self._speed = seconds_per_step
        self._clock = clock
        self._name = ""
        self._first, self._done = (
            -1,
            0,
        )  # steps of the run before this command (-1: not started), and now
        self._started = self._first_step = self._printed = 0.0
        self._trained_steps, self._trained_seconds = 0, 0.0  # in runs that have ended
        self._line: TaskID | None = None
        self._live: Progress | None = None
        if console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
                console=console,
                transient=True,
            )

    def __enter__(self) -> RunProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def start(self, name: str) -> None:
        """Start a run; its first :meth:`update` comes when its data is loaded."""
        self._name, self._first, self._done = name, -1, 0
        self._started = self._clock()
        if self._live is not None and name not in self._ended:
            self._line = self._live.add_task(self._title(), total=None, left=self._left())

    def update(self, done: int, total: int) -> None:
        """Show the steps of the run.

        Args:
            done: number of steps done, those of an earlier command included.
            total: number of steps of the run.
        """
        now, is_first = self._clock(), not self.has_trained
        if is_first:
            self._first, self._first_step, self._printed = done, now, now
        self._done = done
        if self._live is not None and self._line is not None:
            self._live.update(self._line, completed=done, total=total, left=self._left())
        elif self._live is None and is_first and len(self._steps) > 1:
            self._print(self._title(), self._left())
        elif self._live is None and now - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = now
            self._print(self._title(), f"step {done} of {total}", self._left())

    def end(self, message: str) -> None:
        """End the run and print a line with its name and a message."""
        if self.has_trained:
            self._trained_steps += self._done - self._first
            self._trained_seconds += self._clock() - self._started
        self._ended.add(self._name)
        self._first, self._done = -1, 0
        if self._live is not None and self._line is not None:
            self._live.remove_task(self._line)
            self._line = None
        self._console.print(f"{self._name}: {message}", markup=False)

    @property
    def has_trained(self) -> bool:
        """True if the run has been trained by this command, not by an earlier one or another process."""
        return self._first >= 0

    def seconds_left(self) -> float | None:
        """Return the estimated time until the end of all runs, None if it is not known yet."""
        steps, seconds = self._trained_steps, self._trained_seconds
        if self.has_trained:
            steps += self._done - self._first
            seconds += self._clock() - self._first_step
        is_measured = steps > 0 and seconds >= _MEASURED_SECONDS
        speed = seconds / steps if is_measured else self._speed
        if speed is None:
            return None
        left = sum(count for name, count in self._steps.items() if name not in self._ended)
        return speed * max(0, left - self._done)

    def _title(self) -> str:
        if len(self._steps) == 1:
            return self._name
        return f"run {len(self._ended) + 1} of {len(self._steps)}: {self._name}"

    def _left(self) -> str:
        seconds = self.seconds_left()
        return "" if seconds is None else f"about {timedelta(seconds=round(seconds))} left"

    def _print(self, *parts: str) -> None:
        self._console.print(", ".join(part for part in parts if part), markup=False)
