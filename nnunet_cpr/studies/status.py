"""Status of a study: states of its runs, a table for the terminal, training steps and time left."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from nnunet_cpr.nnunet.fold_files import LOGS, read_logs
from nnunet_cpr.refusals import counted
from nnunet_cpr.studies.cascades import runs_without_predictions
from nnunet_cpr.studies.data import notes, seen_cases
from nnunet_cpr.studies.local_and_slurm import queued_runs
from nnunet_cpr.studies.state import Stage, State, StudyPaths, parse_trainer, state_of
from nnunet_cpr.studies.study import Run, Study

_COLOURS = {Stage.DONE: "green", Stage.RUNNING: "cyan", Stage.FAILED: "red", Stage.STOPPED: "yellow"}
_COLUMNS = ("dataset", "configuration", "plans", "fold", "seed")
"""Attributes of a run that are shown if they differ between runs."""
WIDE = 100
"""Columns of a terminal that shows each run."""
_TRAINER = "nnUNetTrainer"
_ITERATIONS = 250
"""Training steps of nnU-Net's epoch."""
Place = tuple[str, str, str]
"""Data set, configuration and plans."""


def states(study: Study, paths: StudyPaths) -> dict[Run, State]:
    """Return the present states of all runs."""
    queued = queued_runs(paths)
    return {run: state_of(run, paths, queued) for run in study.runs()}


def summary(found: Iterable[State]) -> str:
    """Return a line such as "3 of 10 done, 2 running, 1 failed"."""
    counts = Counter(state.stage for state in found)
    others = (Stage.RUNNING, Stage.QUEUED, Stage.STOPPED, Stage.FAILED)
    parts = [f"{counts[stage]} {stage.value}" for stage in others if counts[stage]]
    return ", ".join([f"{counts[Stage.DONE]} of {sum(counts.values())} done", *parts])


def status_table(
    study: Study,
    found: Mapping[Run, State],
    jobs: int | None = None,
    width: int = WIDE,
    started: datetime | None = None,
) -> RenderableType:
    """Return a table of the runs, and below it the reasons of failures.

    Args:
        study: the study.
        found: the states of its runs.
        jobs: number of runs that are trained at the same time; None counts the running ones.
        width: columns of the terminal; below :data:`WIDE` the table has one line for each trainer in
            place of each run.
        started: when the command began, for the time that has passed.
    """
    running = sum(state.stage is Stage.RUNNING for state in found.values())
    parts = [f"Study {study.name}: {summary(found.values())}"]
    if started is not None:
        passed = timedelta(seconds=round((datetime.now() - started).total_seconds()))
        parts.append(f"{passed} so far")
    if left := time_left(found, jobs or running):
        parts.append(f"about {left} left, until {datetime.now() + left:%a %H:%M}")
    short = shorten([entry.full_title for entry in study.trainers])
    titles = {entry.key: escape(name) for entry, name in zip(study.trainers, short)}
    rows = _run_rows if width >= WIDE else _trainer_rows
    headings, *lines = rows(found, titles)
    table = Table(*(Column(heading, overflow="fold") for heading in headings))
    for line in lines:
        table.add_row(*line)
    failures = [
        f"\n[red]failed[/]: {run.dataset}, {run.fold_and_seed}, {titles[run.entry]}: "
        + escape(state.reason.replace(" | ", "\n  "))  # the lines of the log
        for run, state in found.items()
        if state.stage is Stage.FAILED
    ]
    return Group(Text("; ".join(parts), style="bold"), table, *failures)


def shorten(names: Sequence[str]) -> list[str]:
    """Return names without the words at their beginning and end that all have.

    Example:
        >>> shorten(["nnUNetTrainerSGD_10epochs", "nnUNetTrainerCPR_ws4_10epochs"])
        ['SGD', 'CPR_ws4']
        >>> shorten(["nnU-Net's weight decay", "CPR"])
        ["nnU-Net's weight decay", 'CPR']
        >>> shorten(["nnUNetTrainerSGD_10epochs", "nnUNetTrainerSGD_10epochs, 2d"])
        ['nnUNetTrainerSGD_10epochs', '2d']
    """
    trainers, own = zip(*(name.partition(", ")[::2] for name in names))
    if len(set(trainers)) == 1:  # they differ in their plans, configuration or weights
        return [settings or name for name, settings in zip(names, own)]
    words = [name.split("_") for name in names]
    if all(name.startswith(_TRAINER) and name != _TRAINER for name in names):
        words = [name.removeprefix(_TRAINER).split("_") for name in names]
    for end in (0, -1):
        while len({each[end] for each in words}) == 1 < min(map(len, words)):
            for each in words:
                del each[end]
    return ["_".join(each) for each in words]


def _differing(found: Mapping[Run, State], names: Sequence[str]) -> list[str]:
    return [name for name in names if len({getattr(run, name) for run in found}) > 1]


def _run_rows(found: Mapping[Run, State], titles: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """Yield the headings, and a line for each run."""
    columns = _differing(found, _COLUMNS)
    yield *columns, "trainer", "epoch", "pseudo Dice", "Dice", ""
    for run, state in found.items():
        yield (
            *(str(getattr(run, name)) for name in columns),
            titles[run.entry],
            state.progress,
            _dice(state.pseudo_dice),
            _dice(state.dice),
            f"[{_COLOURS.get(state.stage, 'default')}]{state.activity}[/]",
        )


def _trainer_rows(found: Mapping[Run, State], titles: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """Yield the headings, and a line for each trainer on each data set."""
    columns = _differing(found, ("dataset", "configuration", "plans"))
    yield *columns, "trainer", "done", "now", "left"
    groups: dict[tuple[str, ...], dict[Run, State]] = defaultdict(dict)
    for run, state in found.items():
        group = (*(getattr(run, name) for name in columns), titles[run.entry])
        groups[group][run] = state
    for group, members in groups.items():
        done = sum(state.stage is Stage.DONE for state in members.values())
        running = [(run, state) for run, state in members.items() if state.stage is Stage.RUNNING]
        progress = [
            f"{run.fold_and_seed}: epoch {state.progress}, {state.activity}"
            for run, state in running[:1]
        ]
        others = "; ".join([summary(members.values()).partition(", ")[2], *progress])
        left = time_left(members, 1)
        yield *group, f"{done}/{len(members)}", others, "" if left is None else str(left)


def timed_steps(study: Study, results: Path) -> dict[Place, float]:
    """Return the seconds of a training step of any trainer by data set, configuration and plans.

    They are from the last fold that nnU-Net has trained there, if its log has a whole epoch.
    """
    found = {}
    for place in {(run.dataset, run.configuration, run.plans) for run in study.runs()}:
        dataset, configuration, plans = place
        logs = (results / dataset).glob(f"*__{plans}__{configuration}/fold_*/{LOGS}")
        for log in sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True):
            seconds = read_logs(log.parent)["seconds"].median()
            if not math.isnan(seconds):
                found[place] = seconds / _iterations(log.parent.parent.name.partition("__")[0])
                break
    return found


def time_left(
    found: Mapping[Run, State], jobs: int, timed: Mapping[Place, float] | None = None
) -> timedelta | None:
    """Return the time left, None if nothing is or if a data set has no finished or timed training.

    The median time of the finished runs with the same data, configuration and plans counts, in
    proportion to the training steps; their validations are included.

    Args:
        found: the states of all runs.
        jobs: number of runs that are trained at the same time.
        timed: seconds of a training step where no run is finished, of :func:`timed_steps`.
    """
    measured: dict[Place, list[float]] = defaultdict(list)
    for run, state in found.items():
        if state.seconds and state.epoch:
            each = state.seconds / state.epoch / _iterations(run.trainer)
            measured[run.dataset, run.configuration, run.plans].append(each)
    total = 0.0
    for run, state in found.items():
        steps = steps_left(run, state)
        place = run.dataset, run.configuration, run.plans
        step_seconds = measured.get(place)
        if step_seconds is None and timed and place in timed:
            step_seconds = [timed[place]]
        if steps is None or (steps and not step_seconds):
            return None
        total += steps * median(step_seconds or [0.0])
    return timedelta(seconds=round(total / max(1, jobs))) if total else None


def steps_left(run: Run, state: State) -> int | None:
    """Return the number of training steps left, None if the number of epochs is unknown."""
    if state.stage is Stage.DONE:
        return 0
    if state.epochs is None:
        return None
    return max(0, state.epochs - (state.epoch or 0)) * _iterations(run.trainer)


def dry_run_lines(study: Study, paths: StudyPaths, commands: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the commands that a study would run.

    Args:
        study: a study that :func:`~nnunet_cpr.studies.data.check_study_data` accepts.
        paths: the study's folders.
        commands: the commands that prepare the data sets.
    """
    for command in commands:
        yield f"first: {' '.join(command)}"
    yield from (f"warning: {note}" for note in (*notes(study), *seen_cases(study, paths)))
    found = states(study, paths)
    for run, state in found.items():
        begin = f" -pretrained_weights {run.weights(paths.results)}" if run.pretrained else ""
        yield (
            f"nnUNetv2_train {run.dataset} {run.configuration} {run.fold} -tr {run.trainer} "
            f"-p {run.plans}{begin}: {state.stage.value}, epoch {state.progress}"
        )
    left = [run for run, state in found.items() if state.stage is not Stage.DONE]
    again = {earlier: run for run in left for earlier in runs_without_predictions(run, paths)}
    for earlier, run in again.items():
        if found.get(earlier, State(Stage.WAITING)).stage is Stage.DONE:
            yield f"again --val: {earlier.key}, whose predictions for {run.configuration} are missing"


def steps_summary(found: Mapping[Run, State]) -> str:
    """Return a line such as "0 of 2 done; 500,000 training steps left"."""
    steps = [steps_left(*each) for each in found.items()]
    unknown = steps.count(None)
    without = f", without {counted(unknown, 'run')} whose number of epochs is unknown" if unknown else ""
    left = counted(sum(filter(None, steps)), "training step")
    return f"{summary(found.values())}; {left} left{without}"


def _iterations(trainer: str) -> int:
    return getattr(parse_trainer(trainer), "iterations", None) or _ITERATIONS


def _dice(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4f}"
