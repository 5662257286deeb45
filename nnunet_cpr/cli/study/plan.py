"""``nnunet-cpr study plan``: the differences that a study could find, before it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from typer import Option

from nnunet_cpr import studies
from nnunet_cpr.cli.options import JsonOption, print_json
from nnunet_cpr.cli.study.options import SelectedStudy, StudyOptions
from nnunet_cpr.refusals import Refusal

if TYPE_CHECKING:
    from nnunet_cpr.reports.power import Deviations, Size

_COMPONENTS = 5
"""Number of deviations."""
_HEADINGS = {"found_with_2_seeds_more": "+2 seeds", "found_over_datasets": "all sets"}


def plan(
    options: StudyOptions,
    like: Annotated[
        str | None, Option(help="Study (file or name) whose finished runs tell how much runs vary.")
    ] = None,
    cases: Annotated[
        int | None, Option(min=2, help="Validation cases of a fold; by default 36, or those of --like.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the difference in Dice that 8 of 10 such studies would find, and the runs it takes.

    Simulated studies go through the tests of the report. Without --like, how much runs vary is that of
    published and of this package's own trainings, or assumed.
    """
    from nnunet_cpr.reports import power
    from nnunet_cpr.reports.reading import read_results
    from nnunet_cpr.reports.results import RUN

    selected, finished = options.select(), StudyOptions(study=like).select() if like else None
    name, size = selected.study.name, _size(selected.study)
    if not selected.study.datasets:
        raise Refusal(f"study {name}: expected a data set, got none", "add --dataset")
    if not size.comparisons:
        raise Refusal(f"study {name}: expected two trainers to compare, got one")
    deviations: tuple[Deviations, ...] = (*power.ASSUMED, *power.MEASURED, *power.PUBLISHED)
    if finished is not None:
        results = read_results(finished.study, finished.paths.results, finished.paths.splits)
        deviations = (power.deviations_of(results),)
        of_runs = results.cases.groupby(RUN)["case"].nunique()
        ratio = next(iter(results.ratios.values())).value
        size = size._replace(cases=round(of_runs.mean()), ratio=ratio)
    size = size._replace(cases=cases or size.cases)
    possible, sentence = power.possible_size(size), power.describe(size, deviations[0])
    rows, cost = [_row(size, each) for each in deviations], _cost(selected, finished)
    if as_json:
        return print_json({"sentence": sentence, **size._asdict(), "deviations": rows, "cost": cost})
    console = Console(highlight=False)
    console.print(sentence)
    console.print(_table(rows))
    if finished is None:
        console.print("in points; from short trainings (ACDC, Hippocampus), published ones of")
        console.print("1,000 epochs (organs, lesions; Becktepe et al., 2025), or assumed")
    console.print(f"{size.cases} cases a fold, {power.count(possible.family, 'comparison')}")
    console.print(cost)


def _row(size: Size, deviations: Deviations) -> dict[str, Any]:
    """Return the deviations in points, and the differences that are found with them."""
    from nnunet_cpr.reports import power

    possible = power.possible_size(size)
    larger = possible._replace(seeds=possible.seeds + 2)
    found = [power.smallest_effect(each, deviations) for each in (possible, larger)]
    row = {**asdict(deviations), "found": found[0], "found_with_2_seeds_more": found[1]}
    is_several = size.datasets >= power.MIN_DATASETS
    over = {"found_over_datasets": power.smallest_effect_over(size, deviations)} if is_several else {}
    return row | over


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    from nnunet_cpr.reports.power import to_digits

    headings = [Column(_HEADINGS.get(key, key), justify="right") for key in [*rows[0]][1:]]
    table = Table("deviations of", *headings, box=None, header_style="", padding=(0, 1, 0, 0))
    for title, *values in (row.values() for row in rows):
        deviations = [f"{value:.2f}" for value in values[:_COMPONENTS]]
        table.add_row(escape(title), *deviations, *map(to_digits, values[_COMPONENTS:]))
    return table


def _size(study: studies.Study) -> Size:
    """Return the size of a study, with the default number of cases."""
    from nnunet_cpr.reports.power import Size

    settings = len(study.configurations) * len(study.plans)
    comparisons = settings * len(study.metrics) * (len(study.trainers) - 1)
    datasets = max(1, len(study.datasets))
    return Size(len(study.folds), max(1, len(study.seeds)), comparisons=comparisons, datasets=datasets)


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
