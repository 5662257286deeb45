"""``nnunet-cpr vision``: runs and sweeps outside of nnU-Net."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from typer import Argument, Option

from nnunet_cpr import vision
from nnunet_cpr.cli.errors import report_errors
from nnunet_cpr.cli.options import expand_options, parse_numbers
from nnunet_cpr.refusals import Refusal, RefusedItem

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class VisionOptions:
    """Options of all commands."""

    seeds: Annotated[str | None, Option("--seeds", help="One run for each seed, such as 1,2,3.")] = None
    results: Annotated[Path, Option(help="Folder of the runs' folders, the table and the figure.")] = (
        Path("vision-results")
    )
    data: Annotated[Path | None, Option(help="Folder of the data set, if the task needs one.")] = None
    device: Annotated[
        str | None, Option("--device", "-device", help="cuda, cuda:1, cpu or mps; cuda if available.")
    ] = None


app = typer.Typer(
    no_args_is_help=True,
    help="CPR and comparison methods on digits, modular addition, text, CIFAR-10 and CIFAR-100.",
)


def run(
    task: Annotated[str, Argument(help="digits, grokking, text, cifar10 or cifar100.")],
    names: Annotated[
        list[str], Argument(metavar="NAME...", help="Optimizer and settings, such as AdamCPR_ws1000.")
    ],
    options: VisionOptions,
) -> None:
    """Train runs of a task; the same command resumes them and does not repeat finished ones."""
    methods = {name: [name] for name in names}
    _train_and_draw(vision.Sweep(task=task, methods=methods, seeds=[1]), task, options)


def sweep(
    file: Annotated[Path, Argument(metavar="SWEEP.yaml", help="A list of runs, as a YAML file.")],
    options: VisionOptions,
) -> None:
    """Train the runs of a file that are not finished or in use, and draw all finished ones."""
    _train_and_draw(vision.load_sweep(file), file.stem, options)


@contextmanager
def _vision_errors() -> Iterator[None]:
    """End a command with one line on expected errors, and on how to install what cannot be imported."""
    with report_errors("stopped; run the same command again to continue"):
        try:
            yield
        except ImportError as error:
            advice = "" if "pip install" in str(error) else "; run: pip install 'nnunet-cpr[vision]'"
            raise Refusal(f"{error}{advice}") from error


for command in (run, sweep):
    app.command()(expand_options(_vision_errors()(command)))


def _train_and_draw(sweep: vision.Sweep, name: str, options: VisionOptions) -> None:
    """Train runs one after the other, print a line for each, and draw all of them."""
    from nnunet_cpr.files import atomic_write

    if seeds := parse_numbers("--seeds", options.seeds):
        sweep = replace(sweep, seeds=seeds)
    task, runs = vision.find_task(sweep.task), sweep.runs()
    # Completing the names reports a wrong one before the first run starts.
    steps = [task.complete(run).training.steps for run in runs]
    device, unfinished = _find_device(options.device), 0
    console = Console(soft_wrap=True, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=sum(steps))
        for number, run in enumerate(runs):
            title = f"run {number + 1} of {len(runs)}: {run}"
            progress.update(bar, description=title, completed=sum(steps[:number]))
            step = partial(progress.advance, bar)
            try:
                result = vision.train(task, run, options.results, options.data, device, step)
                message = "accuracy {accuracy:.2f}, loss {loss:.4f}, {step} steps in {seconds:.0f} s"
                message = message.format_map(result)
            except RefusedItem as error:
                unfinished += 1
                message = str(error)
            console.print(f"{run}: {message}", markup=False)
    table = vision.summarize(sweep, options.results)
    file, figure = (options.results / f"{name}.{suffix}" for suffix in ("csv", "png"))
    with atomic_write(file) as temporary:
        table.to_csv(temporary, index=False, float_format="%.6g")
    vision.draw_summary(table, sweep.metric, figure)
    print(table.to_string(index=False, float_format="%.2f"))
    print(file, figure, sep="\n")
    if unfinished:
        raise Refusal(f"{unfinished} of {len(runs)} runs are not finished, see above")


def _find_device(name: str | None) -> torch.device:
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros((), device=name).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise Refusal(f"--device {name} is not usable: {str(error).splitlines()[0]}") from None
    return torch.device(name)
