"""``nnunet-cpr vision``: runs and sweeps outside of nnU-Net."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from typer import Argument, Option

from nnunet_cpr import vision
from nnunet_cpr.cli._errors import report_errors, stop
from nnunet_cpr.cli._options import expand_settings, parse_numbers

if TYPE_CHECKING:
    from nnunet_cpr.names.run_name import RunName

_TaskName = Annotated[str, Argument(metavar="TASK", help="A task; vision presets lists them.")]
_SweepName = Annotated[str, Argument(metavar="SWEEP", help="A sweep; vision presets lists them.")]
_RunNames = Annotated[
    list[str], Argument(metavar="NAME...", help="Optimizer and settings, such as AdamCPR_ws1000_seed1.")
]
_Seeds = Annotated[str | None, Option("--seeds", help="One run for each seed, such as 1,2,3.")]
_Device = Annotated[str | None, Option("--device", help="cuda, cuda:1, cpu or mps; cuda if available.")]
_Results = Annotated[Path, Option("--results", help="Folder of the runs' folders.")]
_RESULTS = Path("vision-results")


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Options of the runs' trainings."""

    data: Annotated[Path | None, Option(help="Folder of the data set, if the task needs one.")] = None
    results: _Results = _RESULTS
    device: _Device = None
    workers: Annotated[int, Option(min=0, help="Processes that load data.")] = 0
    bf16: Annotated[bool, Option("--bf16", help="Train in bfloat16 with autocast.")] = False
    microbatches: Annotated[int, Option(min=1, help="Parts of a batch, to save memory.")] = 1
    settings: Annotated[
        list[str] | None, Option("--set", help="Setting of the task, KEY=VALUE; repeatable.")
    ] = None

    def of_runs(self, keep_model: bool = False, again: bool = False) -> vision.Options:
        """Return the options of runs."""
        import torch

        pairs = [text.partition("=") for text in self.settings or ()]
        for key, equals, value in pairs:
            if not value:
                stop(f"--set: expected KEY=VALUE, got {key + equals!r}")
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            torch.zeros((), device=device).item()
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            stop(f"--device {device} is not usable: {str(error).splitlines()[0]}")
        return vision.Options(
            data=self.data,
            device=torch.device(device),
            workers=self.workers,
            bf16=self.bf16,
            microbatches=self.microbatches,
            keep_model=keep_model,
            again=again,
            settings={key: value for key, _, value in pairs},
        )


def presets() -> None:
    """List the tasks and sweeps."""
    print("tasks, for: nnunet-cpr vision run TASK NAME")
    for task in vision.TASKS.values():
        print(f"  {task.name:<22}{task.about}")
    print("sweeps, for: nnunet-cpr vision sweep SWEEP")
    for sweep in vision.SWEEPS.values():
        print(f"  {sweep.name:<22}{sweep.about} ({len(sweep.runs())} runs)")


def run(
    task_name: _TaskName,
    names: _RunNames,
    training: TrainingOptions,
    seeds: _Seeds = None,
    keep_model: Annotated[
        bool, Option("--keep-model/--drop-model", help="Save the weights in model.pt.")
    ] = True,
    again: Annotated[bool, Option("--again", help="Train finished and diverged runs again.")] = False,
) -> None:
    """Train one or more runs. The same command resumes them and does not repeat finished ones."""
    from nnunet_cpr.names.run_name import parse_run_name

    task, options = _find_task(task_name), training.of_runs(keep_model, again)
    runs = list(dict.fromkeys(map(parse_run_name, names)))
    seeded = [name for name in runs if name.seed is not None]
    if seeds is not None and seeded:
        stop(f"--seeds {seeds}: expected names without a seed, got {seeded[0]}; leave one of them out")
    numbers = parse_numbers("--seeds", seeds)
    if numbers:
        runs = [dataclasses.replace(name, seed=seed) for seed in numbers for name in runs]
    failed = _train(task, runs, training.results, options)
    if failed:
        stop(f"{len(failed)} of {len(runs)} runs are not finished, see above")


def sweep(name: _SweepName, training: TrainingOptions, seeds: _Seeds = None) -> None:
    """Train the runs of a sweep that are not finished or in use, and draw the sweep."""
    chosen = _find_sweep(name, seeds)
    failed = _train(_find_task(chosen.task), chosen.runs(), training.results, training.of_runs())
    _draw(chosen, training.results)
    diverged = sum(isinstance(error, vision.Diverged) for error in failed)
    if diverged:
        stop(f"{diverged} of {len(chosen.runs())} runs diverged, see above")


def digits(seeds: _Seeds = None, results: _Results = _RESULTS, device: _Device = None) -> None:
    """Train every bound, AdamW and the comparison methods on scikit-learn's digits, and draw them."""
    sweep("digits", TrainingOptions(results=results, device=device), seeds)


def grokking(seeds: _Seeds = None, results: _Results = _RESULTS, device: _Device = None) -> None:
    """Train on modular addition, where regularization decides about generalization, and draw it."""
    sweep("grokking", TrainingOptions(results=results, device=device), seeds)


def runs(name: _SweepName, seeds: _Seeds = None) -> None:
    """Print task and name of each run of a sweep, for a job array or xargs with vision run."""
    chosen = _find_sweep(name, seeds)
    for run_name in chosen.runs():
        print(chosen.task, run_name)


def draw(name: _SweepName, seeds: _Seeds = None, results: _Results = _RESULTS) -> None:
    """Draw the finished runs of a sweep: figures of the means over the seeds, and a CSV file."""
    chosen = _find_sweep(name, seeds)
    task = _find_task(chosen.task)
    if not any(vision.run_folder(results, task, run_name).is_dir() for run_name in chosen.runs()):
        stop(f"--results {results}: no runs of {name}; run nnunet-cpr vision sweep {name}")
    _draw(chosen, results)


def dynamics(
    task_name: _TaskName,
    names: _RunNames,
    parameter: Annotated[list[str] | None, Option(help="Parameter matrix to show; repeatable.")] = None,
    output: Annotated[Path, Option("--output", "-o", help="Figure.")] = Path("dynamics.png"),
    results: _Results = _RESULTS,
) -> None:
    """Draw regularization value, bound, lambda and loss of runs over their steps."""
    from nnunet_cpr.names.run_name import parse_run_name

    if output.suffix not in (".png", ".pdf", ".svg"):
        stop(f"--output {output}: expected a .png, .pdf or .svg file")
    task = _find_task(task_name)
    folders = {name: vision.run_folder(results, task, parse_run_name(name)) for name in names}
    for name, folder in folders.items():
        if not (folder / vision.DYNAMICS).exists():
            stop(f"{name} is not trained; run: nnunet-cpr vision run {task.name} {name}")
    vision.draw_dynamics(folders, output, parameter or ())
    print(output)


def _find_task(name: str) -> vision.Task:
    if name not in vision.TASKS:
        stop(f"unknown task {name!r}; choose from {', '.join(vision.TASKS)}")
    return vision.TASKS[name]


def _find_sweep(name: str, seeds: str | None) -> vision.Sweep:
    """Return a sweep, with other seeds if they are given."""
    if name not in vision.SWEEPS:
        stop(f"unknown sweep {name!r}; choose from {', '.join(vision.SWEEPS)}")
    found, numbers = vision.SWEEPS[name], parse_numbers("--seeds", seeds)
    return dataclasses.replace(found, seeds=tuple(numbers)) if numbers else found


def _train(
    task: vision.Task, runs: Sequence[RunName], results: Path, options: vision.Options
) -> list[vision.CannotTrain]:
    """Train runs one after the other, print a line for each, and return the errors of failed ones."""
    # Completing the names reports a wrong one before the first run starts.
    steps = {name: task.complete(name).total_steps for name in runs}
    failed: list[vision.CannotTrain] = []
    done_before = 0

    def show(done: int, total: int) -> None:
        progress.update(bar, completed=done_before + done)

    console = Console(soft_wrap=True, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=sum(steps.values()))
        for number, name in enumerate(runs, 1):
            title = f"run {number} of {len(runs)}: {name}"
            progress.update(bar, description=title)
            if not console.is_terminal and len(runs) > 1:
                console.print(title, markup=False)
            try:
                message = _describe(task, vision.train(task, name, results, options, show))
            except (vision.Diverged, vision.InUse) as error:
                if len(runs) == 1:
                    raise
                failed.append(error)
                message = f"{'failed' if isinstance(error, vision.Diverged) else 'skipped'}: {error}"
            console.print(f"{name}: {message}", markup=False)
            done_before += steps[name]
            progress.update(bar, completed=done_before)
    return failed


def _describe(task: vision.Task, result: dict[str, Any]) -> str:
    metric = result[task.metric]
    score = f"{metric:.2f}" if isinstance(metric, float) else "missing"
    text = f"{task.metric} {score}, loss {result['loss']:.4f}, {result['step']} steps"
    return f"{text} in {result['seconds']:.0f} s"


def _draw(sweep: vision.Sweep, results: Path) -> None:
    """Write the figures and tables of a sweep, and print their names."""
    from nnunet_cpr._files import atomic_write

    figure = results / f"{sweep.name}.png"
    vision.draw_sweep(sweep, results, figure)
    print(figure)
    if any(panel.methods != "cells" for panel in sweep.panels):
        table = results / f"{sweep.name}-methods.csv"
        with atomic_write(table) as temporary:
            methods = vision.compare_methods(sweep, results)
            methods.to_csv(temporary, index=False, float_format="%.6g")
        print(table)
    if sweep.curves:
        curves = results / f"{sweep.name}-curves.png"
        vision.draw_curves(sweep, results, curves)
        print(curves)


@contextmanager
def _vision_errors() -> Iterator[None]:
    """End a command with one line on expected errors, and on how to install what cannot be imported."""
    from nnunet_cpr.names import WrongName

    expected = (WrongName, vision.CannotTrain, vision.CannotDraw, OSError)
    with report_errors(*expected, interrupted="stopped; run the same command again to continue"):
        try:
            yield
        except ImportError as error:
            advice = "" if "pip install" in str(error) else "; run: pip install 'nnunet-cpr[vision]'"
            stop(f"{error}{advice}")


app = typer.Typer(
    no_args_is_help=True,
    help="CPR and comparison methods on vision tasks: single runs, and the paper's heat maps.",
)
for command in (presets, run, sweep, runs, draw, dynamics, digits, grokking):
    app.command()(expand_settings(_vision_errors()(command)))
