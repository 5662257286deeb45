"""Progress of a study in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nnunet_cpr.cli._errors import stop

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nnunet_cpr.studies.definition import Study
    from nnunet_cpr.studies.dry_run import Preview
    from nnunet_cpr.studies.estimates import Measured
    from nnunet_cpr.studies.executors import Local
    from nnunet_cpr.studies.run_state import StudyPaths


@contextmanager
def live_status(
    study: Study, paths: StudyPaths, console: Any, jobs: int | None = None
) -> Iterator[Callable[[], None]]:
    """Yield a function that shows the status: as a live table, or as a line when it has changed.

    Args:
        study: the study.
        paths: the study's folders.
        console: rich's console.
        jobs: number of runs that are trained at the same time; None counts the running ones.
    """
    from rich.live import Live

    from nnunet_cpr.studies.estimates import iteration_seconds
    from nnunet_cpr.studies.status_table import states, summary

    if console.is_terminal:
        earlier = iteration_seconds(study, paths.results)
        with Live(console=console, auto_refresh=False) as live:
            yield lambda: live.update(current_table(study, paths, jobs, earlier), refresh=True)
        return
    printed = ""

    def print_changes() -> None:
        nonlocal printed
        line = summary(states(study, paths).values())
        if line != printed:
            printed = line
            console.print(line)

    yield print_changes


def current_table(
    study: Study, paths: StudyPaths, jobs: int | None = None, earlier: Measured | None = None
) -> RenderableType:
    """Return the present status of a study with the time left.

    Args:
        study: the study.
        paths: the study's folders.
        jobs: number of runs that are trained at the same time; None counts the running ones.
        earlier: seconds of an iteration of other trainings; None reads their logs.
    """
    from nnunet_cpr.studies.estimates import iteration_seconds, time_left
    from nnunet_cpr.studies.run_state import Stage
    from nnunet_cpr.studies.status_table import states, status_table

    found = states(study, paths)
    running = sum(state.stage is Stage.RUNNING for state in found.values())
    earlier = iteration_seconds(study, paths.results) if earlier is None else earlier
    return status_table(study, found, time_left(found, jobs or running, earlier))


def watch(study: Study, paths: StudyPaths, console: Any, until_idle: bool) -> None:
    """Show the status until no run is running or queued, or else until all are done or failed."""
    from nnunet_cpr.studies.run_state import Stage
    from nnunet_cpr.studies.status_table import states

    busy = {Stage.RUNNING, Stage.QUEUED}
    if not until_idle:
        busy |= {Stage.WAITING, Stage.STOPPED}
    with live_status(study, paths, console) as show:
        while any(state.stage in busy for state in states(study, paths).values()):
            show()
            time.sleep(2)
        show()


def finish(study: Study, paths: StudyPaths) -> None:
    """Print the next step, or the failures with exit status 1."""
    from nnunet_cpr.studies.run_state import Stage
    from nnunet_cpr.studies.status_table import states, summary

    found = states(study, paths)
    for run, state in found.items():
        if state.stage is Stage.FAILED:
            print(f"failed: {run.key}, see {paths.log(run)}", *state.reason, sep="\n  ", file=sys.stderr)
    if any(state.stage is not Stage.DONE for state in found.values()):
        stop(f"{summary(found.values())}; run the same command again to continue")
    print(f"all done; next: nnunet-cpr study report {study.name}")


def show_dry_run(preview: Preview, jobs: int, local: Local | None, console: Any) -> None:
    """Print what a study would do.

    Args:
        preview: the study's runs and steps.
        jobs: number of runs that are trained at the same time.
        local: executor of short measurements; None to measure nothing.
        console: rich's console.
    """
    from rich.text import Text

    from nnunet_cpr.studies.measurement import measure

    if local is not None:
        for run in preview.measurable():
            worker = local.worker(run, 0, preview.paths, preview.folders)
            with console.status(f"measuring {run.trainer} on {run.dataset}"):
                preview.add_measurement(run, measure(run, worker.nnunet_device(), worker.environment))
    for line in preview.lines(jobs):
        console.print(line, soft_wrap=isinstance(line, Text))
