"""Tables of a report as pandas objects, and their text for the page, Markdown, LaTeX and a terminal."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT, is_complete_checkpoint, seconds_per_case
from nnunet_cpr.reports.comparison import Comparison
from nnunet_cpr.reports.metrics import METRICS, Metric, difference_text, p_text, value_text
from nnunet_cpr.reports.results import Results, Setting, class_means, run_means, unique

_DEVIATIONS = {"folds": "fold", "seeds": "seed"}
_BEST = r"\*\*(\S+)\*\*"


class Table(NamedTuple):
    """Table of text; its index and columns are the headings, and ``**`` marks the best values."""

    caption: str
    cells: pd.DataFrame


# Content


def metrics_of(results: Results) -> list[Metric]:
    """Return the metrics of the study that have been read or computed."""
    return [METRICS[name] for name in results.study.metrics if name in results.cases]


def main_table(results: Results) -> pd.DataFrame:
    """Return ``table.csv``: the foreground mean of every trainer in every setting.

    Returns:
        One row for each setting and trainer. For each metric there is the mean over the finished runs
        (``dice_percent``), the standard deviation (n - 1) of the folds' means over seeds
        (``deviation_folds_points``) and of the seeds' means over folds (``deviation_seeds_points``), and
        ``best``, which marks the best value of a setting if all trainers have finished the same runs.
        The columns of other metrics than Dice start with their name. ``published_percent`` is the
        published Dice of the data set.
    """
    study = results.study
    means = {metric: run_means(results.cases, metric.name) for metric in metrics_of(results)}
    rows = []
    for setting, entry in product(results.settings, study.trainers):
        runs = results.finished_runs(setting, entry.trainer)
        numbers: dict[str, float] = {}
        for metric, table in means.items():
            mine = results.rows_for(table, setting)
            mine = mine[mine["trainer"] == entry.trainer]
            numbers |= _numbers(metric, metric.scale * mine.set_index(["fold", "seed"])[metric.name])
        rows.append(
            {
                **setting._asdict(),
                "group": entry.group,
                "label": entry.title,
                "trainer": entry.trainer,
                **numbers,
                "folds": " ".join(map(str, unique([fold for fold, _ in runs]))),
                "runs": len(runs),
                "runs_planned": results.planned_runs,
                "published_percent": entry.published.get(setting.dataset, np.nan),
                "finished": str(runs) if runs else None,
            }
        )
    table = pd.DataFrame(rows)
    for metric in means:
        table[_key(metric, "best")] = _best(table, metric)
    return table.drop(columns="finished")


def _key(metric: Metric, name: str) -> str:
    return name if metric.name == "dice" else f"{metric.name}_{name}"


def _deviation_key(metric: Metric, source: str) -> str:
    return _key(metric, f"deviation_{source}_{metric.difference_unit}")


def _numbers(metric: Metric, runs: pd.Series) -> dict[str, float]:
    """Return mean and standard deviations of the runs, whose index is (fold, seed)."""
    deviations = {
        _deviation_key(metric, name): float(runs.groupby(level).mean().std(ddof=1))
        for name, level in _DEVIATIONS.items()
    }
    return {metric.column: float(runs.mean()), **deviations}


def _best(table: pd.DataFrame, metric: Metric) -> pd.Series:
    """Return True for the best value of a setting; values that are equal as shown are equally good."""
    shown = metric.sign * table[metric.column].round(2)
    setting = [table[name] for name in Setting._fields]
    is_same = table["finished"].groupby(setting, sort=False).transform("nunique") <= 1
    is_several = shown.groupby(setting, sort=False).transform("count") > 1
    return (
        is_same
        & is_several
        & (shown != 0)
        & (shown == shown.groupby(setting, sort=False).transform("max"))
    )


def shown_main_table(results: Results, numbers: pd.DataFrame) -> Table:
    """Return the main table as text: trainers down, settings and metrics across."""
    study = results.study
    index = pd.Index([entry.full_title for entry in study.trainers], name="trainer")
    cells = {}
    for setting in results.settings:
        rows = results.rows_for(numbers, setting)
        for metric in metrics_of(results):
            column = (results.title(setting), metric.heading)
            cells[column] = [_value(metric, row) for _, row in rows.iterrows()]
        if rows["published_percent"].notna().any():
            column = (results.title(setting), "published Dice (%)")
            cells[column] = list(map(value_text, rows["published_percent"]))
    caption = f"Foreground mean of {', '.join(metric.heading for metric in metrics_of(results))}"
    table = pd.DataFrame(cells, index=index)
    if all(heading == "Dice (%)" for _, heading in cells):
        table = table.droplevel(1, axis=1)
    return Table(caption, table)


def _value(metric: Metric, row: pd.Series) -> str:
    deviations = [row[_deviation_key(metric, name)] for name in _DEVIATIONS]
    mean = value_text(row[metric.column])
    text = f"**{mean}**" if row[_key(metric, "best")] else mean
    text += "".join(f" ± {deviation:.2f}" for deviation in deviations if not math.isnan(deviation))
    if row["runs"] < row["runs_planned"]:
        text += f" ({row['runs']} of {row['runs_planned']} runs)"
    return text


def main_table_notes(results: Results) -> list[str]:
    """Return the notes of the main table."""
    study = results.study
    sources = [
        name for name, values in (("folds", study.folds), ("seeds", study.seeds)) if len(values) > 1
    ]
    note = "Mean over all runs (folds and seeds)" if study.seeds else "Mean over folds"
    if sources:
        note += " ± standard deviation over " + " ± over ".join(sources)
    lower = [metric.title for metric in metrics_of(results) if metric.sign < 0]
    notes = [f"{note}. {', '.join(lower)}: lower is better." if lower else f"{note}."]
    if any(len(_finished(results, setting)) > 1 for setting in results.settings):
        notes.append("Means over different runs cannot be compared, so no value is marked as the best.")
    if any(dataset in entry.published for entry in study.trainers for dataset in study.datasets):
        notes.append(f"Published numbers: {study.source or 'source not given'}.")
    return notes


def _finished(results: Results, setting: Setting) -> set[str]:
    """Return the different sets of runs that trainers of a setting have finished."""
    runs = [results.finished_runs(setting, entry.trainer) for entry in results.study.trainers]
    return {str(each) for each in runs if each}


def comparison_numbers(comparisons: Sequence[Comparison]) -> Table:
    """Return the numbers of the comparisons of one setting with one reference."""
    rows = [
        {
            "metric": c.metric.title,
            "verdict": c.verdict,
            "difference": difference_text(c.difference),
            "95 % interval": " to ".join(map(difference_text, (c.interval_low, c.interval_high))),
            "p after Holm": p_text(c.p_holm),
            "P(better / equivalent / worse)": " / ".join(
                map(value_text, (c.p_better, c.p_equivalent, c.p_worse))
            ),
            "non-inferior": "shown" if c.is_non_inferior else "not shown",
            "folds x seeds": f"{len(c.folds)} x {len(c.seeds)}",
        }
        for c in comparisons
    ]
    index = pd.Index([c.entry.full_title for c in comparisons], name="trainer")
    caption = f"Differences to {comparisons[0].reference.full_title}"
    return Table(caption, pd.DataFrame(rows, index=index))


def class_table(results: Results, setting: Setting, metric: Metric) -> Table:
    """Return the mean of each class over the trainer's finished runs, trainers down, classes across."""
    means = results.rows_for(class_means(results.cases, metric.name), setting)
    values = metric.scale * means.pivot_table(
        index="trainer", columns="class", values=metric.name, dropna=False, sort=False, observed=True
    )
    values = values.reindex(columns=unique(means["class"]))
    caption = f"{metric.heading} of each class, mean over the runs that a trainer has finished"
    return Table(caption, _titled(results, values.map(value_text)))


def time_table(results: Results, setting: Setting) -> Table:
    """Return the times of epochs, runs and predictions, the memory and the size of each trainer."""
    epochs = results.rows_for(results.epochs, setting)
    resources = results.rows_for(results.resources, setting).groupby("trainer")
    by_run = epochs.groupby(["trainer", "fold", "seed"])["seconds"].sum(min_count=1)
    folders = {e.trainer: results.fold_folders(setting, e.trainer) for e in results.study.trainers}
    cases = {name: [seconds_per_case(fold) for fold in own] for name, own in folders.items()}
    numbers = pd.DataFrame(
        {
            "epoch, median (s)": epochs.groupby("trainer")["seconds"].median(),
            "training of a run, mean (min)": by_run.groupby("trainer").mean() / 60,
            "with validation, mean (min)": resources["seconds"].mean() / 60,
            "prediction of a case (s)": pd.Series({k: pd.Series(v).mean() for k, v in cases.items()}),
            "parameters (M)": pd.Series({k: _parameters(v) / 1e6 for k, v in folders.items()}),
            "peak memory (GiB)": resources["peak_memory_bytes"].max() / 2**30,
            "peak GPU memory (GiB)": resources["peak_gpu_memory_bytes"].max() / 2**30,
        }
    ).astype(float)
    caption = "Time and memory; comparable only on the same, otherwise idle machine"
    return Table(caption, _titled(results, numbers.map(lambda x: "-" if x != x else f"{x:.1f}")))


def _parameters(folds: Sequence[Path]) -> float:
    """Return the number of parameters in the first final checkpoint that is still there, or NaN."""
    from nnunet_cpr.nnunet.checkpoints import count_parameters  # imports torch

    checkpoints = (fold / FINAL_CHECKPOINT for fold in folds)
    return next(
        (float(count_parameters(path)) for path in checkpoints if is_complete_checkpoint(path)), math.nan
    )


def _titled(results: Results, by_trainer: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in the study's order, with the titles of the trainers."""
    titles = {e.trainer: e.full_title for e in results.study.trainers if e.trainer in by_trainer.index}
    return by_trainer.loc[list(titles)].rename(index=titles).rename_axis("trainer")


# Text


def to_html(table: Table) -> str:
    """Return a table as HTML."""
    cells = table.cells.astype(str).map(html.escape).replace(_BEST, r"<strong>\1</strong>", regex=True)
    cells = cells.rename(index=_escape_html, columns=_escape_html)
    return str(cells.to_html(escape=False, border=0, index_names=False))


def _escape_html(heading: object) -> str:
    return html.escape(str(heading))


def to_latex(table: Table, notes: Sequence[str]) -> str:
    r"""Return a ``tabular`` with booktabs rules; the notes are comments below it."""
    style = table.cells.rename_axis(index=None).style.format(escape="latex")
    style = style.format_index(escape="latex", axis=0).format_index(escape="latex", axis=1)
    columns = "l" + "r" * len(table.cells.columns)
    text = style.to_latex(column_format=columns, hrules=True, multicol_align="c")
    text = re.sub(_BEST, r"\\textbf{\1}", text).replace("±", r"$\pm$")
    return "% Needs \\usepackage{booktabs}.\n" + text + "".join(f"% {note}\n" for note in notes)


def to_markdown(table: Table) -> str:
    """Return a table in Markdown; pandas needs one more package for this."""
    columns = [" ".join(c) if isinstance(c, tuple) else str(c) for c in table.cells.columns]
    rows = [["trainer", *columns], ["---", *["---:"] * len(columns)]]
    rows += [[escape_markdown(heading), *cells] for heading, *cells in table.cells.itertuples()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def escape_markdown(text: str) -> str:
    """Return a text in which no character has a meaning in Markdown."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)
