"""The folder of a run.

- ``history.csv``: step, learning rate, training loss and what the task evaluates, at every evaluation;
- ``dynamics.csv``: measure, kappa and lambda of every matrix, at the same steps;
- ``dynamics.png``: both as a figure, when the run is done;
- ``checkpoint.pt``: all that it takes to go on, until the run is done;
- ``model.pt``: the trained weights, a state dict, where they were asked for;
- ``result.json``: the last evaluation; a run that has it is done.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nnunet_cpr.vision.names import RunName
from nnunet_cpr.vision.task import Task

CHECKPOINT, MODEL, RESULT = "checkpoint.pt", "model.pt", "result.json"
HISTORY, DYNAMICS, FIGURE = "history.csv", "dynamics.csv", "dynamics.png"


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
        result = json.loads(path.read_text())
        known = {"run": str, "settings": dict, "metric": str, "loss": float}
        is_whole = all(isinstance(result[key], kind) for key, kind in known.items())
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise OSError(f"{path} is damaged; delete it, and the run is done again")
    return result
