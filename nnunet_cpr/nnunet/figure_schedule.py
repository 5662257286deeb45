"""Times at which a training draws its figures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 0.005
"""Largest share of a training's time for drawing, apart from the figures at its end."""
_FIRST_SECONDS = 2.0  # assumed for the first drawing


class FigureSchedule:
    """Schedule that lets drawing take :data:`SHARE` of the time since the last one."""

    def __init__(self) -> None:
        self._end = time.monotonic()
        self._seconds = _FIRST_SECONDS

    @property
    def is_due(self) -> bool:
        """True if drawing again, which takes as long as the last time, stays below the share."""
        return self._seconds <= SHARE * (time.monotonic() - self._end)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the drawing in this context."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._end = time.monotonic()
            self._seconds = self._end - start
