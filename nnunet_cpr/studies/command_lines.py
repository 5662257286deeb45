"""Shell commands that train and validate one run each, for schedulers without an executor of ours."""

from __future__ import annotations

import shlex
import shutil
import sysconfig
from collections.abc import Mapping, Sequence

from nnunet_cpr.studies.definition import Run

_PROGRAM = "nnunet-cpr"


def command_line(
    run: Run, study: str, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> str:
    """Return a line for a shell that trains or continues a run and validates it.

    Args:
        run: the run.
        study: name of the study, whose folder has the logs.
        options: options of ``nnunet-cpr study run-one``.
        environment: variables to set; the line then has the full path of ``nnunet-cpr`` as well.

    Example:
        >>> run = Run("Dataset004_Hippocampus", "2d", "nnUNetPlans", 0, "nnUNetTrainerCPR")
        >>> command_line(run, "mine")
        'nnunet-cpr study run-one mine Dataset004_Hippocampus 2d 0 -tr nnUNetTrainerCPR -p nnUNetPlans'
    """
    program = [_PROGRAM]
    if environment is not None:
        full_path = shutil.which(_PROGRAM, path=sysconfig.get_path("scripts")) or _PROGRAM
        program = ["env", *(f"{name}={value}" for name, value in environment.items()), full_path]
    selected = [run.dataset, run.configuration, str(run.fold), "-tr", run.trainer, "-p", run.plans]
    return shlex.join([*program, "study", "run-one", study, *selected, *options])
