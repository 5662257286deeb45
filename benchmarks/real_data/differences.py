"""Differences of finished studies with their intervals.

    python -m benchmarks.real_data.differences studies/methods.yaml --figure methods.png
    python -m benchmarks.real_data.differences studies/default_*.yaml --figure cpr.png

Reads the reports of ``nnunet-cpr study report``. The first draws all rows of one report. The second
draws the rows with CPR of several, with the reference of each in its label.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from nnunet_cpr.figures import new_figure
from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.reports.selection import choose_compared
from nnunet_cpr.studies.study import Study, TrainerEntry
from nnunet_cpr.studies.study_file import load

WIDEST = 5.0
"""Differences in points that are larger are written at the border."""
COLOR, SIGNIFICANT = "#00796b", "#c62828"


class Row(NamedTuple):
    """A difference in points with its 95 % interval.

    Attributes:
        data: data set, with the number of training cases if they are few.
        uses_cpr: True if the trainer uses CPR.
        verdict: that of the report, after correction for its number of comparisons.
    """

    data: str
    title: str
    reference: str
    uses_cpr: bool
    verdict: str
    difference: float
    low: float
    high: float
    margin: float

    @property
    def is_near(self) -> bool:
        """True if the difference is drawn."""
        return abs(self.difference) < WIDEST


def read(file: str, results: Path) -> list[Row]:
    """Return the differences of Dice in the report of a study, in its order.

    Args:
        file: study file.
        results: nnU-Net's ``nnUNet_results``.
    """
    study = load(file)
    report = results / "studies" / study.name / "report" / "comparisons.csv"
    entries = {entry.trainer: entry for entry in study.trainers}
    if study.select:
        compared = choose_compared(read_results(study, results).by_condition()[0])
        entries |= {entry.trainer: entry for entry in compared.results.study.trainers}
    return [
        Row(
            _data(study, each["dataset"]),
            _title(study, entries[each["trainer"]]),
            _title(study, entries[each["reference"]]),
            _uses_cpr(study, entries[each["trainer"]]),
            *(each[key] for key in ("verdict", "difference", "interval_low", "interval_high", "margin")),
        )
        for _, each in pd.read_csv(report).query("metric == 'dice'").iterrows()
    ]


def _title(study: Study, entry: TrainerEntry) -> str:
    """Return the label of a trainer, or the group of a setting."""
    return entry.group if study.select else entry.title


def _uses_cpr(study: Study, entry: TrainerEntry) -> bool:
    """Return True if a trainer, or all settings of a group of a study with ``select``, use CPR."""
    members = [each for each in study.trainers if study.select and each.group == entry.group]
    parsed = [parse_trainer_name(each.trainer) for each in members or [entry]]
    return all(name is not None and name.defaults.cpr for name in parsed)


def _data(study: Study, dataset: str) -> str:
    """Return the short name of a data set, with the cases of a fold of ``few_cases.py``."""
    name, cases = dataset.partition("_")[2], study.folds[0] // 10
    return f"{name}, {cases} cases" if cases else name


def draw(rows: list[Row], figure_path: Path) -> None:
    """Draw one line for each row, from top to bottom."""
    references = {row.reference for row in rows}
    bounds = [bound for row in rows if row.is_near for bound in (-row.low, row.high)]
    reach = 1.05 * max(bounds, default=WIDEST)
    with new_figure(figure_path, (8, 0.8 + 0.28 * len(rows))) as figure:
        axes = figure.add_subplot()
        margin = rows[0].margin
        axes.axvspan(-margin, margin, color="0.88", label=f"counts as equivalent, ±{margin:g} points")
        axes.axvline(0, color="0.4", linewidth=0.8)
        for height, row in enumerate(rows):
            _draw_row(axes, height, row)
        common = len(references) == 1
        labels = [
            row.title if common else f"{row.data}: {row.title} minus {row.reference}" for row in rows
        ]
        axes.set_yticks(range(len(rows)), labels, size=8)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(-reach, reach)
        minus = f"Dice minus that of: {rows[0].reference}; points" if common else "Dice, points"
        axes.set_xlabel(f"{minus}, with 95 % interval", size=9)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=7, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)


def _draw_row(axes: Axes, height: int, row: Row) -> None:
    text = f"{row.difference:+.2f} ({row.low:+.2f} to {row.high:+.2f})"
    if row.is_near:
        color = SIGNIFICANT if row.verdict in ("better", "worse") else COLOR
        axes.plot([row.low, row.high], [height, height], color=color, linewidth=2.5)
        axes.plot(row.difference, height, "o", color=color)
        axes.annotate(text, (1.02, height), xycoords=("axes fraction", "data"), va="center", size=8)
    else:
        left = row.difference < 0
        axes.annotate(
            f"{text}: outside",
            (0.02 if left else 0.98, height),
            xycoords=("axes fraction", "data"),
            va="center",
            ha="left" if left else "right",
            size=8,
        )


def main() -> None:
    """Read the reports and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("studies", nargs="+", help="study files, whose reports are written")
    parser.add_argument("--figure", type=Path, default=Path("differences.png"))
    arguments = parser.parse_args()
    results = Path(os.environ["nnUNet_results"])
    rows = [row for study in arguments.studies for row in read(study, results)]
    if len(arguments.studies) > 1:
        rows = [row for row in rows if row.uses_cpr]
    draw(rows, arguments.figure)


if __name__ == "__main__":
    main()
