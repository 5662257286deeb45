"""Tables of a report as pandas objects, and their text for the page, Markdown, LaTeX and a terminal."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT, is_complete_checkpoint, seconds_per_case
from nnunet_cpr.reports.metrics import Metric, value_text
from nnunet_cpr.reports.results import Results, class_means, run_means, unique
from nnunet_cpr.studies.run_state import recorded_seconds

_DEVIATIONS = {"folds": "fold", "seeds": "seed"}
_BEST = r"\*\*(\S+)\*\*"


class Table(NamedTuple):
    """Table of text; its index and columns are the headings, and ``**`` marks the best values."""

    caption: str
    cells: pd.DataFrame


# Content


def main_table(part: Results) -> pd.DataFrame:
    """Return the rows of a setting in ``table.csv``: the foreground mean of every trainer.

    Returns:
        One row for each trainer. For each metric there is the mean over the finished runs
        (``dice_percent``), the standard deviation (n - 1) of the folds' means over seeds
        (``deviation_folds_points``) and of the seeds' means over folds (``deviation_seeds_points``), and
        ``best``, which marks the best value if all trainers have finished the same runs and no case
        lacks the metric; values that are equal as shown are equally good. The columns of other metrics
        than Dice start with their name.
        ``published_percent`` is the published Dice of the data set.
    """
    means = {metric: run_means(part.cases, metric.name) for metric in part.metrics}
    rows = []
    for entry in part.study.trainers:
        runs = part.finished_runs(entry.trainer)
        numbers: dict[str, float] = {}
        for metric, table in means.items():
            mine = table[table["trainer"] == entry.trainer].set_index(["fold", "seed"])
            numbers |= _numbers(metric, metric.scale * mine[metric.name])
        rows.append(
            {
                **part.setting._asdict(),
                "group": entry.group,
                "label": entry.title,
                "trainer": entry.trainer,
                **numbers,
                "folds": " ".join(map(str, unique([fold for fold, _ in runs]))),
                "runs": len(runs),
                "runs_planned": part.planned_runs,
                "published_percent": entry.published.get(part.setting.dataset, np.nan),
            }
        )
    table = pd.DataFrame(rows)
    for metric in means:
        shown = metric.sign * table[metric.column].round(2)
        is_comparable = shown.count() > 1 and not _has_different_runs(part)
        is_comparable &= not (part.cases["dice"].notna() & part.cases[metric.name].isna()).any()
        table[_key(metric, "best")] = is_comparable & (shown != 0) & (shown == shown.max())
    return table


def _has_different_runs(part: Results) -> bool:
    """Return True if trainers of a setting have finished different runs."""
    runs = [part.finished_runs(entry.trainer) for entry in part.study.trainers]
    return len({tuple(each) for each in runs if each}) > 1


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


def shown_main_table(parts: Sequence[Results]) -> Table:
    """Return the main table as text: trainers down and metrics across, or settings down."""
    rows = {}
    for part in parts:
        numbers = main_table(part)
        for metric in part.metrics:
            rows[part.title, metric.heading] = [_value(metric, row) for _, row in numbers.iterrows()]
        if numbers["published_percent"].notna().any():
            published = list(map(value_text, numbers["published_percent"]))
            rows[part.title, "published Dice (%)"] = published
    metrics = parts[0].metrics
    caption = f"Foreground mean of {', '.join(metric.heading for metric in metrics)}"
    titles = pd.Index([entry.full_title for entry in parts[0].study.trainers], name="trainer")
    if len(parts) == 1:
        table = pd.DataFrame(rows, index=titles)
        return Table(caption, table.droplevel(1, axis=1) if _is_dice(rows) else table)
    names = [title if _is_dice(rows) else f"{title}, {heading}" for title, heading in rows]
    table = pd.DataFrame(list(rows.values()), index=pd.Index(names, name="data set"), columns=titles)
    return Table(caption, table)


def _is_dice(rows: Iterable[tuple[str, str]]) -> bool:
    return all(heading == "Dice (%)" for _, heading in rows)


def _value(metric: Metric, row: pd.Series) -> str:
    deviations = [row[_deviation_key(metric, name)] for name in _DEVIATIONS]
    mean = value_text(row[metric.column])
    text = f"**{mean}**" if row[_key(metric, "best")] else mean
    text += "".join(f" ± {deviation:.2f}" for deviation in deviations if not math.isnan(deviation))
    if row["runs"] < row["runs_planned"]:
        text += f" ({row['runs']} of {row['runs_planned']} runs)"
    return text


def main_table_notes(results: Results) -> list[str]:
    """Return the notes of the main table of all settings."""
    study = results.study
    sources = [
        name for name, values in (("folds", study.folds), ("seeds", study.seeds)) if len(values) > 1
    ]
    note = "Mean over all runs (folds and seeds)" if study.seeds else "Mean over folds"
    if sources:
        note += " ± standard deviation over " + " ± over ".join(sources)
    lower = [metric.title for metric in results.metrics if metric.sign < 0]
    notes = [f"{note}. {', '.join(lower)}: lower is better." if lower else f"{note}."]
    if any(map(_has_different_runs, results.parts())):
        notes.append("Means over different runs cannot be compared, so no value is marked as the best.")
    if any(dataset in entry.published for entry in study.trainers for dataset in study.datasets):
        notes.append(f"Published numbers: {study.source or 'source not given'}.")
    return notes


def class_table(part: Results, metric: Metric) -> Table:
    """Return the mean of each class over the trainer's finished runs, trainers down, classes across."""
    means = class_means(part.cases, metric.name)
    values = metric.scale * means.pivot_table(
        index="trainer", columns="class", values=metric.name, dropna=False, sort=False, observed=True
    )
    values = values.reindex(columns=unique(means["class"]))
    caption = f"{metric.heading} of each class, mean over the runs that a trainer has finished"
    return Table(caption, _titled(part, values.map(value_text)))


def time_table(part: Results) -> Table:
    """Return the times of epochs, runs and predictions, and the size, of each trainer."""
    rows = {}
    for trainer in (entry.trainer for entry in part.study.trainers):
        epochs = part.epochs[part.epochs["trainer"] == trainer]
        trainings = epochs.groupby(["fold", "seed"])["seconds"].sum(min_count=1)
        runs = [part.run(fold, trainer, seed) for fold, seed in part.finished_runs(trainer)]
        folders = [run.folder(part.folder) for run in runs]
        whole = pd.Series([recorded_seconds(folder) for folder in folders], dtype=float)
        predictions = pd.Series([seconds_per_case(folder) for folder in folders], dtype=float)
        rows[trainer] = {
            "epoch, median (s)": epochs["seconds"].median(),
            "training of a run, mean (min)": trainings.mean() / 60,
            "with validation, mean (min)": whole.mean() / 60,
            "prediction of a case (s)": predictions.mean(),
            "parameters (M)": _parameters(folders) / 1e6,
        }
    numbers = pd.DataFrame.from_dict(rows, orient="index").dropna(how="all")
    caption = "Times; comparable only on the same, otherwise idle machine"
    return Table(caption, _titled(part, numbers.map(lambda x: "-" if x != x else f"{x:.1f}")))


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
    for axis in (0, 1):  # headings are not marked as the best
        style = style.format_index(lambda text: text.replace("**", "*{}*"), escape="latex", axis=axis)
    columns = "l" + "r" * len(table.cells.columns)
    text = style.to_latex(column_format=columns, hrules=True, multicol_align="c")
    text = re.sub(_BEST, r"\\textbf{\1}", text).replace("±", r"$\pm$")
    return "% Needs \\usepackage{booktabs}.\n" + text + "".join(f"% {note}\n" for note in notes)


def to_markdown(table: Table) -> str:
    """Return a table in Markdown; pandas needs one more package for this."""
    columns = [" ".join(c) if isinstance(c, tuple) else str(c) for c in table.cells.columns]
    rows = [
        [str(table.cells.index.name), *map(escape_markdown, columns)],
        ["---", *["---:"] * len(columns)],
    ]
    rows += [[escape_markdown(heading), *cells] for heading, *cells in table.cells.itertuples()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def escape_markdown(text: str) -> str:
    """Return a text in which no character has a meaning in Markdown."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)
