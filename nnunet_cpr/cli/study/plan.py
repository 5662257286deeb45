"""``nnunet-cpr study plan``: the difference that a study could find, and its cost, before it is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, NamedTuple

from rich.console import Console
from typer import Option

from nnunet_cpr import studies
from nnunet_cpr.cli.options import JsonOption, print_json
from nnunet_cpr.cli.study.options import SelectedStudy, StudyOptions
from nnunet_cpr.files import read_json
from nnunet_cpr.refusals import Refusal, counted

if TYPE_CHECKING:
    from nnunet_cpr.reports.power import Size
    from nnunet_cpr.reports.results import StudyResults


class Outlook(NamedTuple):
    """Difference that a study could find, and its cost, each in words."""

    answer: str
    cost: str


def plan(
    options: StudyOptions,
    like: Annotated[
        str | None, Option(help="Study (file or name) whose finished runs tell how much runs vary.")
    ] = None,
    cases: Annotated[
        int | None, Option(min=2, help="Validation cases of a fold; by default those of the splits.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the difference in Dice that 8 of 10 such studies would find, and the runs it takes.

    Simulated studies with the cases of this data set's folds go through the tests of the report. Without
    --like, it is assumed how much runs vary.
    """
    selected, finished = options.select(), StudyOptions(study=like).select() if like else None
    study = selected.study
    if not study.datasets:
        raise Refusal(f"study {study.name}: expected a data set, got none", "add --dataset")
    if len(study.trainers) == 1:
        raise Refusal(f"study {study.name}: expected two trainers to compare, got one")
    outlook = look_ahead(selected, finished, cases, larger=True)
    if as_json:
        print_json(outlook._asdict())
    else:
        print_outlook(outlook, Console(highlight=False))


def print_outlook(outlook: Outlook, console: Console) -> None:
    """Print what a study could find and what it costs."""
    for line in outlook:
        console.print(line, soft_wrap=True, markup=False)


def look_ahead(
    selected: SelectedStudy,
    finished: SelectedStudy | None = None,
    cases: int | None = None,
    larger: bool = False,
) -> Outlook:
    """Return what a study could find and what it costs, in one sentence each.

    Args:
        selected: the study, with one data set or more.
        finished: a study whose finished runs tell how much runs vary, and how long they take.
        cases: validation cases of a fold; None for those of the data sets' splits.
        larger: say what a larger study could find, too, which takes seconds.

    Raises:
        Refusal: the finished runs are too few.
    """
    from nnunet_cpr.reports import power
    from nnunet_cpr.reports.reading import read_results

    study, paths, _ = selected
    deviations, source = power.ASSUMED[0], "assumed"
    known = _cases_of_folds(selected)
    if finished is not None:
        results = read_results(finished.study, finished.paths.results, finished.paths.splits)
        deviations, source = power.deviations_of(results), f"in study {finished.study.name}"
        known = known or _cases_of_runs(results)
    size, assumed = _size(study, known, cases), "" if known or cases else "assumed "
    in_words = power.describe if larger else power.answer
    answer = "one trainer: nothing to compare"
    if size.comparisons:
        given = f"with {assumed}{counted(size.cases, 'case')} a fold, if runs vary as {source}"
        answer = f"{in_words(size, deviations)}, {given}"
    found = studies.states(study, paths)
    others = {} if finished is None else studies.states(finished.study, finished.paths)
    done = {run: state for run, state in others.items() if state.stage is studies.Stage.DONE}
    left = studies.time_left(done | found, 1, studies.timed_steps(study, paths.results))
    hours = f"about {left.total_seconds() / 3600:,.1f} hours, one run at a time" if left else ""
    unknown = "hours unknown, as no training on these data was timed here"
    is_done = all(state.stage is studies.Stage.DONE for state in found.values())
    parts = [studies.steps_summary(found), "" if is_done else hours or unknown]
    return Outlook(answer, "; ".join(filter(None, parts)))


def _size(study: studies.Study, known: Sequence[tuple[float, float]], cases: int | None) -> Size:
    """Return the size of a study.

    Args:
        study: the study.
        known: training and validation cases of folds, none if they are unknown.
        cases: validation cases of a fold in place of these.
    """
    from nnunet_cpr.reports.power import Size

    settings = len(study.configurations) * len(study.plans)
    size = Size(
        folds=len(study.folds),
        seeds=max(1, len(study.seeds)),
        comparisons=settings * len(study.metrics) * (len(study.trainers) - 1),
        datasets=len(study.datasets),
    )
    if known:
        ratio = mean(val / train for train, val in known)
        size = size._replace(cases=max(1, round(mean(val for _, val in known))), ratio=ratio)
    return size._replace(cases=cases or size.cases)


def _cases_of_runs(results: StudyResults) -> list[tuple[float, float]]:
    """Return the training and validation cases of finished runs."""
    from nnunet_cpr.reports.results import RUN

    of_runs = results.cases.groupby([*RUN])["case"].nunique()
    return [
        (cases / results.ratios[dataset].value, cases)
        for dataset, cases in zip(of_runs.index.get_level_values("dataset"), of_runs)
    ]


def _cases_of_folds(selected: SelectedStudy) -> list[tuple[float, float]]:
    """Return the training and validation cases of the folds, none if those of a data set are unknown.

    nnU-Net makes its five folds with the first training; before, they have as many cases as the
    ``dataset.json`` says.
    """
    study, paths, folders = selected
    found: list[tuple[float, float]] = []
    for run in study.runs():
        if fold := studies.cases_of_fold(run, paths.splits, paths.preprocessed):
            found.append((len(fold["train"]), len(fold["val"])))
            continue
        try:
            number = read_json(Path(folders["nnUNet_raw"]) / run.dataset / "dataset.json")["numTraining"]
            found.append((0.8 * number, 0.2 * number))
        except (OSError, ValueError, LookupError, TypeError):
            return []
    return found if all(train > 0 and val > 0 for train, val in found) else []
