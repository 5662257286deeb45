"""Folder of a run.

- ``history.csv``: step, learning rate, training loss and the task's metrics, at every evaluation;
- ``dynamics.csv``: regularization value, kappa and lambda of every parameter matrix, at the same steps;
- ``dynamics.png``: both as a figure, once the run is finished;
- ``checkpoint.pt``: the state to resume from, until the run is finished;
- ``model.pt``: the trained weights as a state dict, if requested;
- ``result.json``: the last evaluation, or the step at which the run diverged; it marks a finished run;
- ``.lock``: locked while a process trains the run.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from filelock import FileLock, Timeout

from nnunet_cpr._files import read_json, remove_temporary_files
from nnunet_cpr.names.run_name import RunName
from nnunet_cpr.vision.task import InUse, Task

CHECKPOINT, MODEL, RESULT = "checkpoint.pt", "model.pt", "result.json"
HISTORY, DYNAMICS, FIGURE = "history.csv", "dynamics.csv", "dynamics.png"
LOCK = ".lock"

_RESULT_TYPES: dict[str, Any] = {"run": str, "settings": dict, "metric": str}
_FINISHED_TYPES: dict[str, Any] = {"loss": float, "step": int, "seconds": (int, float)}


def run_folder(results: Path, task: Task, name: RunName) -> Path:
    """Return ``results/TASK/NAME``, which is the same for every spelling of the name.

    Raises:
        WrongName: the name does not fit the task.
    """
    return results / task.name / str(task.shorten(name))


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of a run, or None if the run is not finished.

    Raises:
        OSError: the file cannot be read, or it is not a result of a run.
    """
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        result = read_json(path)
        types = _RESULT_TYPES | ({"diverged": int} if "diverged" in result else _FINISHED_TYPES)
        is_complete = all(isinstance(result[key], kind) for key, kind in types.items())
        is_complete = is_complete and ("diverged" in result or result["metric"] in result)
    except (ValueError, KeyError, TypeError):
        is_complete = False
    if not is_complete:
        raise OSError(f"{path} is damaged; delete it to train the run again")
    return result


def read_table(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Return a CSV file of a run whose ``columns`` are numeric.

    Non-finite numbers become NaN, and rows without a finite step are dropped.

    Raises:
        OSError: the file cannot be read, or it is not a table of a run.
    """
    try:
        text = path.read_text()
        table = pd.read_csv(io.StringIO(text), dtype={"parameter": str})
        is_numeric = table[list(columns)].dtypes.map(pd.api.types.is_numeric_dtype)
        table[list(columns)] = table[list(columns)].replace([np.inf, -np.inf], np.nan)
        table = table.dropna(subset=["step"])
        is_complete = text.endswith("\n") and len(table) > 0 and is_numeric.all()
    except (ValueError, KeyError):  # pandas' own errors are ValueErrors
        is_complete = False
    if not is_complete:
        run = f"{path.parent.parent.name} {path.parent.name}"
        raise OSError(f"{path} is damaged; train the run again: nnunet-cpr vision run {run} --again")
    return table


def delete_run_files(folder: Path) -> None:
    """Delete the files of a run, so that it is trained again."""
    # In this order a kill in between leaves a finished run or an empty folder.
    for name in (CHECKPOINT, RESULT, MODEL, FIGURE, HISTORY, DYNAMICS):
        (folder / name).unlink(missing_ok=True)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other processes; the lock ends with the process.

    Raises:
        InUse: another process holds the lock.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise InUse(f"{folder} is in use: another process trains this run") from None
    except OSError as error:
        warnings.warn(
            f"{folder} cannot be locked ({error.strerror}); do not train this run in two processes",
            stacklevel=3,
        )
    else:
        remove_temporary_files(folder, "*")
    try:
        yield
    finally:
        lock.release()
