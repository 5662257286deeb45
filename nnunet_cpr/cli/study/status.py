"""``nnunet-cpr study status``, ``stop``, ``cancel`` and ``remove``: watch a study and end it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

from rich.console import Console, RenderableType
from rich.live import Live
from typer import Option

from nnunet_cpr import studies
from nnunet_cpr.cli.options import JsonOption, print_json
from nnunet_cpr.cli.study.options import NameOption, SelectedStudy, StudyArgument, StudyOptions
from nnunet_cpr.refusals import Refusal, counted


def status(
    options: StudyOptions,
    once: Annotated[bool, Option("--once", help="Print the table once and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the progress of a study until all runs have ended."""
    selected, console = options.select(), Console()
    found = studies.states(*selected[:2])
    if as_json:
        print_json([{**asdict(run), **asdict(state)} for run, state in found.items()])
    elif once or not console.is_terminal:
        console.print(studies.status_table(selected.study, found, width=console.width))
    else:
        watch(selected, console, set(studies.Stage) - {studies.Stage.DONE, studies.Stage.FAILED})


def watch(selected: SelectedStudy, console: Console, stages: Collection[studies.Stage]) -> None:
    """Show the table while a run is in one of the stages."""
    with live_table(selected, console) as show:
        while any(state.stage in stages for state in studies.states(*selected[:2]).values()):
            show()
            time.sleep(2)
        show()


@contextmanager
def live_table(
    selected: SelectedStudy, console: Console, jobs: int | None = None
) -> Iterator[Callable[[], None]]:
    """Yield a function that updates the table in a terminal.

    Elsewhere it prints a line for each run that begins or ends, and the table at the end.

    Args:
        selected: the study.
        console: where to print.
        jobs: number of runs that are trained at the same time; None counts the running ones.
    """
    shown = studies.states(*selected[:2])
    started = None if jobs is None else datetime.now()  # of this command's training, not of watching

    def table() -> RenderableType:
        found = studies.states(*selected[:2])
        return studies.status_table(selected.study, found, jobs, console.width, started)

    def print_changes() -> None:
        for run, state in studies.states(*selected[:2]).items():
            if state.stage is not shown[run].stage:
                model = f"{run.dataset}, {run.trainer}, {run.plans}, {run.configuration}"
                text = f"{model}, fold {run.fold}: {state.stage.value}"
                console.print(text, soft_wrap=True, markup=False)
            shown[run] = state

    if console.is_terminal:
        with Live(table(), console=console, auto_refresh=False) as live:
            yield lambda: live.update(table(), refresh=True)
    else:
        try:
            yield print_changes
        finally:
            console.print(table())


def stop(study: StudyArgument, name: NameOption = None) -> None:
    """Stop a study on this machine as Ctrl-C does; the same `study run` continues it."""
    selected = StudyOptions(study, name=name).select()
    is_idle = True
    for line in studies.stop_command(selected.study.runs(), selected.paths):
        print(line, flush=True)
        is_idle = False
    if is_idle:
        print("nothing runs on this machine")


def remove(study: StudyArgument, name: NameOption = None) -> None:
    """Delete a study's definition, logs and report; nnU-Net's results of its runs stay."""
    selected = StudyOptions(study, name=name).select()
    busy = (studies.Stage.RUNNING, studies.Stage.QUEUED)
    if any(state.stage in busy for state in studies.states(*selected[:2]).values()):
        raise Refusal(f"study {selected.study.name}: runs are in progress", "stop or cancel them first")
    shutil.rmtree(selected.paths.study)
    print(f"deleted {selected.paths.study}; the results of its runs are kept")


def cancel(study: StudyArgument, name: NameOption = None) -> None:
    """Cancel a study's jobs in Slurm's queue; finished epochs are kept."""
    paths = StudyOptions(study, name=name).select().paths
    print(f"{counted(studies.cancel_slurm_jobs(paths), 'job')} cancelled")
