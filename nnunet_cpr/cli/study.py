"""``nnunet-cpr study``: cross-validation studies."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from nnunet_cpr.cli._errors import report_errors, stop

if TYPE_CHECKING:
    from nnunet_cpr.studies.definition import Study
    from nnunet_cpr.studies.run_state import StudyPaths

app = typer.Typer(
    no_args_is_help=True,
    help="Compare trainers by cross-validation: run the trainings, watch them, report the results.",
)


class _Executor(str, Enum):
    local = "local"
    slurm = "slurm"


class _Device(str, Enum):
    cuda = "cuda"
    cpu = "cpu"
    mps = "mps"


class SelectedStudy(NamedTuple):
    """Study with the command's options applied.

    Attributes:
        argument: the study as given on the command line.
        paths: the study's folders.
        folders: nnU-Net's folders by the names of their environment variables.
    """

    argument: str
    study: Study
    paths: StudyPaths
    folders: dict[str, str]


_Argument = Annotated[str, typer.Argument(metavar="STUDY", help="YAML file or name of a preset.")]
_Name = Annotated[
    str | None, typer.Option("--name", help="Name, and so folder, instead of the study's.")
]


def _select_study(
    study: _Argument,
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", "-d", help="Data set instead of the study's; may be repeated."),
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
) -> SelectedStudy:
    """Return the study that the options select.

    A study without a data set, such as ``quick``, keeps the one that it was run with.
    """
    from nnunet_cpr.studies.definition import StudyError, load

    if sys.platform == "win32":
        raise StudyError("studies: expected Linux or macOS, got Windows; use WSL, as submitit needs it")
    from nnunet_cpr.studies.preparation import dataset_name, nnunet_folders
    from nnunet_cpr.studies.run_state import StudyPaths

    folders = nnunet_folders(os.environ)
    results = Path(folders["nnUNet_results"])
    loaded = load(study)
    previous = results / "studies" / (name or loaded.name) / "study.yaml"
    if not loaded.datasets and not dataset and previous.exists():
        loaded = load(str(previous))
    selected = loaded.changed(
        name or "",
        [dataset_name(each, folders) for each in dataset or loaded.datasets],
        _numbers("--folds", folds),
        configuration or (),
        plans or (),
        _numbers("--seeds", seeds),
    )
    paths = StudyPaths(results, results / "studies" / selected.name)
    return SelectedStudy(study, selected, paths, folders)


def _numbers(option: str, text: str | None) -> list[int]:
    from nnunet_cpr.studies.definition import StudyError

    try:
        return [int(number) for number in text.split(",")] if text else []
    except ValueError:
        raise StudyError(f"{option}: expected numbers such as 0,1,2, got {text!r}") from None


def _study_command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command whose first parameter is a :class:`SelectedStudy`.

    On the command line that parameter becomes the options of :func:`_select_study`.
    """
    shared = list(inspect.signature(_select_study, eval_str=True).parameters.values())
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

    @functools.wraps(function)
    def command(**options: Any) -> None:
        with _study_errors():
            selected = _select_study(**{each.name: options.pop(each.name) for each in shared})
            function(selected, **options)

    # Typer reads the options from these two.
    command.__signature__ = inspect.Signature(shared + own)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in shared + own}
    return app.command()(command)


@contextmanager
def _study_errors() -> Iterator[None]:
    from nnunet_cpr.nnunet.commands import CommandFailed
    from nnunet_cpr.studies.definition import StudyError

    interrupted = "stopped; run the same command again to continue from the last checkpoints"
    with report_errors(StudyError, CommandFailed, OSError, interrupted=interrupted):
        yield


@app.command()
def presets() -> None:
    """List the studies that come with the package."""
    from nnunet_cpr.studies.definition import PRESETS, preset_names

    for name in preset_names():
        lines = (PRESETS / f"{name}.yaml").read_text().splitlines()
        description = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
        print(f"{name:<13}{description}")


@app.command()
def new(
    preset: Annotated[str, typer.Argument(help="Preset to start from.")],
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
    device: Annotated[
        _Device | None, typer.Option(help="nnU-Net's -device; by default a GPU if there is one.")
    ] = None,
    npz: Annotated[
        bool, typer.Option("--npz", help="nnU-Net's --npz: keep probabilities, for ensembles.")
    ] = False,
    processes: Annotated[
        int, typer.Option("--processes", "-np", min=1, help="Processes for preprocessing.")
    ] = max(1, min(8, (os.cpu_count() or 1) // 2)),
    partition: Annotated[str | None, typer.Option(help="Slurm partition.")] = None,
    time_limit: Annotated[
        str,
        typer.Option(
            "--time", help="Slurm time limit of a job: minutes, hours:minutes:seconds or days-hours."
        ),
    ] = "48:00:00",
    cpus: Annotated[int, typer.Option(min=1, help="CPU cores of each Slurm job.")] = 12,
    memory: Annotated[str | None, typer.Option(help="Memory of each Slurm job, such as 64G.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="Any other sbatch option, such as --sbatch account=me; may be repeated."),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Slurm: wait until all jobs have ended.")] = False,
) -> None:
    """Train and validate all unfinished runs. Run it again to continue after a stop."""
    from rich.console import Console

    from nnunet_cpr.studies.definition import save
    from nnunet_cpr.studies.executors import Local, Slurm
    from nnunet_cpr.studies.preparation import prepare_study_data

    argument, study, paths, folders = selected
    console = Console()
    minutes = _parse_minutes(time_limit)
    settings = dict(_parse_setting(text) for text in sbatch or [])
    paths.logs.mkdir(parents=True, exist_ok=True)
    with console.status("planning and preprocessing"):
        prepare_study_data(study, folders, paths.logs, processes)
    save(study, paths.study / "study.yaml")
    runs = list(study.runs())
    options = ("--npz",) if npz else ()
    nnunet_device = None if device is None else device.value
    if executor is _Executor.local:
        local = Local(jobs or 1, _gpu_names(gpus, nnunet_device), nnunet_device, options)
        with _live_status(study, paths, console) as show:
            local.run(runs, paths, folders, show)
    else:
        slurm = Slurm(
            partition=partition, minutes=minutes, gpus=1 if gpus is None else gpus, cpus=cpus,
            memory=memory, at_once=jobs or 16, settings=settings, device=nnunet_device, options=options,
        )  # fmt: skip
        numbers = slurm.submit(runs, paths, folders)
        if numbers:
            console.print(f"submitted {len(numbers)} jobs: {', '.join(numbers.values())}")
        else:
            console.print("nothing to submit: every run is done, running or queued")
        if not wait:
            console.print(
                f"watch them: nnunet-cpr study status {argument}", soft_wrap=True, markup=False
            )
            return
        _watch(study, paths, console, until_idle=True)
    _finish(selected)


@_study_command
def status(
    selected: SelectedStudy,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and exit.")] = False,
) -> None:
    """Show the progress of a study until all runs have ended."""
    from rich.console import Console

    from nnunet_cpr.studies.status_table import states, status_table

    _, study, paths, _ = selected
    console = Console()
    if once or not console.is_terminal:
        console.print(status_table(study, states(study, paths)))
    else:
        _watch(study, paths, console, until_idle=False)


@_study_command
def report(
    selected: SelectedStudy,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the report, not the study's own.")
    ] = None,
) -> None:
    """Compare the finished runs: tables, statistics, and an HTML page."""
    from rich.console import Console

    from nnunet_cpr.reports import write_report

    _, study, paths, folders = selected
    raw, preprocessed = Path(folders["nnUNet_raw"]), Path(folders["nnUNet_preprocessed"])
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


@contextmanager
def _live_status(study: Study, paths: StudyPaths, console: Any) -> Iterator[Callable[[], None]]:
    """Yield a function that shows the status: as a live table, or as a line when it has changed."""
    from rich.live import Live

    from nnunet_cpr.studies.status_table import states, status_table, summary

    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda: live.update(status_table(study, states(study, paths)), refresh=True)
        return
    printed = ""

    def print_changes() -> None:
        nonlocal printed
        line = summary(states(study, paths).values())
        if line != printed:
            printed = line
            console.print(line)

    yield print_changes


def _watch(study: Study, paths: StudyPaths, console: Any, until_idle: bool) -> None:
    """Show the status until no run is running or queued, or else until all are done or failed."""
    from nnunet_cpr.studies.run_state import Stage
    from nnunet_cpr.studies.status_table import states

    busy = {Stage.RUNNING, Stage.QUEUED}
    if not until_idle:
        busy |= {Stage.WAITING, Stage.STOPPED}
    with _live_status(study, paths, console) as show:
        while any(state.stage in busy for state in states(study, paths).values()):
            show()
            time.sleep(2)
        show()


def _finish(selected: SelectedStudy) -> None:
    """Print the next step, or the failures with exit status 1."""
    from nnunet_cpr.studies.run_state import Stage
    from nnunet_cpr.studies.status_table import states, summary

    argument, study, paths, _ = selected
    found = states(study, paths)
    for run, state in found.items():
        if state.stage is Stage.FAILED:
            print(f"failed: {run.key}, see {paths.log(run)}", *state.reason, sep="\n  ", file=sys.stderr)
    if any(state.stage is not Stage.DONE for state in found.values()):
        stop(f"{summary(found.values())}; run the same command again to continue")
    print(f"all done; next: nnunet-cpr study report {argument}")


def _gpu_names(count: int | None, device: str | None) -> list[str]:
    """Return this machine's GPUs, at most ``count``, as in ``CUDA_VISIBLE_DEVICES``."""
    if device not in (None, "cuda"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
    else:
        import torch

        names = [str(i) for i in range(torch.cuda.device_count())]
    if count is not None and count > len(names):
        stop(f"--gpus: expected at most {len(names)} on this machine, got {count}")
    return names[:count]


def _parse_minutes(text: str) -> int:
    """Parse Slurm's minutes[:seconds], hours:minutes:seconds or days-hours[:minutes[:seconds]]."""
    from nnunet_cpr.studies.definition import StudyError

    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    written = [*parts, days if dash else "0"]
    if not all(re.fullmatch("[0-9]{1,6}", number) for number in written) or len(parts) > 3:
        raise StudyError(
            f"--time: expected minutes, hours:minutes:seconds or days-hours:minutes, got {text!r}"
        )
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return max(1, (int(days or 0) * 24 + hours) * 60 + minutes + (1 if seconds else 0))


def _parse_setting(text: str) -> tuple[str, str]:
    from nnunet_cpr.studies.definition import StudyError

    key, equals, value = text.lstrip("-").partition("=")
    if not key or not equals:
        raise StudyError(f"--sbatch: expected KEY=VALUE, got {text!r}")
    return key, value
