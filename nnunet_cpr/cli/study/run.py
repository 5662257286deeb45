"""``nnunet-cpr study run``, ``commands`` and ``run-one``: train and validate the runs of a study."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, fields
from datetime import timedelta
from math import ceil
from typing import Annotated, Literal

from rich.console import Console
from typer import Argument, Option

from nnunet_cpr import studies
from nnunet_cpr.cli.errors import report_errors
from nnunet_cpr.cli.study.options import STOPPED, PreparationOptions, SelectedStudy, TrainingOptions
from nnunet_cpr.cli.study.plan import look_ahead, print_outlook
from nnunet_cpr.cli.study.status import live_table, watch
from nnunet_cpr.refusals import Refusal, counted

_OURS = {"signal": "--signal-delay", "time": "--time", "array": "--jobs"}
"""Options of sbatch that a job relies on, and ours that set them."""


@dataclass(frozen=True)
class SlurmOptions:
    """Options of Slurm jobs."""

    partition: Annotated[str | None, Option(help="Slurm partition.")] = None
    time: Annotated[str, Option(help="Time limit of a Slurm job, such as 24:00:00 or 2-0.")] = "48:00:00"
    cpus: Annotated[int, Option(min=1, help="CPU cores of each Slurm job.")] = 12
    memory: Annotated[str | None, Option(help="Memory of each Slurm job, such as 64G.")] = None
    sbatch: Annotated[
        list[str] | None, Option(help="Other option of sbatch, such as account=me; repeatable.")
    ] = None
    signal_delay: Annotated[int, Option(min=10, help="Seconds before the time limit to requeue.")] = 90
    wait: Annotated[bool, Option("--wait", help="Wait until all Slurm jobs have ended.")] = False


@dataclass(frozen=True)
class RunOptions(SlurmOptions, PreparationOptions):
    """Options of ``study run``."""

    executor: Annotated[Literal["local", "slurm"], Option(help="Where to train.")] = "local"
    jobs: Annotated[
        int | None, Option("--jobs", "-j", min=1, help="Trainings at a time: 1, or 16 on Slurm.")
    ] = None
    gpus: Annotated[
        int | None, Option(min=0, help="GPUs to share, by default all; on Slurm of each job, 1.")
    ] = None
    num_gpus: Annotated[int | None, Option("-num_gpus", hidden=True)] = None
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show the commands and training steps; change nothing.")
    ] = False

    def given_for_slurm(self) -> list[str]:
        """Return the names of the options of Slurm that differ from their defaults."""
        names = [f.name for f in fields(SlurmOptions) if getattr(self, f.name) != f.default]
        return [f"--{name.replace('_', '-')}" for name in names]

    def slurm(self) -> studies.Slurm:
        """Return the executor for Slurm.

        Raises:
            Refusal: the time limit or an option is invalid.
        """
        gpus = 1 if self.gpus is None else self.gpus
        minutes = parse_minutes(self.time)
        if 60 * minutes <= self.signal_delay:
            raise Refusal(
                f"--time: expected more than the {self.signal_delay} s before its end at which a job "
                f"requeues, got {60 * minutes} s",
                "give a longer one or a shorter --signal-delay",
            )
        given: dict[str, str | bool] = {}
        for option in self.sbatch or ():
            name, _, value = option.removeprefix("--").partition("=")
            given[name.replace("-", "_")] = value or True
        for name, option in _OURS.items():
            if name in given:
                raise Refusal(f"--sbatch {name}: jobs need one of ours", f"use {option}")
        if "?" in str(given.get("dependency")):
            raise Refusal(
                "--sbatch dependency: expected conditions that all must hold, as stages of a study "
                f"add theirs, got {given['dependency']!r}",
                "replace '?' by ','",
            )
        requests_gpus = any(
            name.startswith("gpus") or (name in ("gres", "tres_per_task") and "gpu" in str(value))
            for name, value in given.items()
        )
        settings: dict[str, str | int | bool | None] = {
            "partition": self.partition,
            "mem": self.memory,
            "cpus_per_task": None if "cpus_per_gpu" in given else self.cpus,
            "gpus_per_node": None if requests_gpus else gpus,
            **given,
        }
        return studies.Slurm(
            settings={name: value for name, value in settings.items() if value},
            minutes=minutes,
            gpus=gpus,
            at_once=self.jobs or 16,
            signal_delay=self.signal_delay,
            device=self.device,
            options=self.nnunet_options,
        )


def parse_minutes(text: str) -> int:
    """Parse Slurm's minutes[:seconds], hours:minutes:seconds or days-hours[:minutes[:seconds]].

    Raises:
        Refusal: it is anything else.

    Example:
        >>> parse_minutes("90"), parse_minutes("24:00:00"), parse_minutes("2-12")
        (90, 1440, 3600)
    """
    matched = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d\d?))?(?::(\d\d?))?", text, re.ASCII)
    if not matched:
        raise Refusal(
            f"--time: expected minutes, hours:minutes:seconds or days-hours:minutes, got {text!r}"
        )
    days, hours, minutes, seconds = (int(number or 0) for number in matched.groups())
    if not (matched[1] or matched[4]):
        hours, minutes, seconds = 0, hours, minutes  # the first number is minutes
    limit = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    return max(1, ceil(limit / timedelta(minutes=1)))


def run(options: RunOptions) -> None:
    """Train and validate all unfinished runs. Run it again to continue after a stop."""
    selected, console = options.select(saved_first=False), Console()
    if options.executor == "local" and options.given_for_slurm():
        raise Refusal(f"{', '.join(options.given_for_slurm())}: expected --executor slurm as well")
    if options.num_gpus is not None:
        raise Refusal(
            f"-num_gpus: expected --gpus {options.num_gpus}, GPUs to share, or on Slurm of each job"
        )
    slurm = options.slurm() if options.executor == "slurm" else None
    if options.dry_run:
        with console.status("checking the trainers and data sets"):
            first = options.check(selected)
        for line in studies.dry_run_lines(selected.study, selected.paths, first):
            console.print(line, soft_wrap=True, markup=False)
        print_outlook(look_ahead(selected), console)
        return
    options.prepare(selected, console)
    before = studies.states(selected.study, selected.paths).values()
    if any(state.stage is not studies.Stage.DONE for state in before):
        print_outlook(look_ahead(selected), console)
    if slurm is None:
        device = options.device or ("cpu" if options.gpus == 0 else None)
        gpus = gpu_names(options.gpus, device)
        local = studies.Local(options.jobs or 1, gpus, device, options.nnunet_options)
        _run_here(local, selected, console)
    else:
        _submit(slurm, selected, options.wait, console)
        if not options.wait:
            return
    found = studies.states(selected.study, selected.paths).values()
    if any(state.stage is not studies.Stage.DONE for state in found):
        where = f"logs are in {selected.paths.logs}"
        raise Refusal(f"{studies.summary(found)}; {where}", "run the same command again to continue")
    print(f"all done; next: nnunet-cpr study report {selected.study.name}")


def _run_here(executor: studies.Local, selected: SelectedStudy, console: Console) -> None:
    study, paths, folders = selected
    found = studies.states(study, paths).values()
    if others := sum(state.stage is studies.Stage.RUNNING for state in found):
        console.print(f"another command trains {others} of the runs; this one waits for them")
    stopping = "stopping the trainings, which save their state; another Ctrl-C kills them"
    with studies.running_command(paths), live_table(selected, console, executor.at_once) as show:
        needed = studies.prerequisites(study, folders)
        executor.run([*study.runs()], paths, folders, show, lambda: console.print(stopping), needed)


def _submit(executor: studies.Slurm, selected: SelectedStudy, wait: bool, console: Console) -> None:
    study, paths, folders = selected
    needed = studies.prerequisites(study, folders)
    numbers = executor.submit(list(study.runs()), paths, folders, needed)
    jobs = f"submitted {counted(len(numbers), 'job')}: {', '.join(numbers.values())}"
    console.print(jobs if numbers else "nothing to submit: every run is done, running or queued")
    advice = f"watch them: nnunet-cpr study status {study.name}"
    if wait:
        with report_errors(f"stopped waiting, the jobs go on; {advice}"):
            watch(selected, console, {studies.Stage.RUNNING, studies.Stage.QUEUED})
    else:
        console.print(advice, soft_wrap=True, markup=False)


def gpu_names(count: int | None, device: str | None) -> list[str]:
    """Return this machine's GPUs, at most ``count``, as in ``CUDA_VISIBLE_DEVICES``."""
    if device not in (None, "cuda"):
        return []
    import torch

    visible = torch.cuda.device_count()
    if device == "cuda" and not visible:
        raise Refusal("--device: torch finds no CUDA device", "run nnunet-cpr doctor for the reason")
    if (count or 0) > visible:
        raise Refusal(f"--gpus: expected at most {visible} on this machine, got {count}")
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(visible)))
    return [name.strip() for name in given.split(",")][:visible][:count]


def commands(
    options: PreparationOptions,
    all_runs: Annotated[bool, Option("--all", help="Finished runs as well.")] = False,
    gpus: Annotated[int, Option("--gpus", "-num_gpus", min=1, help="GPUs of each training.")] = 1,
) -> None:
    """Print a shell command for each unfinished run, for any scheduler. Preprocesses the data first."""
    selected = options.select()
    options.prepare(selected, Console(stderr=True))  # stdout has commands only
    given = [*options.nnunet_options]
    given += ["--device", options.device] if options.device else []
    given += ["--gpus", str(gpus)] if gpus > 1 else []
    variables = {key: value for key, value in sorted(os.environ.items()) if key.startswith("nnUNet_")}
    needed = studies.prerequisites(selected.study, selected.folders)
    for run in sorted(selected.study.runs(), key=needed.__contains__):  # cascades come last
        if all_runs or studies.finished(run, selected.paths) is None:
            name = selected.study.name
            print(studies.command_line(run, name, given, variables | selected.folders))


def run_one(
    options: TrainingOptions,
    study: Annotated[str, Argument(help="Name of the study, for its logs.")],
    dataset: Annotated[str, Argument(help="Name or number of the data set.")],
    configuration: Annotated[str, Argument(help="Configuration, such as 3d_fullres.")],
    fold: Annotated[int, Argument(min=0, help="Fold.")],
    trainer: Annotated[str, Option("-tr", help="Trainer.")],
    plans: Annotated[str, Option("-p", help="Plans.")] = "nnUNetPlans",
    pretrained: Annotated[
        str, Option("--pretrained", "-pretrained_weights", help="Checkpoint to begin with.")
    ] = "",
    gpus: Annotated[int, Option("--gpus", "-num_gpus", min=1, help="GPUs of the training.")] = 1,
) -> None:
    """Train or continue one run and validate it, as the lines of `study commands` do."""
    folders = studies.nnunet_folders(os.environ)
    paths = studies.StudyPaths.of(study, folders)
    name = studies.dataset_name(dataset, folders)
    run = studies.Run(name, configuration, plans, fold, trainer, pretrained=pretrained)
    several = ("-num_gpus", str(gpus)) if gpus > 1 else ()
    worker = studies.Worker(run, paths, options.device, folders, (*options.nnunet_options, *several))
    try:
        is_done = worker()
    except SystemExit:  # a signal has stopped the training
        print(f"nnunet-cpr: {STOPPED}", file=sys.stderr)
        raise
    outcome = "done" if is_done else "nothing done, as another process works on it"
    print(f"{run.key}: {outcome}", file=sys.stderr)
