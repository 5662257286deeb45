"""``nnunet-cpr study plan``: the differences that a study could find, before it is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from typer import Option

from nnunet_cpr import studies
from nnunet_cpr.cli.study._options import SelectedStudy, StudyOptions

if TYPE_CHECKING:
    from nnunet_cpr.reports.power import Deviations, Size

_COMPONENTS = ("case", "training", "fold", "seed", "residual")


def plan(
    options: StudyOptions,
    like: Annotated[
        str | None, Option(help="Study (file or name) whose finished runs tell how much runs vary.")
    ] = None,
    cases: Annotated[
        int | None, Option(min=2, help="Validation cases of a fold; by default 36, or those of --like.")
    ] = None,
) -> None:
    """Print the difference in Dice that 8 of 10 such studies would find, and the runs it takes.

    Simulated studies go through the tests of the report. Without --like, how much runs vary is assumed,
    or that of this package's own short trainings.
    """
    from nnunet_cpr.reports import power
    from nnunet_cpr.reports.reading import read_results
    from nnunet_cpr.reports.results import RUN

    selected, finished = options.select(), StudyOptions(study=like).select() if like else None
    name, size = selected.study.name, _size(selected.study)
    if not selected.study.datasets:
        raise studies.StudyError(f"study {name}: expected a data set, got none; add --dataset")
    if not size.comparisons:
        raise studies.StudyError(f"study {name}: expected two trainers to compare, got one")
    deviations: tuple[power.Deviations, ...] = (*power.ASSUMED, *power.MEASURED)
    if finished is not None:
        results = read_results(finished.study, finished.paths.results, finished.paths.splits)
        deviations = (power.deviations_of(results),)
        of_runs = results.cases.groupby(RUN)["case"].nunique()
        ratio = next(iter(results.ratios.values())).value
        size = size._replace(cases=round(of_runs.mean()), ratio=ratio)
    size = size._replace(cases=cases or size.cases)
    console = Console()
    console.print(power.describe(size, deviations[0]), highlight=False)
    console.print(_table(power.possible_size(size), deviations))
    if finished is None:
        measured = " and ".join(each.title for each in power.MEASURED)
        console.print(f"in points; {measured} measured in short trainings, others assumed")
    comparisons = power.count(size.comparisons, "comparison")
    console.print(f"{size.cases} cases a fold, {comparisons}", highlight=False)
    console.print(_cost(selected, finished), highlight=False)


def _table(size: Size, deviations: Sequence[Deviations]) -> Table:
    """Return the deviations in points, and the differences that are found with each."""
    from nnunet_cpr.reports.power import smallest_effect, to_digits

    headings = (Column(name, justify="right") for name in (*_COMPONENTS, "found", "2 seeds more"))
    table = Table("deviations of", *headings, box=None, header_style="")
    for each in deviations:
        parts = [f"{getattr(each, component):.2f}" for component in _COMPONENTS]
        effects = [smallest_effect(one, each) for one in (size, size._replace(seeds=size.seeds + 2))]
        table.add_row(escape(each.title), *parts, *map(to_digits, effects))
    return table


def _size(study: studies.Study) -> Size:
    """Return the size of a study, with the default number of cases."""
    from nnunet_cpr.reports.power import Size

    settings = len(study.datasets) * len(study.configurations) * len(study.plans)
    comparisons = settings * len(study.metrics) * (len(study.trainers) - 1)
    return Size(len(study.folds), max(1, len(study.seeds)), comparisons=comparisons)


def power_line(study: studies.Study) -> str:
    """Return what a study could find with the first of the assumed deviations."""
    from nnunet_cpr.reports.power import ASSUMED, describe

    size = _size(study)
    return describe(size, ASSUMED[0]) if size.comparisons else "one trainer: nothing to compare"


def _cost(selected: SelectedStudy, finished: SelectedStudy | None) -> str:
    """Return the number of runs and training steps left, with hours if finished runs tell them."""
    found = studies.states(selected.study, selected.paths)
    others = {} if finished is None else studies.states(finished.study, finished.paths)
    done = {run: state for run, state in others.items() if state.stage is studies.Stage.DONE}
    left = studies.time_left(done | found, jobs=1)
    hours = f"; about {left.total_seconds() / 3600:,.1f} hours, one run at a time" if left else ""
    return f"{studies.steps_summary(found)}{hours}"
