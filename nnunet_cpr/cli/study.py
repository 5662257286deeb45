"""``nnunet-cpr study``: cross-validation studies."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnunet_cpr.cli._errors import stop

if TYPE_CHECKING:
    from nnunet_cpr.studies.definition import Study
    from nnunet_cpr.studies.state import Places

app = typer.Typer(
    no_args_is_help=True,
    help="Compare trainers by cross-validation: run the trainings, watch them, report on them.",
)


class _Executor(str, Enum):
    local = "local"
    slurm = "slurm"


class _Device(str, Enum):
    cuda = "cuda"
    cpu = "cpu"
    mps = "mps"


_Name = Annotated[str, typer.Argument(metavar="STUDY", help="A YAML file, or a preset's name.")]
_Dataset = Annotated[
    list[str] | None,
    typer.Option("--dataset", "-d", help="Data set instead of the study's; may be given again."),
]
_Folds = Annotated[str | None, typer.Option(help="Folds instead of the study's, such as 0,1,2.")]
_Configuration = Annotated[
    list[str] | None, typer.Option("--configuration", "-c", help="Configuration instead of the study's.")
]
_Plans = Annotated[list[str] | None, typer.Option("--plans", "-p", help="Plans instead of the study's.")]
_Rename = Annotated[str | None, typer.Option("--name", help="A name of its own, and so a folder.")]


@app.command()
def presets() -> None:
    """List the studies that come with the package."""
    from nnunet_cpr.studies.definition import PRESETS
    from nnunet_cpr.studies.definition import presets as names

    for name in names():
        comment = (PRESETS / f"{name}.yaml").read_text().splitlines()
        about = " ".join(line[1:].strip() for line in comment if line.startswith("#"))
        print(f"{name:<13}{about}")


@app.command()
def new(
    preset: Annotated[str, typer.Argument(help="The preset to start from.")],
    file: Annotated[Path, typer.Argument(help="The new study.")],
) -> None:
    """Copy a preset into a file to edit."""
    from nnunet_cpr._files import atomic_write
    from nnunet_cpr.studies.definition import PRESETS
    from nnunet_cpr.studies.definition import presets as names

    if preset not in names():
        stop(f"there is no preset {preset!r}; there are {', '.join(names())}")
    with _told():
        if file.exists():
            stop(f"{file} is there already")
        with atomic_write(file) as temporary:
            temporary.write_bytes((PRESETS / f"{preset}.yaml").read_bytes())
    print(f"edit {file}, then: nnunet-cpr study run {file}")


@app.command()
def run(
    study: _Name,
    dataset: _Dataset = None,
    folds: _Folds = None,
    configuration: _Configuration = None,
    plans: _Plans = None,
    name: _Rename = None,
    executor: Annotated[_Executor, typer.Option(help="Where the trainings run.")] = _Executor.local,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Trainings at once: 1 here, 16 on Slurm by default."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Here: GPUs to share out, all by default. On Slurm: GPUs of each job, 1 by default.",
        ),
    ] = None,
    device: Annotated[
        _Device | None, typer.Option(help="nnU-Net's -device; by default a GPU where there is one.")
    ] = None,
    npz: Annotated[
        bool, typer.Option("--npz", help="nnU-Net's --npz: keep probabilities, for ensembles.")
    ] = False,
    processes: Annotated[
        int, typer.Option("--processes", "-np", min=1, help="Processes that preprocess.")
    ] = max(1, min(8, (os.cpu_count() or 1) // 2)),
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    time_limit: Annotated[
        str,
        typer.Option(
            "--time", help="Slurm's time limit of a job: minutes, hours:minutes:seconds or days-hours."
        ),
    ] = "48:00:00",
    cpus: Annotated[int, typer.Option(min=1, help="CPU cores of each job on Slurm.")] = 12,
    memory: Annotated[str | None, typer.Option(help="Memory of each job on Slurm, such as 64G.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            help="Any other setting of sbatch, such as --sbatch account=me; may be given again."
        ),
    ] = None,
    wait: Annotated[bool, typer.Option(help="On Slurm: stay until all jobs have ended.")] = False,
) -> None:
    """Train and validate what is not done yet. Stopped and run again, it goes on."""
    from rich.console import Console

    from nnunet_cpr.studies.definition import save
    from nnunet_cpr.studies.preparation import prepare
    from nnunet_cpr.studies.running import Local, Slurm

    with _told():
        what, places, folders = _study(study, dataset, folds, configuration, plans, name)
        console = Console()
        minutes = _minutes(time_limit)
        settings = dict(_setting(text) for text in sbatch or [])
        (places.study / "logs").mkdir(parents=True, exist_ok=True)
        with console.status("planning and preprocessing what is not yet"):
            prepare(what, folders, places.study / "logs", processes)
        save(what, places.study / "study.yaml")
        cells = list(what.cells())
        options = ("--npz",) if npz else ()
        where = None if device is None else device.value
        if executor is _Executor.slurm:
            cluster = Slurm(
                partition=partition, minutes=minutes, gpus=1 if gpus is None else gpus, cpus=cpus,
                memory=memory, at_once=jobs or 16, settings=settings, device=where, options=options,
            )  # fmt: skip
            numbers = cluster.submit(cells, places, folders)
            console.print(
                f"submitted {len(numbers)} jobs: {', '.join(numbers.values())}"
                if numbers
                else "nothing to submit: every training is done, running or queued"
            )
            if not wait:
                console.print(
                    f"watch them: nnunet-cpr study status {study}", soft_wrap=True, markup=False
                )
                return
            _watch(what, places, console, until_idle=True)
        else:
            with _live(what, places, console) as show:
                here = Local(jobs or 1, _gpus(gpus, where), where, options)
                here.run(cells, places, folders, show)
        _finish(what, places, study)


@app.command()
def status(
    study: _Name,
    dataset: _Dataset = None,
    folds: _Folds = None,
    configuration: _Configuration = None,
    plans: _Plans = None,
    name: _Rename = None,
    once: Annotated[bool, typer.Option("--once", help="Print the table and end.")] = False,
) -> None:
    """Show how far a study is, live until all of it has ended or Ctrl-C."""
    from rich.console import Console

    from nnunet_cpr.studies.status import states, table

    with _told():
        what, places, _ = _study(study, dataset, folds, configuration, plans, name)
        console = Console()
        if once or not console.is_terminal:
            console.print(table(what, states(what, places)))
        else:
            _watch(what, places, console, until_idle=False)


@app.command()
def report(
    study: _Name,
    dataset: _Dataset = None,
    folds: _Folds = None,
    configuration: _Configuration = None,
    plans: _Plans = None,
    name: _Rename = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the files, not the study's own.")
    ] = None,
) -> None:
    """Compare what has been trained: tables, statistics, and a page to look at."""
    from rich.console import Console

    from nnunet_cpr.reports import ReportError, write_report

    with _told():
        what, places, folders = _study(study, dataset, folds, configuration, plans, name)
        target = output or places.study / "report"
        raw, preprocessed = Path(folders["nnUNet_raw"]), Path(folders["nnUNet_preprocessed"])
        console = Console()
        try:
            files = write_report(what, places.results, raw, preprocessed, target, console)
        except ReportError as error:
            stop(str(error))
        for file in files:
            console.print(f"to look at: {file}", soft_wrap=True, markup=False)


@app.command()
def cancel(study: _Name, name: _Rename = None) -> None:
    """Take a study's jobs out of Slurm's queue; what they have trained stays."""
    from nnunet_cpr.studies.running import cancel_slurm_jobs

    with _told():
        _, places, _ = _study(study, None, None, None, None, name)
        print(f"{cancel_slurm_jobs(places)} jobs cancelled")


# What the commands share


def _study(
    given: str,
    datasets: list[str] | None,
    folds: str | None,
    configurations: list[str] | None,
    plans: list[str] | None,
    name: str | None,
) -> tuple[Study, Places, dict[str, str]]:
    """The study with the options applied, its places, and nnU-Net's folders.

    A study without a data set of its own, such as ``quick``, keeps the one that it was run with.
    """
    from nnunet_cpr.studies.definition import StudyError, load

    if sys.platform == "win32":
        raise StudyError("studies run on Linux and macOS; on Windows use WSL, as submitit needs it")
    from nnunet_cpr.studies.preparation import dataset_name, nnunet_folders
    from nnunet_cpr.studies.state import Places

    folders = nnunet_folders(os.environ)
    home = Path(folders["nnUNet_results"]) / "studies"
    study = load(given)
    kept = home / (name or study.name) / "study.yaml"
    if not study.datasets and not datasets and kept.exists():
        study = load(str(kept))
    try:
        numbers = [int(number) for number in folds.split(",")] if folds else []
    except ValueError:
        raise StudyError(f"--folds must be numbers such as 0,1,2, not {folds!r}") from None
    study = study.changed(
        name or "",
        [dataset_name(str(each), folders) for each in datasets or study.datasets],
        numbers,
        configurations or (),
        plans or (),
    )
    return study, Places(Path(folders["nnUNet_results"]), home / study.name), folders


@contextmanager
def _live(study: Study, places: Places, console: Any) -> Iterator[Callable[[], None]]:
    """A live table where there is a terminal, else a line whenever something has changed."""
    from rich.live import Live

    from nnunet_cpr.studies.status import states, summary, table

    if console.is_terminal:
        with Live(table(study, states(study, places)), console=console, auto_refresh=False) as live:
            yield lambda: live.update(table(study, states(study, places)), refresh=True)
        return
    said = ""

    def say() -> None:
        nonlocal said
        now = summary(states(study, places).values())
        if now != said:
            said = now
            console.print(now)

    yield say


def _watch(study: Study, places: Places, console: Any, until_idle: bool) -> None:
    """Show the study until nothing of it waits, or, without that, until all is done or failed."""
    from nnunet_cpr.studies.state import Stage
    from nnunet_cpr.studies.status import states

    busy = {Stage.RUNNING, Stage.QUEUED}
    if not until_idle:
        busy |= {Stage.WAITING, Stage.STOPPED}
    with _live(study, places, console) as show:
        while any(state.stage in busy for state in states(study, places).values()):
            show()
            time.sleep(2)
        show()


def _finish(study: Study, places: Places, given: str) -> None:
    """Say what to do next; exit status 1 when a cell has failed."""
    from nnunet_cpr.studies.state import Stage
    from nnunet_cpr.studies.status import states, summary

    found = states(study, places)
    for cell, state in found.items():
        if state.stage is Stage.FAILED:
            print(f"failed: {cell.key}, see {places.log(cell)}", *state.why, sep="\n  ", file=sys.stderr)
    if any(state.stage is not Stage.DONE for state in found.values()):
        stop(f"{summary(found.values())}; run the same command again to go on")
    print(f"all done; the results: nnunet-cpr study report {given}")


def _gpus(count: int | None, device: str | None) -> list[str]:
    """The names of this machine's GPUs, as many as are wanted, as CUDA_VISIBLE_DEVICES takes them."""
    if device not in (None, "cuda"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
    else:
        import torch

        names = [str(i) for i in range(torch.cuda.device_count())]
    if count is not None and count > len(names):
        stop(f"--gpus {count}: this machine has {len(names)}")
    return names[:count]


def _minutes(text: str) -> int:
    """Slurm's times: minutes[:seconds], hours:minutes:seconds or days-hours[:minutes[:seconds]]."""
    from nnunet_cpr.studies.definition import StudyError

    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    written = [*parts, days if dash else "0"]
    if not all(re.fullmatch("[0-9]{1,6}", number) for number in written) or len(parts) > 3:
        raise StudyError(
            f"--time must be minutes, hours:minutes:seconds or days-hours:minutes, not {text!r}"
        )
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return max(1, (int(days or 0) * 24 + hours) * 60 + minutes + (1 if seconds else 0))


def _setting(text: str) -> tuple[str, str]:
    from nnunet_cpr.studies.definition import StudyError

    key, equals, value = text.lstrip("-").partition("=")
    if not key or not equals:
        raise StudyError(f"--sbatch must be KEY=VALUE, not {text!r}")
    return key, value


@contextmanager
def _told() -> Iterator[None]:
    """Errors as one line; Ctrl-C ends with the shell's usual status."""
    from nnunet_cpr.nnunet.commands import CommandFailed
    from nnunet_cpr.studies.definition import StudyError

    try:
        yield
    except (StudyError, CommandFailed, OSError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop("stopped; the same command again goes on from the last checkpoints", status=130)
