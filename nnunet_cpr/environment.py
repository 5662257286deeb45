"""Environment of this process: its packages, CPU cores, variables and random generators."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec


def available_cores() -> int:
    """Return the number of CPU cores of this process: in a job of a cluster, those of the job.

    Example:
        >>> available_cores() >= 1
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


TRAINERS_NEED = ("nnunetv2", "matplotlib", "psutil", "filelock")
COMMANDS_NEED = (
    *TRAINERS_NEED, "typer", "rich", "pydantic", "yaml", "pandas", "scipy", "SimpleITK", "nibabel",
    "submitit", "jinja2",
)  # fmt: skip
"""Modules that commands, studies and reports import, beside those of the optimizers."""


def check_installed(user: str, modules: tuple[str, ...] = COMMANDS_NEED) -> None:
    """Check that modules can be found, without importing them.

    Args:
        user: what needs them, for the error message.
        modules: names of top-level modules.

    Raises:
        ModuleNotFoundError: some are missing; the message names them.

    Example:
        >>> check_installed("nnunet-cpr", ("torch", "no_module"))
        Traceback (most recent call last):
        ModuleNotFoundError: nnunet-cpr: expected no_module to be installed; run pip install . in ...
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{user}: expected {', '.join(missing)} to be installed; run pip install . in a clone of "
            "nnunet-cpr, without --no-deps",
            name=missing[0],
        )


def seed_all(*entropy: int) -> None:
    """Seed the global generators of Python, NumPy and torch.

    Args:
        entropy: numbers that together identify the random stream, such as a run's seed and an epoch.

    Example:
        >>> import random
        >>> seed_all(1, 0)
        >>> first = random.random()
        >>> seed_all(1, 0)
        >>> first == random.random()
        True
    """
    import random

    import numpy as np
    import torch  # not when a command prints its help

    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def changed_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables in this context; None removes one."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
