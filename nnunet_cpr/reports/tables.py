"""Tables of a report as pandas objects, and their text for the page, Markdown, LaTeX and a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT, is_complete_checkpoint, seconds_per_case
from nnunet_cpr.refusals import counted
from nnunet_cpr.reports.comparison import Comparison, Verdict
from nnunet_cpr.reports.metrics import Metric, value_text
from nnunet_cpr.reports.results import (
    FALSELY_FOUND,
    NOT_FOUND,
    RUN,
    ConditionResults,
    class_means,
    run_means,
    unique,
)
from nnunet_cpr.studies.state import recorded_seconds
from nnunet_cpr.studies.study import Study, TrainerEntry

_DEVIATIONS = {"folds": "fold", "seeds": "seed"}


class Table(NamedTuple):
    """Table of text; its index and columns are the headings, and ``**`` marks the verdict "better"."""

    caption: str
    cells: pd.DataFrame


# Content


def main_table(results: ConditionResults, judged: Sequence[Comparison] = ()) -> pd.DataFrame:
    """Return the rows of a condition in ``table.csv``: the foreground mean of every trainer.

    Args:
        results: results of the condition.
        judged: comparisons of its trainers with the reference.

    Returns:
        One row for each trainer. For each metric there is the mean over the finished runs
        (``dice_percent``), the standard deviation (n - 1) of the folds' means over seeds
        (``deviation_folds_points``) and of the seeds' means over folds (``deviation_seeds_points``), and
        ``better``, which marks the trainers whose verdict is "better". The columns of other metrics than
        Dice start with their name.
        ``published_percent`` is the published Dice of the data set.
    """
    rows = []
    for entry in results.study.trainers:
        runs = results.finished_runs(entry.key)
        rows.append(
            {
                **results.condition._asdict(),
                "group": entry.group,
                "label": entry.title,
                "trainer": entry.key,
                "folds": " ".join(map(str, unique([fold for fold, _ in runs]))),
                "runs": len(runs),
                "runs_planned": results.planned_runs,
                "runs_incomplete": results.incomplete_runs(entry.key),
                "published_percent": entry.published.get(results.condition.dataset, np.nan),
            }
        )
    table = pd.DataFrame(rows)
    for metric in results.metrics:
        means = _means_and_deviations(results, metric)
        table = table.join(means, on="trainer")
        table[_key(metric, "better")] = table["trainer"].isin(_better(results, metric, judged))
    return table


def with_own_places(table: pd.DataFrame, study: Study) -> pd.DataFrame:
    """Return the table of a CSV file in which entries have their own configuration and plans.

    Args:
        table: rows with the columns trainer, configuration and plans, of the study.
        study: the study.
    """
    table = table.copy()
    for entry in study.trainers:
        for column, own in (("configuration", entry.configuration), ("plans", entry.plans)):
            if own:
                table.loc[table["trainer"] == entry.key, column] = own
    return table


def _better(results: ConditionResults, metric: Metric, judged: Sequence[Comparison]) -> set[str]:
    """Return the trainers whose verdict here is "better"."""
    return {
        each.entry.key
        for each in judged
        if each.verdict is Verdict.BETTER
        and each.metric == metric
        and each.condition == results.condition
    }


def _means_and_deviations(results: ConditionResults, metric: Metric) -> pd.DataFrame:
    """Return the mean of each trainer's runs and their standard deviations."""
    means = run_means(results.cases, metric.name).set_index(["trainer", "fold", "seed"])
    runs = metric.scale * means[metric.name]
    columns = {metric.column: runs.groupby("trainer").mean()}
    for name, level in _DEVIATIONS.items():
        of_level = runs.groupby(["trainer", level]).mean()
        columns[_deviation_key(metric, name)] = of_level.groupby("trainer").std()
    return pd.DataFrame(columns)


def _has_different_runs(results: ConditionResults) -> bool:
    """Return True if trainers of a condition have finished different runs."""
    runs = [results.finished_runs(entry.key) for entry in results.study.trainers]
    return len({tuple(each) for each in runs if each}) > 1


def _key(metric: Metric, name: str) -> str:
    return name if metric.name == "dice" else f"{metric.name}_{name}"


def _deviation_key(metric: Metric, source: str) -> str:
    return _key(metric, f"deviation_{source}_{metric.difference_unit}")


def shown_main_table(conditions: Sequence[ConditionResults], judged: Sequence[Comparison] = ()) -> Table:
    """Return the main table as text: trainers down and metrics across, or conditions down."""
    rows, first = {}, conditions[0]
    for results in conditions:
        numbers = main_table(results, judged)
        for metric in results.metrics:
            rows[results.title, metric.heading] = [
                _value(metric, row, results.cases[results.cases["trainer"] == row["trainer"]])
                for _, row in numbers.iterrows()
            ]
        if numbers["published_percent"].notna().any():
            published = numbers["published_percent"].map(value_text)
            rows[results.title, "published Dice (%)"] = published.tolist()
    titles = pd.Index([entry.full_title for entry in first.study.trainers], name="trainer")
    cells, is_dice = pd.DataFrame(rows, index=titles), {key for _, key in rows} == {"Dice (%)"}
    if len(conditions) > 1:
        names = [title if is_dice else f"{title}, {heading}" for title, heading in rows]
        cells = cells.T.set_axis(names).rename_axis("data set")
    elif is_dice:
        cells = cells.droplevel(1, axis=1)
    return Table(f"Foreground mean of {', '.join(metric.heading for metric in first.metrics)}", cells)


def _value(metric: Metric, row: pd.Series, cases: pd.DataFrame) -> str:
    deviations = [row[_deviation_key(metric, name)] for name in _DEVIATIONS]
    mean = value_text(row[metric.column])
    text = f"**{mean}**" if row[_key(metric, "better")] else mean
    text += "".join(f" ± {deviation:.2f}" for deviation in deviations if not math.isnan(deviation))
    text = _add_empty_masks(text, metric, cases)
    if row["runs"] < row["runs_planned"]:
        text += f" ({row['runs']} of {row['runs_planned']} runs)"
    if row["runs_incomplete"]:
        text += f" ({counted(row['runs_incomplete'], 'run')} without all cases)"
    return text


def _add_empty_masks(mean: str, metric: Metric, cases: pd.DataFrame) -> str:
    """Return a mean distance with the number of cases of one empty mask; of such cases only, no mean."""
    known = cases[cases[metric.name].notna()]
    if metric.sign > 0 or known.empty:
        return mean
    case = [*RUN, "case"]
    total, kinds = len(known[case].drop_duplicates()), known.drop_duplicates([*case, "empty"])["empty"]
    counts = {kind: (kinds == kind).sum() for kind in (NOT_FOUND, FALSELY_FOUND)}
    texts = [f"{kind} in {number} of {total} cases" for kind, number in counts.items() if number]
    return ", ".join(texts if (known["empty"] != "").all() else [mean, *texts])


def main_table_notes(
    conditions: Sequence[ConditionResults], judged: Sequence[Comparison] = ()
) -> list[str]:
    """Return the notes of the main table."""
    study = conditions[0].study
    note = "Mean over all runs (folds and seeds)" if study.seeds else "Mean over folds"
    sources = {"folds": study.folds, "seeds": study.seeds}
    if varied := [name for name, values in sources.items() if len(values) > 1]:
        note += " ± standard deviation over " + " ± over ".join(varied)
    lower = [metric.title for metric in conditions[0].metrics if metric.sign < 0]
    notes = [f"{note}. {', '.join(lower)}: lower is better." if lower else f"{note}."]
    if any(map(_has_different_runs, conditions)):
        notes.append("Means over different runs cannot be compared; the comparisons take common ones.")
    if any(_better(each, metric, judged) for each in conditions for metric in each.metrics):
        reference = study.entry(study.reference).full_title
        notes.append(f"Bold: better than {reference} by the comparisons.")
    if any(dataset in entry.published for entry in study.trainers for dataset in study.datasets):
        notes.append(f"Published numbers: {study.source or 'source not given'}.")
    places = f"{' and '.join(study.configurations)} with {' and '.join(study.plans)}"
    described = "; ".join(filter(None, map(_described, study.trainers)))
    return [*notes, f"Trained in {places}: {described}." if described else f"Trained in {places}."]


def _described(entry: TrainerEntry) -> str:
    """Return what an entry trains, "" if its title says all."""
    own = {
        "plans": entry.plans,
        "configuration": entry.configuration,
        "pretrained weights": entry.pretrained,
    }
    given = ", ".join(f"{name} {value}" for name, value in own.items() if value)
    trained = f"{entry.trained} with {given}" if given else entry.trained
    return "" if entry.full_title == trained else f"{entry.full_title} is {trained}"


def class_table(results: ConditionResults, metric: Metric) -> Table:
    """Return the mean of each class over the trainer's finished runs, trainers down, classes across."""
    means, keys = class_means(results.cases, metric.name), ["trainer", "class"]
    texts = (metric.scale * means.groupby(keys, sort=False)[metric.name].mean()).map(value_text)
    for key, cases in results.cases.groupby(keys):
        texts[key] = _add_empty_masks(texts[key], metric, cases)
    cells = texts.unstack("class", fill_value="-")[unique(means["class"])]
    caption = f"{metric.heading} of each class, mean over the runs that a trainer has finished"
    return Table(caption, titled(results, cells))


def time_table(results: ConditionResults) -> Table:
    """Return the times of epochs, runs and predictions, and the size, of each trainer."""
    rows = {}
    for trainer in (entry.key for entry in results.study.trainers):
        epochs = results.epochs[results.epochs["trainer"] == trainer]
        trainings = epochs.groupby(["fold", "seed"])["seconds"].sum(min_count=1)
        runs = [results.run(fold, trainer, seed) for fold, seed in results.finished_runs(trainer)]
        folders = [run.folder(results.folder) for run in runs]
        rows[trainer] = {
            "epoch, median (s)": epochs["seconds"].median(),
            "training of a run, mean (min)": trainings.mean() / 60,
            "with validation, mean (min)": _mean(map(recorded_seconds, folders)) / 60,
            "prediction of a case (s)": _mean(map(seconds_per_case, folders)),
            "parameters (M)": _parameters(folders) / 1e6,
        }
    numbers = pd.DataFrame.from_dict(rows, orient="index").dropna(how="all")
    caption = "Times; comparable only on the same, otherwise idle machine"
    return Table(caption, titled(results, numbers.map(value_text, style=".1f")))


def _mean(values: Iterable[float | None]) -> float:
    """Return the mean of the known values, NaN if there are none."""
    return float(pd.Series(values, dtype=float).mean())


def _parameters(folds: Sequence[Path]) -> float:
    """Return the number of parameters in the first final checkpoint that is still there, or NaN."""
    from nnunet_cpr.nnunet.checkpoints import count_parameters  # imports torch

    checkpoints = (fold / FINAL_CHECKPOINT for fold in folds)
    return next(
        (float(count_parameters(path)) for path in checkpoints if is_complete_checkpoint(path)), math.nan
    )


def titled(results: ConditionResults, by_trainer: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in the study's order, with the titles of the trainers."""
    titles = {e.key: e.full_title for e in results.study.trainers if e.key in by_trainer.index}
    return by_trainer.loc[list(titles)].rename(index=titles).rename_axis("trainer")


# Text


def to_html(table: Table) -> str:
    """Return a table as HTML."""
    text = table.cells.to_html(border=0, index_names=False)
    return re.sub(r"<td>\*\*(\S+)\*\*", r"<td><strong>\1</strong>", text)


def to_latex(table: Table, notes: Sequence[str]) -> str:
    r"""Return a ``tabular`` with booktabs rules; the notes are comments below it."""
    style = table.cells.rename_axis(index=None).style.format(escape="latex")
    for axis in (0, 1):  # headings are not marked as the best
        style = style.format_index(lambda text: text.replace("**", "*{}*"), escape="latex", axis=axis)
    columns = "l" + "r" * len(table.cells.columns)
    text = style.to_latex(column_format=columns, hrules=True, multicol_align="c")
    text = re.sub(r"\*\*(\S+)\*\*", r"\\textbf{\1}", text).replace("±", r"$\pm$")
    return "% Needs \\usepackage{booktabs}.\n" + text + "".join(f"% {note}\n" for note in notes)


def to_markdown(table: Table) -> str:
    """Return a table in Markdown; pandas needs one more package for this."""
    columns = [" ".join(c) if isinstance(c, tuple) else str(c) for c in table.cells.columns]
    headings = [str(table.cells.index.name), *map(escape_markdown, columns)]
    rows = [headings, ["---", *["---:"] * len(columns)]]
    rows += [[escape_markdown(heading), *cells] for heading, *cells in table.cells.itertuples()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def escape_markdown(text: str) -> str:
    """Return a text in which no character has a meaning in Markdown."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)
