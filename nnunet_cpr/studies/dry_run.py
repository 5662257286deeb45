"""Preview of ``nnunet-cpr study run`` that changes no file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import RenderableType
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from nnunet_cpr.nnunet.fold_files import CHECKPOINTS, FINAL_CHECKPOINT, is_complete_checkpoint
from nnunet_cpr.studies.definition import Run, Study
from nnunet_cpr.studies.disk_space import free_bytes, needed_bytes
from nnunet_cpr.studies.estimates import (
    Measured,
    add_epoch,
    iteration_seconds,
    result_bytes,
    time_left,
)
from nnunet_cpr.studies.measurement import Measurement
from nnunet_cpr.studies.preparation import Step, is_preprocessed
from nnunet_cpr.studies.run_state import Stage, State, StudyPaths
from nnunet_cpr.studies.status_table import states, varying_columns

_MOST_LINES = 40
"""Runs up to which the table has a line for each."""


@dataclass(frozen=True)
class Preview:
    """Runs, preparation and disk space of a study, found without changing a file.

    Attributes:
        study: the study.
        paths: the study's folders.
        folders: nnU-Net's folders by the names of their environment variables.
        steps: commands that prepare the data sets.
        found: states of the runs, in which ``epoch`` is the one that an attempt continues from.
        actions: what ``study run`` would do with each run.
        seconds: seconds of an iteration in earlier trainings.
    """

    study: Study
    paths: StudyPaths
    folders: Mapping[str, str]
    steps: Sequence[Step]
    found: dict[Run, State]
    actions: dict[Run, str]
    seconds: Measured

    def measurable(self) -> list[Run]:
        """Return a run for each data set, configuration and plans that are ready but not measured."""
        runs: dict[tuple[str, str, str], Run] = {}
        for run, state in self.found.items():
            is_open = state.stage in (Stage.WAITING, Stage.STOPPED, Stage.FAILED, Stage.QUEUED)
            is_known = state.epochs is not None and (
                state.epoch_seconds or self.seconds.typical(run) is not None
            )
            if is_open and not is_known and is_preprocessed(run, self.folders):
                runs.setdefault((run.dataset, run.configuration, run.plans), run)
        return list(runs.values())

    def add_measurement(self, run: Run, measured: Measurement) -> None:
        """Use a short measurement for all runs without an earlier training."""
        add_epoch(self.seconds, run, run.trainer, measured.epoch_seconds)
        for other, state in self.found.items():
            if other.trainer == run.trainer and state.epochs is None:
                self.found[other] = replace(state, epochs=measured.epochs)

    def lines(self, jobs: int) -> Iterator[RenderableType]:
        """Yield the table, and the lines below it.

        Args:
            jobs: number of runs that are trained at the same time.
        """
        for step in self.steps:
            yield Text(f"first: {' '.join(step.command)}")
        yield self._table() if len(self.found) <= _MOST_LINES else self._counts()
        unfinished = [run for run, state in self.found.items() if state.stage is not Stage.DONE]
        exist = sum(run.folder(self.paths.results).is_dir() for run in self.found)
        done = len(self.found) - len(unfinished)
        yield Text(f"{len(self.found)} runs, {exist} of them exist already, {done} are done")
        if unfinished:
            yield Text(self._time(jobs))
            yield from self._disk(unfinished, jobs)

    def _table(self) -> Table:
        columns = varying_columns(self.study)
        table = Table(title=f"Study {self.study.name}: dry run")
        for heading in [*columns, "trainer", "study run would do"]:
            table.add_column(heading, overflow="fold")
        for run, action in self.actions.items():
            names = [value_of(run) for value_of in columns.values()]
            table.add_row(*names, escape(run.entry), action)
        return table

    def _counts(self) -> Table:
        kinds = list(dict.fromkeys(map(_kind, self.actions.values())))
        table = Table(title=f"Study {self.study.name}: dry run, number of runs")
        table.add_column("trainer", overflow="fold")
        for kind in kinds:
            table.add_column(kind, justify="right")
        counts = Counter((run.entry, _kind(action)) for run, action in self.actions.items())
        for trainer in dict.fromkeys(run.entry for run in self.actions):
            table.add_row(escape(trainer), *(str(counts[trainer, kind]) for kind in kinds))
        return table

    def _time(self, jobs: int) -> str:
        left = time_left(self.found, jobs, self.seconds)
        how = f"({jobs} run{'s' if jobs > 1 else ''} at a time, validation not included)"
        if not left.unknown:
            return f"time: {left} {how}" if left.seconds else "time: only validation left"
        shown = f"time: {left} {how}" if left.seconds else "time: unknown"
        if self.measurable():
            return f"{shown}; add --measure to train a few iterations now"
        return f"{shown}; an estimate needs preprocessed data or an earlier training"

    def _disk(self, unfinished: Sequence[Run], jobs: int) -> Iterator[Text]:
        results = self.paths.results
        finished = result_bytes(self.study, results)
        needed, unknown = needed_bytes(unfinished, jobs, results, self.folders, finished)
        free = free_bytes(results)
        if needed:
            without = f", without {unknown} runs whose network is unknown" if unknown else ""
            have = f"{decimal(free)} free in {results}"
            yield Text(f"disk space: about {decimal(round(needed))} needed{without}, {have}")
        else:
            yield Text(f"disk space: unknown before planning, {decimal(free)} free in {results}")
        if needed > free:
            yield Text(f"warning: not enough disk space in {results}", style="red")


def preview(
    study: Study, paths: StudyPaths, folders: Mapping[str, str], steps: Sequence[Step]
) -> Preview:
    """Return what a study would do, without changing a file.

    Args:
        study: a study that :func:`~nnunet_cpr.studies.preparation.check_study_data` accepts.
        paths: the study's folders.
        folders: nnU-Net's folders by the names of their environment variables.
        steps: the steps that prepare the data sets.
    """
    found: dict[Run, State] = {}
    actions: dict[Run, str] = {}
    for run, state in states(study, paths).items():
        epoch = _start_epoch(run, paths)
        actions[run] = _action(run, state, epoch, paths)
        is_stopped = state.stage in (Stage.WAITING, Stage.STOPPED, Stage.FAILED)
        found[run] = replace(state, epoch=epoch or 0) if is_stopped else state
    return Preview(study, paths, folders, steps, found, actions, iteration_seconds(study, paths.results))


def _start_epoch(run: Run, paths: StudyPaths) -> int | None:
    """Return the epoch from which nnU-Net would continue, None without a checkpoint."""
    files = [run.folder(paths.results) / name for name in CHECKPOINTS]
    complete = [path for path in files if is_complete_checkpoint(path)]
    if not complete:
        return None
    from nnunet_cpr.nnunet.checkpoints import age

    return max((found.epochs for path in complete if (found := age(path)) is not None), default=None)


def _action(run: Run, state: State, epoch: int | None, paths: StudyPaths) -> str:
    if state.stage in (Stage.DONE, Stage.QUEUED):
        return state.stage.value
    if state.stage is Stage.RUNNING:
        return f"running, epoch {state.epoch}"
    if is_complete_checkpoint(run.folder(paths.results) / FINAL_CHECKPOINT):
        action = "validates"
    elif epoch is not None:
        action = f"continues from epoch {epoch}"
    else:
        action = "starts again, no checkpoint" if state.epoch else "new"
    return f"failed, {action}" if state.stage is Stage.FAILED else action


def _kind(action: str) -> str:
    return action.split(" from ")[0].split(", epoch")[0].split(", no ")[0]
