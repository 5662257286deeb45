"""``nnunet-cpr study commands`` and ``run-one``: the runs of a study for any scheduler."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from nnunet_cpr import studies
from nnunet_cpr.cli._options import DEFAULT_PROCESSES, ProcessesOption
from nnunet_cpr.cli.study._options import (
    STOPPED,
    ReplaceOption,
    StudyOptions,
    TrainingOptions,
    prepare_study,
)


def commands(
    options: StudyOptions,
    training: TrainingOptions,
    all_runs: Annotated[bool, Option("--all", help="Finished runs as well.")] = False,
    env: Annotated[
        bool, Option("--env", help="Set nnU-Net's variables and give full paths in each line.")
    ] = False,
    gpus: Annotated[int, Option(min=1, help="GPUs of each training.")] = 1,
    processes: ProcessesOption = DEFAULT_PROCESSES,
    replace: ReplaceOption = False,
) -> None:
    """Print a shell command for each unfinished run, for any scheduler. Preprocesses the data first."""
    selected = options.select()
    prepare_study(selected, processes, Console(stderr=True), replace)  # stdout has commands only
    given = [*training.nnunet_options]
    given += ["--device", training.device] if training.device else []
    given += ["--gpus", str(gpus)] if gpus > 1 else []
    ours = {name: value for name, value in sorted(os.environ.items()) if name.startswith("nnUNet_")}
    variables = ours | selected.folders if env else None
    needed = studies.prerequisites(selected.study, selected.folders)
    for run in sorted(selected.study.runs(), key=needed.__contains__):  # cascades come last
        if all_runs or studies.validation_dice(run.folder(selected.paths.results)) is None:
            print(studies.command_line(run, selected.study.name, given, variables))


def run_one(
    training: TrainingOptions,
    study: Annotated[str, Argument(help="Name of the study, for its logs.")],
    dataset: Annotated[str, Argument(help="Name or number of the data set.")],
    configuration: Annotated[str, Argument(help="Configuration, such as 3d_fullres.")],
    fold: Annotated[int, Argument(min=0, help="Fold.")],
    trainer: Annotated[str, Option("-tr", help="Trainer.")],
    plans: Annotated[str, Option("-p", help="Plans.")] = "nnUNetPlans",
    gpus: Annotated[int, Option(min=1, help="GPUs of the training.")] = 1,
) -> None:
    """Train or continue one run and validate it, as the lines of `study commands` do."""
    folders = studies.nnunet_folders(os.environ)
    results = Path(folders["nnUNet_results"])
    paths = studies.StudyPaths(results, results / "studies" / study)
    run = studies.Run(studies.dataset_name(dataset, folders), configuration, plans, fold, trainer)
    several = ("-num_gpus", str(gpus)) if gpus > 1 else ()
    options = (*training.nnunet_options, *several)
    try:
        is_done = studies.Worker(run, paths, training.device, folders, options)()
    except SystemExit:  # a signal has stopped the training
        print(f"nnunet-cpr: {STOPPED}", file=sys.stderr)
        raise
    outcome = "done" if is_done else "nothing done, as another process works on it"
    print(f"{run.key}: {outcome}", file=sys.stderr)
