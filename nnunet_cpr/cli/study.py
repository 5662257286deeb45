"""``nnunet-cpr study``: cross-validation studies."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from nnunet_cpr.cli._completion import (
    complete_dataset,
    complete_preset,
    complete_saved_study,
    complete_study,
)
from nnunet_cpr.cli._errors import report_errors, stop
from nnunet_cpr.cli._options import (
    DEFAULT_PROCESSES,
    DeviceOption,
    ProcessesOption,
    parse_numbers,
)
from nnunet_cpr.cli._study_options import gpu_names, parse_minutes, parse_setting
from nnunet_cpr.cli._study_progress import current_table, finish, live_status, show_dry_run, watch

if TYPE_CHECKING:
    from nnunet_cpr.studies.definition import Study
    from nnunet_cpr.studies.run_state import StudyPaths

app = typer.Typer(
    no_args_is_help=True,
    help="Compare trainers by cross-validation: run the trainings, watch them, report the results.",
)


_STOPPED = "stopped; run the same command again to continue from the last checkpoints"


class _Executor(str, Enum):
    local = "local"
    slurm = "slurm"


class SelectedStudy(NamedTuple):
    """Study with the command's options applied.

    Attributes:
        paths: the study's folders.
        folders: those of nnU-Net's folders that are set, by the names of their environment variables.
        is_part: True if ``--folds`` or ``--seeds`` selects a part of the study.
    """

    study: Study
    paths: StudyPaths
    folders: dict[str, str]
    is_part: bool


_Argument = Annotated[
    str,
    typer.Argument(
        metavar="STUDY",
        help="YAML file, preset, or name of a study in nnUNet_results/studies.",
        autocompletion=complete_study,
    ),
]
_Name = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="Name, and so folder, instead of the study's.",
        autocompletion=complete_saved_study,
    ),
]

_NpzOption = Annotated[
    bool, typer.Option("--npz", help="nnU-Net's --npz: keep probabilities, for ensembles.")
]
_RESULTS = ("nnUNet_results",)


def _select_study(
    study: _Argument,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            "-d",
            help="Data set instead of the study's; may be repeated.",
            autocompletion=complete_dataset,
        ),
    ] = None,
    folds: Annotated[
        str | None, typer.Option(help="Folds instead of the study's, such as 0,1,2.")
    ] = None,
    configuration: Annotated[
        list[str] | None,
        typer.Option("--configuration", "-c", help="Configuration instead of the study's."),
    ] = None,
    plans: Annotated[
        list[str] | None, typer.Option("--plans", "-p", help="Plans instead of the study's.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds instead of the study's, such as 1,2,3.")
    ] = None,
    name: _Name = None,
    *,
    saved_first: bool = True,
) -> SelectedStudy:
    """Return the study that the options select.

    A study without a data set, such as ``quick``, keeps the one that it was run with. ``saved_first``
    prefers the study in ``nnUNet_results/studies`` to a preset of the same name, as it is what was run.
    """
    from nnunet_cpr.studies.definition import StudyError, load

    if sys.platform == "win32":
        raise StudyError("studies: expected Linux or macOS, got Windows; use WSL, as submitit needs it")
    from nnunet_cpr.studies.lookup import find_study, saved_file
    from nnunet_cpr.studies.preparation import dataset_name, nnunet_folders
    from nnunet_cpr.studies.run_state import StudyPaths

    folders = nnunet_folders(os.environ, _RESULTS)
    results = Path(folders["nnUNet_results"])
    studies = results / "studies"
    is_file = Path(study).is_file()
    if saved_first and name and not is_file and saved_file(studies, name).exists():
        study = name
    file = find_study(study, studies, saved_first)
    if not is_file and file == saved_file(studies, study):
        name = name or study
    loaded = load(str(file))
    previous = saved_file(studies, name or loaded.name)
    datasets = dataset or loaded.datasets
    if not datasets and previous.exists():
        datasets = load(str(previous)).datasets
    selected = loaded.changed(
        name or "",
        [dataset_name(each, folders) for each in datasets],
        parse_numbers("--folds", folds),
        configuration or (),
        plans or (),
        parse_numbers("--seeds", seeds),
    )
    paths = StudyPaths(results, studies / selected.name)
    return SelectedStudy(selected, paths, folders, is_part=bool(folds or seeds))


def _study_command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command whose first parameter is a :class:`SelectedStudy`.

    On the command line that parameter becomes the options of :func:`_select_study`.
    """
    shared = list(inspect.signature(_select_study, eval_str=True).parameters.values())[:-1]
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

    @functools.wraps(function)
    def command(**options: Any) -> None:
        with _study_errors(_STOPPED if function.__name__ == "run" else "stopped"):
            given = {each.name: options.pop(each.name) for each in shared}
            selected = _select_study(**given, saved_first=function.__name__ != "run")
            function(selected, **options)

    # Typer reads the options from these two.
    command.__signature__ = inspect.Signature(shared + own)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in shared + own}
    return app.command()(command)


@contextmanager
def _study_errors(interrupted: str = "stopped") -> Iterator[None]:
    from nnunet_cpr.nnunet.commands import CommandFailed
    from nnunet_cpr.studies.definition import StudyError

    with report_errors(StudyError, CommandFailed, OSError, interrupted=interrupted):
        yield


@app.command()
def presets() -> None:
    """List the studies that come with the package."""
    from nnunet_cpr.studies.definition import PRESETS, preset_names

    with report_errors(OSError):
        for name in preset_names():
            lines = (PRESETS / f"{name}.yaml").read_text().splitlines()
            description = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
            print(f"{name:<13}{description}")


@app.command("list")
def list_studies() -> None:
    """List the studies in nnUNet_results/studies with their progress."""
    from nnunet_cpr.studies.definition import StudyError, load
    from nnunet_cpr.studies.lookup import saved_file, saved_names
    from nnunet_cpr.studies.preparation import nnunet_folders
    from nnunet_cpr.studies.run_state import StudyPaths
    from nnunet_cpr.studies.status_table import states, summary

    with _study_errors():
        results = Path(nnunet_folders(os.environ, _RESULTS)["nnUNet_results"])
        studies = results / "studies"
        names = saved_names(studies)
        width = max([12, *map(len, names)])
        for name in names:
            try:
                study = load(str(saved_file(studies, name)))
                found = states(study, StudyPaths(results, studies / name))
            except (StudyError, OSError) as error:
                print(f"{name:<{width}} {error}")
                continue
            print(f"{name:<{width}} {summary(found.values())}; {', '.join(study.datasets)}")


@app.command()
def new(
    preset: Annotated[str, typer.Argument(help="Preset to start from.", autocompletion=complete_preset)],
    file: Annotated[Path, typer.Argument(help="New study file.")],
) -> None:
    """Copy a preset to a new study file."""
    from nnunet_cpr._files import atomic_write
    from nnunet_cpr.studies.definition import PRESETS, preset_names

    if preset not in preset_names():
        stop(f"unknown preset {preset!r}; choose from {', '.join(preset_names())}")
    with report_errors(OSError):
        if file.exists():
            stop(f"{file}: file exists; choose another name")
        with atomic_write(file) as temporary:
            temporary.write_bytes((PRESETS / f"{preset}.yaml").read_bytes())
    print(f"edit {file}, then: nnunet-cpr study run {file}")


@_study_command
def run(
    selected: SelectedStudy,
    executor: Annotated[_Executor, typer.Option(help="Where the trainings run.")] = _Executor.local,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", min=1, help="Trainings at the same time; default 1 (local) or 16 (slurm)."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=0, help="local: GPUs to share, all by default. slurm: GPUs of each job, 1 by default."
        ),
    ] = None,
    device: DeviceOption = None,
    npz: _NpzOption = False,
    processes: ProcessesOption = DEFAULT_PROCESSES,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.")] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            "--time",
            help="Slurm time limit of a job: minutes, hours:minutes:seconds or days-hours; default "
            "48:00:00.",
        ),
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(min=1, help="CPU cores of each Slurm job; default 12.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each Slurm job, such as 64G.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            help="Any other sbatch option, such as --sbatch account=me or --sbatch exclusive; may be "
            "repeated."
        ),
    ] = None,
    signal_delay: Annotated[
        int | None,
        typer.Option(
            min=10,
            help="Slurm: seconds before the time limit at which a job saves and requeues; default 90.",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Slurm: wait until all jobs have ended.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show the runs, the time and the disk space; write nothing, start nothing."
        ),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="With --dry-run: train a few iterations, in a temporary folder, where no earlier "
            "training gives the time.",
        ),
    ] = False,
) -> None:
    """Train and validate all unfinished runs. Run it again to continue after a stop."""
    from rich.console import Console

    from nnunet_cpr.studies.dry_run import preview
    from nnunet_cpr.studies.executors import Local, Slurm
    from nnunet_cpr.studies.lookup import save_study
    from nnunet_cpr.studies.preparation import check_study_data, prepare_study_data

    study, paths, folders, is_part = selected
    console = Console()
    for_slurm = {
        "--partition": ("partition", partition),
        "--time": ("minutes", time_limit and parse_minutes(time_limit)),
        "--cpus": ("cpus", cpus),
        "--memory": ("memory", memory),
        "--sbatch": ("settings", dict(parse_setting(text) for text in sbatch or [])),
        "--signal-delay": ("signal_delay", signal_delay),
    }
    given = {option: setting for option, setting in for_slurm.items() if setting[1]}
    if executor is _Executor.local and (given or wait):
        names = ", ".join([*given, *(["--wait"] if wait else [])])
        stop(f"{names}: expected --executor slurm as well")
    if measure and not dry_run:
        stop("--measure: expected --dry-run as well")
    options = ("--npz",) if npz else ()
    nnunet_device = None if device is None else device.value
    at_once = jobs or (1 if executor is _Executor.local else 16)
    slurm: Slurm | None = None
    if executor is _Executor.slurm:
        options_of_jobs: dict[str, Any] = dict(given.values())
        slurm = Slurm(
            **options_of_jobs, gpus=gpus, at_once=at_once, device=nnunet_device, options=options
        )
    with console.status("checking the trainers and data sets"):
        steps = check_study_data(study, folders, processes)
    if dry_run:
        found = preview(study, paths, folders, steps)
        gpu = gpu_names(gpus, nnunet_device) if measure else []
        show_dry_run(found, at_once, Local(1, gpu, nnunet_device) if measure else None, console)
        return
    paths.logs.mkdir(parents=True, exist_ok=True)
    with console.status("planning and preprocessing"):
        prepare_study_data(study, folders, paths.logs, processes)
    save_study(study, paths.study, is_part)
    runs = list(study.runs())
    if slurm is None:
        local = Local(at_once, gpu_names(gpus, nnunet_device), nnunet_device, options)
        stopping = "stopping the trainings, which save their state; another Ctrl-C kills them"
        with live_status(study, paths, console, at_once) as show:
            local.run(runs, paths, folders, show, on_stop=lambda: console.print(stopping))
    else:
        numbers = slurm.submit(runs, paths, folders)
        if numbers:
            console.print(f"submitted {len(numbers)} jobs: {', '.join(numbers.values())}")
        else:
            console.print("nothing to submit: every run is done, running or queued")
        if not wait:
            console.print(
                f"watch them: nnunet-cpr study status {study.name}", soft_wrap=True, markup=False
            )
            return
        waiting = f"stopped waiting, the jobs go on; watch them: nnunet-cpr study status {study.name}"
        with report_errors(interrupted=waiting):
            watch(study, paths, console, until_idle=True)
    finish(study, paths)


@_study_command
def commands(
    selected: SelectedStudy,
    all_runs: Annotated[bool, typer.Option("--all", help="Finished runs as well.")] = False,
    env: Annotated[
        bool,
        typer.Option(
            "--env",
            help="Set all nnUNet_* variables in each line and give the full path of nnunet-cpr, for "
            "jobs that do not inherit the environment.",
        ),
    ] = False,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of each training.")] = 1,
    device: DeviceOption = None,
    npz: _NpzOption = False,
    processes: ProcessesOption = DEFAULT_PROCESSES,
) -> None:
    """Print a shell command for each unfinished run, for any scheduler. Preprocesses the data first."""
    from rich.console import Console

    from nnunet_cpr.studies.command_lines import command_line
    from nnunet_cpr.studies.lookup import save_study
    from nnunet_cpr.studies.preparation import check_study_data, prepare_study_data
    from nnunet_cpr.studies.run_state import validation_dice

    study, paths, folders, is_part = selected
    console = Console(stderr=True)  # stdout has commands only
    with console.status("checking the trainers and data sets"):
        check_study_data(study, folders, processes)
    paths.logs.mkdir(parents=True, exist_ok=True)
    with console.status("planning and preprocessing"):
        prepare_study_data(study, folders, paths.logs, processes)
    save_study(study, paths.study, is_part)
    options = ["--npz"] if npz else []
    options += [] if device is None else ["--device", device.value]
    options += ["--gpus", str(gpus)] if gpus > 1 else []
    variables = {**{k: v for k, v in sorted(os.environ.items()) if k.startswith("nnUNet_")}, **folders}
    for each in study.runs():
        if all_runs or validation_dice(each.folder(paths.results)) is None:
            print(command_line(each, study.name, options, variables if env else None))


@app.command("run-one")
def run_one(
    study: Annotated[str, typer.Argument(help="Name of the study, for its logs.")],
    dataset: Annotated[str, typer.Argument(help="Name or number of the data set.")],
    configuration: Annotated[str, typer.Argument(help="Configuration, such as 3d_fullres.")],
    fold: Annotated[int, typer.Argument(min=0, help="Fold.")],
    trainer: Annotated[str, typer.Option("-tr", help="Trainer.")],
    plans: Annotated[str, typer.Option("-p", help="Plans.")] = "nnUNetPlans",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the training.")] = 1,
    device: DeviceOption = None,
    npz: _NpzOption = False,
) -> None:
    """Train or continue one run and validate it, as the lines of `study commands` do."""
    from nnunet_cpr.studies.definition import Run
    from nnunet_cpr.studies.preparation import dataset_name, nnunet_folders
    from nnunet_cpr.studies.run_state import StudyPaths
    from nnunet_cpr.studies.worker import Worker

    with _study_errors(_STOPPED):
        folders = nnunet_folders(os.environ)
        results = Path(folders["nnUNet_results"])
        run = Run(dataset_name(dataset, folders), configuration, plans, fold, trainer)
        options = ("--npz",) if npz else ()
        several = ("-num_gpus", str(gpus)) if gpus > 1 else ()
        paths = StudyPaths(results, results / "studies" / study)
        nnunet_device = None if device is None else device.value
        worker = Worker(run, paths, nnunet_device, folders, (*options, *several))
        try:
            result = worker()
        except SystemExit:  # a signal has stopped the training
            print(f"nnunet-cpr: {_STOPPED}", file=sys.stderr)
            raise
        busy = "nothing done, as another process works on it"
        print(f"{run.key}: {busy if result == 'busy' else result}", file=sys.stderr)


@_study_command
def status(
    selected: SelectedStudy,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and exit.")] = False,
) -> None:
    """Show the progress of a study until all runs have ended."""
    from rich.console import Console

    study, paths = selected.study, selected.paths
    console = Console()
    if once or not console.is_terminal:
        console.print(current_table(study, paths))
    else:
        watch(study, paths, console, until_idle=False)


@_study_command
def report(
    selected: SelectedStudy,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the report, not the study's own.")
    ] = None,
) -> None:
    """Compare the finished runs: tables, statistics, and an HTML page.

    Needs nnUNet_results only; pictures of cases and surface metrics need the data as well.
    """
    from rich.console import Console

    from nnunet_cpr.reports import write_report

    study, paths, folders = selected.study, selected.paths, selected.folders
    data = [folders.get(name) for name in ("nnUNet_raw", "nnUNet_preprocessed")]
    raw, preprocessed = (Path(folder) if folder else None for folder in data)
    console = Console()
    folder = output or paths.study / "report"
    for file in write_report(study, paths.results, raw, preprocessed, folder, console):
        console.print(f"wrote {file}", soft_wrap=True, markup=False)


@app.command()
def cancel(study: _Argument, name: _Name = None) -> None:
    """Cancel a study's jobs in Slurm's queue; finished epochs are kept."""
    from nnunet_cpr.studies.executors import cancel_slurm_jobs

    with _study_errors():
        print(f"{cancel_slurm_jobs(_select_study(study, name=name).paths)} jobs cancelled")
