"""``nnunet-cpr study run``: train and validate the runs of a study, here or on Slurm."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from rich.console import Console
from typer import Option

from nnunet_cpr import studies
from nnunet_cpr.cli._errors import report_errors, stop
from nnunet_cpr.cli._options import DEFAULT_PROCESSES, ProcessesOption
from nnunet_cpr.cli.study._options import (
    ReplaceOption,
    SelectedStudy,
    StudyOptions,
    TrainingOptions,
    check_study,
    prepare_study,
)
from nnunet_cpr.cli.study._slurm_options import SlurmOptions
from nnunet_cpr.cli.study.status import live_table, watch


def run(
    options: StudyOptions,
    *,
    executor: Annotated[Literal["local", "slurm"], Option(help="Where to train.")] = "local",
    jobs: Annotated[
        int | None, Option("--jobs", "-j", min=1, help="Trainings at a time: 1, or 16 on Slurm.")
    ] = None,
    gpus: Annotated[
        int | None, Option(min=0, help="GPUs to share, by default all; on Slurm of each job, 1.")
    ] = None,
    training: TrainingOptions,
    processes: ProcessesOption = DEFAULT_PROCESSES,
    slurm: SlurmOptions,
    replace: ReplaceOption = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show the commands and training steps; change nothing.")
    ] = False,
) -> None:
    """Train and validate all unfinished runs. Run it again to continue after a stop."""
    selected, console = options.select(saved_first=False), Console()
    if executor == "local" and slurm.given():
        stop(f"{', '.join(slurm.given())}: expected --executor slurm as well")
    jobs = jobs or (16 if executor == "slurm" else 1)
    on_slurm = None
    if executor == "slurm":
        on_slurm = slurm.executor(jobs, 1 if gpus is None else gpus, training)
    if dry_run:
        with console.status("checking the trainers and data sets"):
            first = check_study(selected, processes, replace)
        for line in studies.dry_run_lines(selected.study, selected.paths, first):
            console.print(line, soft_wrap=True, markup=False)
        return
    prepare_study(selected, processes, console, replace)
    if on_slurm is None:
        device = training.device or ("cpu" if gpus == 0 else None)
        local = studies.Local(jobs, gpu_names(gpus, device), device, training.nnunet_options)
        _run_here(local, selected, console)
    else:
        _submit(on_slurm, selected, slurm.wait, console)
        if not slurm.wait:
            return
    found = studies.states(selected.study, selected.paths).values()
    if any(state.stage is not studies.Stage.DONE for state in found):
        where = f"logs are in {selected.paths.logs}"
        stop(f"{studies.summary(found)}; {where}; run the same command again to continue")
    print(f"all done; next: nnunet-cpr study report {selected.study.name}")


def _run_here(executor: studies.Local, selected: SelectedStudy, console: Console) -> None:
    study, paths, folders, _ = selected
    found = studies.states(study, paths).values()
    if others := sum(state.stage is studies.Stage.RUNNING for state in found):
        console.print(f"{others} runs are trained by another command; this one waits for them")
    stopping = "stopping the trainings, which save their state; another Ctrl-C kills them"
    with studies.running_command(paths), live_table(selected, console, executor.at_once) as show:
        executor.run(
            *(list(study.runs()), paths, folders, show, lambda: console.print(stopping)),
            needed=studies.prerequisites(study, folders),
        )


def _submit(executor: studies.Slurm, selected: SelectedStudy, wait: bool, console: Console) -> None:
    study, paths, folders, _ = selected
    needed = studies.prerequisites(study, folders)
    numbers = executor.submit(list(study.runs()), paths, folders, needed)
    jobs = f"submitted {len(numbers)} jobs: {', '.join(numbers.values())}"
    console.print(jobs if numbers else "nothing to submit: every run is done, running or queued")
    advice = f"watch them: nnunet-cpr study status {study.name}"
    if wait:
        with report_errors(interrupted=f"stopped waiting, the jobs go on; {advice}"):
            watch(selected, console, {studies.Stage.RUNNING, studies.Stage.QUEUED})
    else:
        console.print(advice, soft_wrap=True, markup=False)


def gpu_names(count: int | None, device: str | None) -> list[str]:
    """Return this machine's GPUs, at most ``count``, as in ``CUDA_VISIBLE_DEVICES``."""
    visible = 0
    if device in (None, "cuda"):
        import torch

        visible = torch.cuda.device_count()
    if device == "cuda" and not visible:
        stop("--device: torch finds no CUDA device; run nnunet-cpr doctor for the reason")
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(visible)))
    if (count or 0) > visible:
        stop(f"--gpus: expected at most {visible} on this machine, got {count}")
    return [name.strip() for name in given.split(",")][:visible][:count]
