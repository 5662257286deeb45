"""The folder of a run.

- ``history.csv``: step, learning rate, training loss and what the task evaluates, at every evaluation;
- ``dynamics.csv``: measure, kappa and lambda of every matrix, at the same steps;
- ``dynamics.png``: both as a figure, when the run is done;
- ``checkpoint.pt``: all that it takes to go on, until the run is done;
- ``model.pt``: the trained weights, a state dict, where they were asked for;
- ``result.json``: the last evaluation, or where the run diverged; a run that has it is done;
- ``.lock``: locked while a process trains the run, whose number and machine it says.
"""

from __future__ import annotations

import io
import os
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nnunet_cpr._files import read_json, remove_temporary_files
from nnunet_cpr.names.run_name import RunName
from nnunet_cpr.vision.task import InUse, Task

CHECKPOINT, MODEL, RESULT = "checkpoint.pt", "model.pt", "result.json"
HISTORY, DYNAMICS, FIGURE = "history.csv", "dynamics.csv", "dynamics.png"
LOCK = ".lock"


def folder_of(results: Path, task: Task, name: RunName) -> Path:
    """Where a run's files are: ``results/TASK/NAME``, however much of it the name says.

    Raises:
        WrongName: the name does not go with the task.
    """
    return results / task.name / str(task.shorten(name))


def result_of(folder: Path) -> dict[str, Any] | None:
    """What a run ended with, or None where it is not done.

    Raises:
        OSError: the file is there and is none that a run leaves.
    """
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        result = read_json(path)
        known: dict[str, type] = {"run": str, "settings": dict, "metric": str}
        known |= {"diverged": int} if "diverged" in result else {"loss": float}
        is_whole = all(isinstance(result[key], kind) for key, kind in known.items())
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise OSError(f"{path} is damaged; delete it, and the run is done again")
    return result


def read_table(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Read a CSV file of a run; these columns of it are numbers.

    Numbers that are not finite become NaN, and rows without a finite step are left out.

    Raises:
        OSError: it cannot be read, or is none that a run leaves.
    """
    try:
        text = path.read_text()
        table = pd.read_csv(io.StringIO(text), dtype={"parameter": str})
        numbers = table[list(columns)].dtypes.map(pd.api.types.is_numeric_dtype)
        table[list(columns)] = table[list(columns)].replace([np.inf, -np.inf], np.nan)
        table = table.dropna(subset=["step"])
        is_whole = text.endswith("\n") and len(table) > 0 and numbers.all()
    except (ValueError, KeyError):  # pandas' own errors are ValueErrors
        is_whole = False
    if not is_whole:
        run = f"{path.parent.parent.name} {path.parent.name}"
        raise OSError(f"{path} is damaged; nnunet-cpr vision run {run} --again makes it anew")
    return table


def forget(folder: Path) -> None:
    """Delete what a run has left, so that it is trained anew."""
    # In this order, a kill in between leaves a run that is done or one that has not begun.
    for name in (CHECKPOINT, RESULT, MODEL, FIGURE, HISTORY, DYNAMICS):
        (folder / name).unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from training a run; the system ends the lock with the process.

    Raises:
        InUse: another process has it.
    """
    if sys.platform == "win32":
        yield  # it has no such locks
        return
    import fcntl

    with open(folder / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read() or "another process"
            raise InUse(f"{folder} is being trained by {owner}") from None
        except OSError as error:
            warnings.warn(
                f"{folder} cannot be locked ({error.strerror}); only one process may train this run",
                stacklevel=3,
            )
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            remove_temporary_files(folder, "*")
        yield
