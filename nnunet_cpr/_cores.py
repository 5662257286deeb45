"""CPU cores that this process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return the number of CPU cores of this process: in a job of a cluster, those of the job.

    Example:
        >>> available_cores() >= 1
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
