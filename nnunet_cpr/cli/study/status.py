"""``nnunet-cpr study status`` and ``cancel``: watch the runs of a study, or cancel them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Annotated

from rich.console import Console, RenderableType
from rich.live import Live
from typer import Option

from nnunet_cpr import studies
from nnunet_cpr.cli.study._options import NameOption, SelectedStudy, StudyArgument, StudyOptions


def status(
    options: StudyOptions,
    once: Annotated[bool, Option("--once", help="Print the table once and exit.")] = False,
) -> None:
    """Show the progress of a study until all runs have ended."""
    selected, console = options.select(), Console()
    if once or not console.is_terminal:
        console.print(studies.status_table(selected.study, studies.states(*selected[:2])))
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
    """Yield a function that updates the table in a terminal; elsewhere it is printed at the end.

    Args:
        selected: the study.
        console: where to print.
        jobs: number of runs that are trained at the same time; None counts the running ones.
    """

    def table() -> RenderableType:
        return studies.status_table(selected.study, studies.states(*selected[:2]), jobs)

    try:
        with Live(table(), console=console, auto_refresh=False) as live:
            yield lambda: live.update(table(), refresh=True)
    finally:
        if not console.is_terminal:
            console.line()  # which Live leaves out


def cancel(study: StudyArgument, name: NameOption = None) -> None:
    """Cancel a study's jobs in Slurm's queue; finished epochs are kept."""
    paths = StudyOptions(study, name=name).select().paths
    print(f"{studies.cancel_slurm_jobs(paths)} jobs cancelled")
