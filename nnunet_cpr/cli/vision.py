"""``nnunet-cpr vision``: runs and sweeps outside of nnU-Net."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnunet_cpr.cli._errors import stop

if TYPE_CHECKING:
    from nnunet_cpr.names.run_name import RunName
    from nnunet_cpr.vision.sweeps import Sweep
    from nnunet_cpr.vision.task import Diverged, InUse, Options, Task

app = typer.Typer(
    no_args_is_help=True,
    help="CPR and what it is compared with on vision tasks: single runs, and the paper's heat maps.",
)

_Results = Annotated[Path, typer.Option("--results", help="Where the runs' folders are.")]
_Data = Annotated[Path | None, typer.Option(help="The folder of the data set, where it needs one.")]
_Device = Annotated[str | None, typer.Option(help="cuda, cpu or mps; by default cuda if it is there.")]
_Workers = Annotated[int, typer.Option(min=0, help="Processes that load data.")]
_BF16 = Annotated[bool, typer.Option("--bf16", help="Train in bfloat16 where autocast allows.")]
_Parts = Annotated[int, typer.Option(min=1, help="Parts to split a batch into, so that it fits.")]
_Set = Annotated[
    list[str] | None, typer.Option("--set", help="A task's setting, KEY=VALUE; may be given again.")
]
_SweepName = Annotated[str, typer.Argument(metavar="SWEEP", help="One that presets lists.")]
_RESULTS = Path("vision-results")
_GOES_ON = "stopped; the same command again goes on from the last checkpoint"


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
        print(f"  {sweep.name:<22}{sweep.about} ({len(sweep.cells())} runs)")


@app.command()
def run(
    task: Annotated[str, typer.Argument(metavar="TASK", help="One that presets lists.")],
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Optimizer and regularizer, such as AdamCPR_ws1000_seed1."
        ),
    ],
    data: _Data = None,
    results: _Results = _RESULTS,
    device: _Device = None,
    workers: _Workers = 0,
    bf16: _BF16 = False,
    microbatches: _Parts = 1,
    keep_model: Annotated[
        bool, typer.Option("--keep-model/--drop-model", help="Leave the trained weights in model.pt.")
    ] = True,
    again: Annotated[
        bool, typer.Option("--again", help="Train anew what is done or has diverged; the rest goes on.")
    ] = False,
    settings: _Set = None,
) -> None:
    """Train one or more runs. Stopped and run again, it goes on; what is done is not repeated."""
    from nnunet_cpr.names.run_name import parse_run_name

    with _told(_GOES_ON):
        chosen = _task(task)
        options = _options(data, device, workers, bf16, microbatches, settings, keep_model, again)
        left = _train(chosen, [parse_run_name(name) for name in names], results, options)
        if left:
            stop(f"{len(left)} of {len(names)} runs are not done, see above")


@app.command()
def sweep(
    name: _SweepName,
    data: _Data = None,
    results: _Results = _RESULTS,
    device: _Device = None,
    workers: _Workers = 0,
    bf16: _BF16 = False,
    microbatches: _Parts = 1,
    settings: _Set = None,
) -> None:
    """Train all cells of a sweep that no other process trains or has trained, and draw it."""
    from nnunet_cpr.vision.task import Diverged

    with _told(_GOES_ON):
        chosen = _sweep(name)
        options = _options(data, device, workers, bf16, microbatches, settings)
        left = _train(_task(chosen.task), chosen.cells(), results, options)
        _draw(chosen, results)
        diverged = sum(isinstance(error, Diverged) for error in left)
        if diverged:
            stop(f"{diverged} of {len(chosen.cells())} runs diverged, see above")


@app.command()
def cells(name: _SweepName) -> None:
    """Print the runs of a sweep, a line each: for a job array or xargs, with vision run."""
    with _told():
        chosen = _sweep(name)
        for cell in chosen.cells():
            print(chosen.task, cell)


@app.command()
def draw(name: _SweepName, results: _Results = _RESULTS) -> None:
    """Draw what is done of a sweep: a figure and a CSV file."""
    from nnunet_cpr.vision.folder import folder_of

    with _told():
        chosen = _sweep(name)
        task = _task(chosen.task)
        if not any(folder_of(results, task, cell).is_dir() for cell in chosen.cells()):
            stop(f"{results} has no run of {name}; run nnunet-cpr vision sweep {name}, or say --results")
        _draw(chosen, results)


@app.command()
def dynamics(
    task: Annotated[str, typer.Argument(metavar="TASK")],
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Runs to draw together.")],
    parameter: Annotated[
        list[str] | None, typer.Option(help="A matrix to show; may be given again.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The figure.")] = Path("dynamics.png"),
    results: _Results = _RESULTS,
) -> None:
    """Draw measure, bound, lambda and loss of runs over their steps."""
    from nnunet_cpr.names.run_name import parse_run_name
    from nnunet_cpr.vision.dynamics_figure import draw_dynamics
    from nnunet_cpr.vision.folder import DYNAMICS, folder_of

    if output.suffix not in (".png", ".pdf", ".svg") or not output.parent.is_dir():
        stop(f"--output {output} must be a .png, .pdf or .svg file in a folder that is there")
    with _told():
        chosen = _task(task)
        folders = {name: folder_of(results, chosen, parse_run_name(name)) for name in names}
        missing = [name for name, folder in folders.items() if not (folder / DYNAMICS).exists()]
        if missing:
            stop(f"{missing[0]} has not been trained; run: nnunet-cpr vision run {task} {missing[0]}")
        draw_dynamics(folders, output, parameter or ())
        print(output)


@app.command()
def digits(results: _Results = _RESULTS) -> None:
    """Train every bound, AdamW and the baselines on scikit-learn's digits, and draw the comparison."""
    sweep("digits", results=results, device="cpu")


@app.command()
def grokking(results: _Results = _RESULTS) -> None:
    """Modular addition: learned by heart, or understood? A few minutes on a CPU."""
    sweep("grokking", results=results, device="cpu")


def _task(name: str) -> Task:
    from nnunet_cpr.vision.tasks import TASKS

    if name not in TASKS:
        stop(f"no task is named {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]


def _sweep(name: str) -> Sweep:
    from nnunet_cpr.vision.sweeps import SWEEPS

    if name not in SWEEPS:
        stop(f"no sweep is named {name!r}; there are {', '.join(SWEEPS)}")
    return SWEEPS[name]


def _options(
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
    wrong = [key for key, equals, value in pairs if not equals or not value]
    if wrong:
        stop(f"--set takes KEY=VALUE, not {wrong[0]!r}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros((), device=device).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        stop(f"--device {device} cannot be used: {str(error).splitlines()[0]}")
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
    """One after the other, with a line for each; what is left of them, and why, does not stop others."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from nnunet_cpr.vision.engine import train
    from nnunet_cpr.vision.folder import MODEL, folder_of, result_of
    from nnunet_cpr.vision.task import Diverged, InUse

    for name in names:
        task.complete(name)  # what is wrong with the last name is better said now
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(soft_wrap=True, highlight=False)
    left: list[Diverged | InUse] = []
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        all_runs = bars.add_task("runs", total=len(names), visible=len(names) > 1)
        for name in names:
            bar = bars.add_task(str(name))

            def show(done: int, steps: int, numbers: dict[str, float], bar: Any = bar) -> None:
                bars.update(bar, completed=done, total=steps)

            folder = folder_of(results, task, name)
            try:
                is_done = not options.again and result_of(folder) is not None
                result = train(task, name, results, options, show)
                said = f"{task.metric} {result[task.metric]:.2f}, loss {result['loss']:.4f}, "
                said += f"{result['step']:.0f} steps in {result['seconds']:.0f} s"
                said += ", done before" if is_done else ""
                if options.keep_model and not (folder / MODEL).exists():
                    said += "; its weights were not kept, --again trains it again and keeps them"
            except (Diverged, InUse) as error:
                if len(names) == 1:
                    raise
                left.append(error)
                said = f"{'failed' if isinstance(error, Diverged) else 'skipped'}: {error}"
            bars.remove_task(bar)
            bars.advance(all_runs)
            bars.console.print(f"{name}: {said}", markup=False)
    return left


def _draw(chosen: Sweep, results: Path) -> None:
    from nnunet_cpr.vision.heatmaps import draw_sweep
    from nnunet_cpr.vision.learning_curves import draw_curves

    figure = results / f"{chosen.name}.png"
    draw_sweep(chosen, results, figure)
    print(figure)
    if chosen.curves:
        figure = results / f"{chosen.name}-curves.png"
        draw_curves(chosen, results, figure)
        print(figure)


@contextmanager
def _told(stopped: str = "stopped") -> Iterator[None]:
    """Errors as one line; Ctrl-C ends with the shell's usual status."""
    from nnunet_cpr.names import WrongName
    from nnunet_cpr.vision.dynamics_figure import CannotDraw
    from nnunet_cpr.vision.task import CannotTrain

    try:
        yield
    except (WrongName, CannotTrain, CannotDraw, OSError) as error:
        stop(str(error))
    except ImportError as error:
        advice = "" if "run: pip" in str(error) else "; run: pip install 'nnunet-cpr[vision]'"
        stop(f"{error}{advice}")
    except KeyboardInterrupt:
        stop(stopped, status=130)
