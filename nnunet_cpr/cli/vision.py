"""``nnunet-cpr vision``: runs and sweeps outside of nnU-Net."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnunet_cpr.cli._errors import report_errors, stop
from nnunet_cpr.cli._options import SeedsOption, TorchDeviceOption, parse_numbers

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
    seeds: SeedsOption = None,
    data: _Data = None,
    results: _Results = _RESULTS,
    device: TorchDeviceOption = None,
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
        runs = _add_seeds(dict.fromkeys(map(parse_run_name, names)), seeds)
        failed = _train(task, runs, results, options)
        if failed:
            stop(f"{len(failed)} of {len(runs)} runs are not finished, see above")


@app.command()
def sweep(
    name: _SweepName,
    seeds: SeedsOption = None,
    data: _Data = None,
    results: _Results = _RESULTS,
    device: TorchDeviceOption = None,
    workers: _Workers = 0,
    bf16: _BF16 = False,
    microbatches: _Microbatches = 1,
    settings: _Settings = None,
) -> None:
    """Train the runs of a sweep that are not finished or in use, and draw the sweep."""
    from nnunet_cpr.vision.task import Diverged

    with _report_errors(interrupted=_RESUMES):
        chosen = _find_sweep(name, seeds)
        options = _build_options(data, device, workers, bf16, microbatches, settings)
        failed = _train(_find_task(chosen.task), chosen.runs(), results, options)
        _draw(chosen, results)
        diverged = sum(isinstance(error, Diverged) for error in failed)
        if diverged:
            stop(f"{diverged} of {len(chosen.runs())} runs diverged, see above")


@app.command()
def runs(name: _SweepName, seeds: SeedsOption = None) -> None:
    """Print task and name of each run of a sweep, for a job array or xargs with vision run."""
    with _report_errors():
        chosen = _find_sweep(name, seeds)
        for run_name in chosen.runs():
            print(chosen.task, run_name)


@app.command()
def draw(name: _SweepName, seeds: SeedsOption = None, results: _Results = _RESULTS) -> None:
    """Draw the finished runs of a sweep: figures of the means over the seeds, and a CSV file."""
    from nnunet_cpr.vision.folder import run_folder

    with _report_errors():
        chosen = _find_sweep(name, seeds)
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
def digits(
    seeds: SeedsOption = None, results: _Results = _RESULTS, device: TorchDeviceOption = None
) -> None:
    """Train every bound, AdamW and the comparison methods on scikit-learn's digits, and draw them."""
    sweep("digits", seeds=seeds, results=results, device=device)


@app.command()
def grokking(
    seeds: SeedsOption = None, results: _Results = _RESULTS, device: TorchDeviceOption = None
) -> None:
    """Train on modular addition, where regularization decides about generalization, and draw it."""
    sweep("grokking", seeds=seeds, results=results, device=device)


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


def _find_sweep(name: str, seeds: str | None = None) -> Sweep:
    """Return a sweep, with other seeds if they are given."""
    from nnunet_cpr.vision.sweeps import SWEEPS

    if name not in SWEEPS:
        stop(f"unknown sweep {name!r}; choose from {', '.join(SWEEPS)}")
    sweep = SWEEPS[name]
    return (
        sweep
        if seeds is None
        else dataclasses.replace(sweep, seeds=tuple(parse_numbers("--seeds", seeds)))
    )


def _add_seeds(names: Iterable[RunName], seeds: str | None) -> list[RunName]:
    """Return each run with each seed, those of the first seed first."""
    if seeds is None:
        return list(names)
    for name in names:
        if name.seed is not None:
            stop(f"--seeds {seeds}: expected names without a seed, got {name}; leave one of them out")
    return [
        dataclasses.replace(name, seed=seed)
        for seed in parse_numbers("--seeds", seeds)
        for name in names
    ]


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

    from nnunet_cpr.cli._run_progress import RunProgress
    from nnunet_cpr.vision.engine import train
    from nnunet_cpr.vision.folder import read_result, run_folder
    from nnunet_cpr.vision.task import Diverged, InUse

    # Completing the names reports a wrong one before the first run starts.
    steps = {str(name): task.complete(name).total_steps for name in names}
    folders = {str(name): run_folder(results, task, name) for name in names}
    found = {} if options.again else {name: read_result(folder) for name, folder in folders.items()}
    finished = {name: result for name, result in found.items() if result is not None}
    console = Console(soft_wrap=True, highlight=False)
    failed: list[Diverged | InUse] = []
    with RunProgress(console, steps, finished, _mean_step(finished.values())) as progress:
        for name in names:
            progress.start(str(name))
            folder = folders[str(name)]
            try:
                result = train(task, name, results, options, progress.update)
                message = _describe_result(task, result, folder, options.keep_model)
                message += "" if progress.has_trained else " (finished before)"
            except (Diverged, InUse) as error:
                if len(names) == 1:
                    raise
                failed.append(error)
                message = f"{'failed' if isinstance(error, Diverged) else 'skipped'}: {error}"
            progress.end(message)
    return failed


def _mean_step(results: Iterable[dict[str, Any]]) -> float | None:
    """Return the mean time of a step of finished runs in seconds, None if there are none."""
    trained = [result for result in results if "diverged" not in result]
    steps = sum(result["step"] for result in trained)
    return sum(result["seconds"] for result in trained) / steps if steps > 0 else None


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
    from nnunet_cpr._files import atomic_write
    from nnunet_cpr.vision.heatmaps import draw_sweep
    from nnunet_cpr.vision.learning_curves import draw_curves
    from nnunet_cpr.vision.selection import compare_methods

    figure = results / f"{sweep.name}.png"
    draw_sweep(sweep, results, figure)
    print(figure)
    if any(panel.methods != "cells" for panel in sweep.panels):
        table = results / f"{sweep.name}-methods.csv"
        with atomic_write(table) as temporary:
            compare_methods(sweep, results).to_csv(temporary, index=False, float_format="%.6g")
        print(table)
    if sweep.curves:
        figure = results / f"{sweep.name}-curves.png"
        draw_curves(sweep, results, figure)
        print(figure)
