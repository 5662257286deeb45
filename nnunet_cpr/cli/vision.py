"""``nnunet-cpr vision``: runs and sweeps outside of nnU-Net."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnunet_cpr.cli._errors import report_errors, stop

if TYPE_CHECKING:
    from nnunet_cpr.names.run_name import RunName
    from nnunet_cpr.vision.sweeps import Sweep
    from nnunet_cpr.vision.task import Diverged, InUse, Options, Task

app = typer.Typer(
    no_args_is_help=True,
    help="CPR and comparison methods on vision tasks: single runs, and the paper's heat maps.",
)

_TaskName = Annotated[str, typer.Argument(metavar="TASK", help="A task; vision presets lists them.")]
_RunNames = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...", help="Optimizer, regularization and seed, such as AdamCPR_ws1000_seed1."
    ),
]
_SweepName = Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep; vision presets lists them.")]
_Results = Annotated[Path, typer.Option("--results", help="Folder of the runs' folders.")]
_Data = Annotated[Path | None, typer.Option(help="Folder of the data set, for tasks that need one.")]
_Device = Annotated[str | None, typer.Option(help="cuda, cpu or mps; by default cuda if available.")]
_Workers = Annotated[int, typer.Option(min=0, help="Processes that load data.")]
_BF16 = Annotated[bool, typer.Option("--bf16", help="Train in bfloat16 with autocast.")]
_Microbatches = Annotated[
    int, typer.Option(min=1, help="Parts into which a batch is split to save memory.")
]
_Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Setting of the task, KEY=VALUE; may be repeated.")
]
_RESULTS = Path("vision-results")
_RESUMES = "stopped; run the same command again to resume from the last checkpoint"


@app.command()
def presets() -> None:
    """List the tasks and sweeps."""
    from nnunet_cpr.vision.sweeps import SWEEPS
    from nnunet_cpr.vision.tasks import TASKS

    print("tasks, for: nnunet-cpr vision run TASK NAME")
    for task in TASKS.values():
        print(f"  {task.name:<22}{task.about}")
    print("sweeps, for: nnunet-cpr vision sweep SWEEP")
    for sweep in SWEEPS.values():
        print(f"  {sweep.name:<22}{sweep.about} ({len(sweep.runs())} runs)")


@app.command()
def run(
    task_name: _TaskName,
    names: _RunNames,
    data: _Data = None,
    results: _Results = _RESULTS,
    device: _Device = None,
    workers: _Workers = 0,
    bf16: _BF16 = False,
    microbatches: _Microbatches = 1,
    keep_model: Annotated[
        bool, typer.Option("--keep-model/--drop-model", help="Save the trained weights in model.pt.")
    ] = True,
    again: Annotated[
        bool, typer.Option("--again", help="Train finished and diverged runs again; others resume.")
    ] = False,
    settings: _Settings = None,
) -> None:
    """Train one or more runs. The same command resumes them and does not repeat finished ones."""
    from nnunet_cpr.names.run_name import parse_run_name

    with _report_errors(interrupted=_RESUMES):
        task = _find_task(task_name)
        options = _build_options(data, device, workers, bf16, microbatches, settings, keep_model, again)
        failed = _train(task, [parse_run_name(name) for name in names], results, options)
        if failed:
            stop(f"{len(failed)} of {len(names)} runs are not finished, see above")


@app.command()
def sweep(
    name: _SweepName,
    data: _Data = None,
    results: _Results = _RESULTS,
    device: _Device = None,
    workers: _Workers = 0,
    bf16: _BF16 = False,
    microbatches: _Microbatches = 1,
    settings: _Settings = None,
) -> None:
    """Train the runs of a sweep that are not finished or in use, and draw the sweep."""
    from nnunet_cpr.vision.task import Diverged

    with _report_errors(interrupted=_RESUMES):
        chosen = _find_sweep(name)
        options = _build_options(data, device, workers, bf16, microbatches, settings)
        failed = _train(_find_task(chosen.task), chosen.runs(), results, options)
        _draw(chosen, results)
        diverged = sum(isinstance(error, Diverged) for error in failed)
        if diverged:
            stop(f"{diverged} of {len(chosen.runs())} runs diverged, see above")


@app.command()
def runs(name: _SweepName) -> None:
    """Print task and name of each run of a sweep, for a job array or xargs with vision run."""
    with _report_errors():
        chosen = _find_sweep(name)
        for run_name in chosen.runs():
            print(chosen.task, run_name)


@app.command()
def draw(name: _SweepName, results: _Results = _RESULTS) -> None:
    """Draw the finished runs of a sweep: figures and a CSV file."""
    from nnunet_cpr.vision.folder import run_folder

    with _report_errors():
        chosen = _find_sweep(name)
        task = _find_task(chosen.task)
        if not any(run_folder(results, task, run_name).is_dir() for run_name in chosen.runs()):
            stop(f"--results {results}: no runs of {name}; run nnunet-cpr vision sweep {name}")
        _draw(chosen, results)


@app.command()
def dynamics(
    task_name: _TaskName,
    names: _RunNames,
    parameter: Annotated[
        list[str] | None, typer.Option(help="Parameter matrix to show; may be repeated.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Figure to write.")] = Path(
        "dynamics.png"
    ),
    results: _Results = _RESULTS,
) -> None:
    """Draw regularization value, bound, lambda and loss of runs over their steps."""
    from nnunet_cpr.names.run_name import parse_run_name
    from nnunet_cpr.vision.dynamics_figure import draw_dynamics
    from nnunet_cpr.vision.folder import DYNAMICS, run_folder

    if output.suffix not in (".png", ".pdf", ".svg"):
        stop(f"--output {output}: expected a .png, .pdf or .svg file")
    if not output.parent.is_dir():
        stop(f"--output {output}: the folder {output.parent} does not exist")
    with _report_errors():
        task = _find_task(task_name)
        folders = {name: run_folder(results, task, parse_run_name(name)) for name in names}
        missing = [name for name, folder in folders.items() if not (folder / DYNAMICS).exists()]
        if missing:
            stop(f"{missing[0]} is not trained; run: nnunet-cpr vision run {task.name} {missing[0]}")
        draw_dynamics(folders, output, parameter or ())
        print(output)


@app.command()
def digits(results: _Results = _RESULTS) -> None:
    """Train every bound, AdamW and the comparison methods on scikit-learn's digits, and draw them."""
    sweep("digits", results=results, device="cpu")


@app.command()
def grokking(results: _Results = _RESULTS) -> None:
    """Train on modular addition, where regularization decides about generalization, and draw it."""
    sweep("grokking", results=results, device="cpu")


@contextmanager
def _report_errors(interrupted: str = "stopped") -> Iterator[None]:
    """Report expected errors, and how to install what cannot be imported."""
    from nnunet_cpr.names import WrongName
    from nnunet_cpr.vision.dynamics_figure import CannotDraw
    from nnunet_cpr.vision.task import CannotTrain

    with report_errors(WrongName, CannotTrain, CannotDraw, OSError, interrupted=interrupted):
        try:
            yield
        except ImportError as error:
            advice = "" if "pip install" in str(error) else "; run: pip install 'nnunet-cpr[vision]'"
            stop(f"{error}{advice}")


def _find_task(name: str) -> Task:
    from nnunet_cpr.vision.tasks import TASKS

    if name not in TASKS:
        stop(f"unknown task {name!r}; choose from {', '.join(TASKS)}")
    return TASKS[name]


def _find_sweep(name: str) -> Sweep:
    from nnunet_cpr.vision.sweeps import SWEEPS

    if name not in SWEEPS:
        stop(f"unknown sweep {name!r}; choose from {', '.join(SWEEPS)}")
    return SWEEPS[name]


def _build_options(
    data: Path | None,
    device: str | None,
    workers: int,
    bf16: bool,
    microbatches: int,
    settings: list[str] | None,
    keep_model: bool = False,
    again: bool = False,
) -> Options:
    import torch

    from nnunet_cpr.vision.task import Options

    pairs = [text.partition("=") for text in settings or ()]
    for key, equals, value in pairs:
        if not equals or not value:
            stop(f"--set: expected KEY=VALUE, got {key + equals!r}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros((), device=device).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        stop(f"--device {device} is not usable: {str(error).splitlines()[0]}")
    return Options(
        data=data,
        device=torch.device(device),
        workers=workers,
        bf16=bf16,
        microbatches=microbatches,
        keep_model=keep_model,
        again=again,
        settings={key: value for key, _, value in pairs},
    )


def _train(task: Task, names: list[RunName], results: Path, options: Options) -> list[Diverged | InUse]:
    """Train runs one after the other, print a line for each, and return the errors of failed ones."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )

    from nnunet_cpr.vision.engine import train
    from nnunet_cpr.vision.folder import read_result, run_folder
    from nnunet_cpr.vision.task import Diverged, InUse

    for name in names:
        task.complete(name)  # reports a wrong name before the first training
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(soft_wrap=True, highlight=False)
    failed: list[Diverged | InUse] = []
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        total = progress.add_task("runs", total=len(names), visible=len(names) > 1)
        for name in names:
            bar = progress.add_task(str(name))

            def update(done: int, steps: int, bar: TaskID = bar) -> None:
                progress.update(bar, completed=done, total=steps)

            folder = run_folder(results, task, name)
            try:
                was_finished = not options.again and read_result(folder) is not None
                result = train(task, name, results, options, update)
                message = _describe_result(task, result, folder, options.keep_model)
                message += " (finished before)" if was_finished else ""
            except (Diverged, InUse) as error:
                if len(names) == 1:
                    raise
                failed.append(error)
                message = f"{'failed' if isinstance(error, Diverged) else 'skipped'}: {error}"
            progress.remove_task(bar)
            progress.advance(total)
            progress.console.print(f"{name}: {message}", markup=False)
    return failed


def _describe_result(task: Task, result: dict[str, Any], folder: Path, keep_model: bool) -> str:
    from nnunet_cpr._files import finite_number
    from nnunet_cpr.vision.folder import MODEL

    metric = finite_number(result[task.metric])
    score = "missing" if metric is None else f"{metric:.2f}"
    text = f"{task.metric} {score}, loss {result['loss']:.4f}, {result['step']} steps in "
    text += f"{result['seconds']:.0f} s"
    if keep_model and not (folder / MODEL).exists():
        text += "; model.pt was not kept, use --again to train the run again"
    return text


def _draw(sweep: Sweep, results: Path) -> None:
    from nnunet_cpr.vision.heatmaps import draw_sweep
    from nnunet_cpr.vision.learning_curves import draw_curves

    figure = results / f"{sweep.name}.png"
    draw_sweep(sweep, results, figure)
    print(figure)
    if sweep.curves:
        figure = results / f"{sweep.name}-curves.png"
        draw_curves(sweep, results, figure)
        print(figure)
