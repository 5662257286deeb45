"""Search for reports whose sentences, rows, figures and files contradict each other.

    OMP_NUM_THREADS=1 python -m tests.reports.consistency --reports 2000

simulates studies of all kinds of :mod:`benchmarks.unlike_normal`, equal and worse trainers, and reads
each report as its reader does, from its files and the drawn figures.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
from collections.abc import Iterable, Iterator
from itertools import cycle, islice, product
from unittest.mock import patch

import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.unlike_normal import KINDS, MARGIN, simulate
from nnunet_cpr.reports import figures
from nnunet_cpr.reports.figures import Picture
from nnunet_cpr.reports.page import Report, build_report

LOSSES = (0.0, MARGIN, -MARGIN, 3.0, 0.3)
"""Points by which the other trainers are worse."""
COLORS = {"better": "#00775c", "worse": "#b34700", "equivalent": "#00609f", "non-inferior": "#00609f"}
NOT_WORSE = re.compile(r"Shown to be not worse than .* by more than .*: (.*)\.")


def simulated_report(number: int) -> tuple[Report, dict[str, Figure]]:
    """Return a report and its figures by name, of the kind and loss whose turn it is."""
    kind, loss = next(islice(cycle(product(KINDS, LOSSES)), number, None))
    drawn: dict[str, Figure] = {}

    def keep(figure: Figure, name: str, alt: str, *_: object) -> Picture:
        drawn[name] = figure
        return Picture(name, alt, {"svg": b""})

    with patch.object(figures, "save", keep):
        return build_report(simulate(kind, number, loss)), drawn


def contradictions(report: Report, drawn: dict[str, Figure]) -> Iterator[str]:
    """Yield what a report says in two ways."""
    here, over = _rows(report, "comparisons.csv"), _rows(report, "over_datasets.csv")
    for row in (*here, *over):
        yield from _within_row(row)
    yield from _bold(report, here)
    yield from _answer(report, here, over)
    yield from _non_inferior(report, here, over)
    page = str(report.documents["report.html"])
    for row in here:
        middle, low, high = (
            _signed(row[key]) for key in ("difference", "interval_low", "interval_high")
        )
        numbers = middle, f"{low} to {high}"
        cells = r"\s*".join(re.escape(f"<td>{text}</td>") for text in (row["verdict"], *numbers))
        if not re.search(cells, page):
            yield f"the page has no row of {row}"
    for name, figure in drawn.items():
        kind, *place = name.split("-")
        if kind == "differences":
            yield from _figure(figure, [row for row in here if row["dataset"] == place[0]])
        elif kind == "over":
            for axes, row in zip(figure.axes, over):
                *_, number = [text.get_text() for text in axes.texts]
                if not number.startswith(f" {_signed(row['difference'])} "):
                    yield f"the forest has {number} for {row}"
                yield from _marker(axes.lines, row)


def _signed(number: str) -> str:
    """Return a number with its sign and two decimals; there is no -0.00."""
    return f"{round(float(number), 2) + 0.0:+.2f}"


def _rows(report: Report, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(report.documents[name] or "")))


def _within_row(row: dict[str, str]) -> Iterator[str]:
    """Yield what verdict, numbers and sentence of a row say in two ways."""
    low, high, gain = (float(row[key]) for key in ("interval_low", "interval_high", "difference"))
    verdict, said, margin = row["verdict"], row["sentence"], float(row["margin"])
    rules = {
        "better": low > 0,
        "worse": high < 0,
        "equivalent": -margin < low and high < margin,
        "non-inferior": low > -margin,
    }
    if not rules.get(verdict, True):
        yield f"{verdict} beside {low} to {high}: {row}"
    if (low > 0 or high < 0) and float(row["p"]) > 0.05:
        yield f"p and interval: {row}"
    words = {
        "better": "points better, 95 % interval",
        "worse": "points worse, 95 % interval",
        "equivalent": "; equivalent within",
        "non-inferior": "; not worse by",
        "no verdict": "no verdict",
    }
    if words.get(verdict, "") not in said:
        yield f"{verdict} is not in words: {said}"
    if "not statistically significant" in said and verdict in ("better", "worse"):
        yield f"{verdict}, but not significant: {said}"
    if "equivalent within" in said and verdict != "equivalent":
        yield f"equivalent in words, {verdict} in the row: {said}"
    if f"{abs(gain):.2f} points" not in said or not low <= gain <= high:
        yield f"{gain} in {low} to {high}: {said}"
    if "; not worse by" in said and verdict == "undecided" and "but not after Holm's" not in said:
        yield f"more in words than in the row: {said}"
    if verdict in ("equivalent", "non-inferior") and "cannot exclude" not in said:
        yield f"no failures beside {said}"


def _bold(report: Report, rows: list[dict[str, str]]) -> Iterator[str]:
    better = {(row["dataset"], row["trainer"]) for row in rows if row["verdict"] == "better"}
    table = _rows(report, "table.csv")
    marked = {(row["dataset"], row["trainer"]) for row in table if row["better"] == "True"}
    if marked != better:
        yield f"table.csv marks {marked}, better are {better}"
    for name, mark in (("html", "<strong>"), ("md", "**"), ("tex", "\\textbf{")):
        count = str(report.documents[f"report.{name}"]).count(mark) / (2 if name == "md" else 1)
        if count != len(better):
            yield f"report.{name} marks {count}, better are {better}"


def _answer(report: Report, here: list[dict[str, str]], over: list[dict[str, str]]) -> Iterator[str]:
    said = [line.split(": ", 1)[-1] if line.startswith("Dataset") else line for line in report.answer]
    sentences = {row["sentence"]: row["verdict"] for row in here}
    verdicts = [sentences[line] for line in said if line in sentences]
    if len(here) > len(verdicts) and "worse" in verdicts[verdicts.count("worse") :]:
        yield f"worse ones are not first: {said}"
    if over and any(line in ("undecided", "no verdict") for line in verdicts):
        yield f"data sets without verdicts are in words: {said}"
    if not over and len(verdicts) < min(6, len(here)):
        yield f"sentences are missing: {said}"
    for row in over:
        if not any(line.startswith("Over ") and row["sentence"] in line for line in said):
            yield f"no sentence over data sets: {row}"


def _non_inferior(
    report: Report, here: list[dict[str, str]], over: list[dict[str, str]]
) -> Iterator[str]:
    found = [match[1] for line in report.answer if (match := NOT_WORSE.match(line))]
    named = set(re.findall(r"nnUNetTrainer\w+", found[0])) if found else set()
    shown = set()
    for row, own in zip(_rows(report, "non_inferiority.csv"), here, strict=True):
        is_shown = row["non_inferior"] == "shown"
        claims = ("better", "equivalent", "non-inferior")
        if is_shown and (
            own["verdict"] not in (*claims, "worse") or float(own["advantage_low"]) <= -MARGIN
        ):
            yield f"non-inferior, and {own['verdict']}: {own}"
        if own["verdict"] in claims and not is_shown:
            yield f"{own['verdict']} is not non-inferior: {own}"
        shown |= {own["trainer"]} if is_shown else set()
    shown |= {
        row["trainer"] for row in over if row["verdict"] in ("better", "equivalent", "non-inferior")
    }
    if shown != named:
        yield f"not worse in words {named}, in the files {shown}"


def _figure(figure: Figure, rows: list[dict[str, str]]) -> Iterator[str]:
    (axes,) = figure.axes
    numbers = [text.get_text() for text in axes.texts]
    expected = [f" {_signed(row['difference'])} ({row['cases']})" for row in rows]
    if numbers != expected:
        yield f"the figure has {numbers}, the rows {expected}"
    for height, row in enumerate(rows):
        lines = [line for line in axes.lines if set(np.atleast_1d(line.get_ydata())) == {height}]
        yield from _marker(lines, row)
        bar = next(line for line in lines if len(np.atleast_1d(line.get_xdata())) == 2)
        if not np.allclose(bar.get_xdata(), [float(row["interval_low"]), float(row["interval_high"])]):
            yield f"the figure's interval is {bar.get_xdata()}: {row}"


def _marker(lines: Iterable[Line2D], row: dict[str, str]) -> Iterator[str]:
    middle = float(row["difference"])
    points = [line for line in lines if np.allclose(np.atleast_1d(line.get_xdata()), middle)]
    colors = {to_hex(point.get_color()) for point in points}
    if COLORS.get(row["verdict"], to_hex("0.35")) not in colors:
        yield f"the figure has {colors} for {row['verdict']}"


def main() -> None:
    """Search, print what was found, and exit with status 1 if something was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reports", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    options, found = parser.parse_args(), 0
    for number in range(options.first, options.first + options.reports):
        for contradiction in contradictions(*simulated_report(number)):
            found += 1
            print(f"report {number}: {contradiction}", flush=True)
    print(f"{found} contradictions in {options.reports} reports")
    raise SystemExit(found > 0)


if __name__ == "__main__":
    main()
