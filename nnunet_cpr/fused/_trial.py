"""Whether a compiler works here, found out by using it."""

from __future__ import annotations

import warnings
from collections.abc import Callable


def works(compiler: str, device: str, trial: Callable[[], bool]) -> bool:
    """What the trial says; where it raises, False with a warning that says why."""
    try:
        return trial()
    except Exception as error:  # no compiler has a common class for what can go wrong in it
        warnings.warn(
            f"CPR's one-pass {device} step is off, since {compiler} cannot compile a kernel here "
            f"({type(error).__name__}: {error}); the step takes the slower way through torch",
            stacklevel=3,
        )
        return False
