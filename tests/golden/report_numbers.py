"""Numbers of a study's report, from the files that ``nnunet-cpr study report`` writes."""

from __future__ import annotations

import csv
import math
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.golden.goldens import run_command
from tests.helpers import ROOT

STUDIES = ROOT / "benchmarks" / "real_data" / "studies"
ARCHIVES = ROOT / "benchmarks" / "real_data" / "results"


def unpack(study: str, results: Path) -> None:
    """Unpack the archive of a study to a folder for ``nnUNet_results``."""
    with tarfile.open(ARCHIVES / f"{study}.tar.xz") as archive:
        archive.extractall(results, filter="data")


def write_report(study: str, results: Path, output: Path) -> Path:
    """Let the command write the report of an unpacked study, and return its folder."""
    done = run_command(
        "study", "report", str(STUDIES / f"{study}.yaml"), "--output", str(output),
        environment={"nnUNet_results": str(results)},
    )  # fmt: skip
    assert done.status == 0, done.errors
    return output


def report_numbers(folder: Path) -> dict[str, Any]:
    """Return the numbers of a report.

    This is the only function that knows the layout of the files. Of several metrics, those other than
    Dice have their name in the keys.

    Returns:
        ``trainers``: mean and standard deviations of each trainer; ``comparisons``: each trainer against
        the reference; ``non_inferiority``: each trainer against that of the study; ``selected``: the
        settings of each group by fold. Numbers have 10 significant digits.
    """
    return {
        "trainers": {
            _setting(row, row["trainer"]): _trainer(row) for row in _rows(folder / "table.csv")
        },
        "comparisons": {
            _compared(row, "reference"): _comparison(row) for row in _rows(folder / "comparisons.csv")
        },
        "non_inferiority": {
            _compared(row, "non_inferior_to"): _non_inferiority(row)
            for row in _rows(folder / "non_inferiority.csv")
        },
        "selected": _selected((folder / "report.md").read_text(encoding="utf-8")),
    }


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def _setting(row: dict[str, str], *names: str) -> str:
    return " | ".join([row["dataset"], *names])


def _compared(row: dict[str, str], reference: str) -> str:
    metric = [] if row["metric"] == "dice" else [row["metric"]]
    return _setting(row, *metric, row["trainer"], row[reference])


def _trainer(row: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"mean": number(row["dice_percent"]), "runs": number(row["runs"])}
    found |= {f"sd_{name}": number(row[f"deviation_{name}_points"]) for name in ("folds", "seeds")} | {
        "better": row["better"] == "True"
    }
    for metric, unit in (("hd95", "mm"), ("nsd", "points")):
        for key, value in row.items():
            if key.startswith(f"{metric}_") and key != f"{metric}_better":
                found[key.removesuffix(f"_{unit}")] = number(value)
    return found


def _comparison(row: dict[str, str]) -> dict[str, Any]:
    return {
        "difference": number(row["difference"]),
        "low": number(row["interval_low"]),
        "high": number(row["interval_high"]),
        "p": number(row["p"]),
        "p_holm": number(row["p_holm"]),
        "p_better": number(row["p_better"]),
        "p_equivalent": number(row["p_equivalent"]),
        "p_worse": number(row["p_worse"]),
        "non_inferiority_limit": number(row["advantage_low"]),
        "margin": number(row["margin"]),
        "verdict": row["verdict"],
        "folds": row["folds"],
        "seeds": row["seeds"],
        **{key: number(row[key]) for key in ("cases", "cases_better", "cases_worse")},
    }


def _non_inferiority(row: dict[str, str]) -> dict[str, Any]:
    keys = {"limit": "advantage_low", "margin": "margin", "p": "p", "p_holm": "p_holm", "seeds": "seeds"}
    return {**{name: number(row[key]) for name, key in keys.items()}, "claimed": row["non_inferior"]}


def _selected(text: str) -> dict[str, dict[str, str]]:
    """Return the selected setting of each fold, by data set and group."""
    _, found, rest = text.partition("selected on the other folds:\n\n")
    return {group: dict(_choices(choices)) for group, choices in _selections(rest) if found}


def _selections(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if line.startswith("- "):
            return
        if match := re.fullmatch(r"(.+?): (.+ \(fold [\d, ]+\))\.", line):
            yield match.group(1).replace("\\", ""), match.group(2).replace("\\", "")


def _choices(text: str) -> Iterator[tuple[str, str]]:
    for choice in text.split("; "):
        setting, folds = re.fullmatch(r"(.+) \(fold ([\d, ]+)\)", choice).groups()
        for fold in folds.split(", "):
            yield fold, setting


def number(text: str) -> float | None:
    """Return a number of a CSV file, None for an empty field."""
    value = float(text) if text else math.nan
    return None if math.isnan(value) else float(f"{value:.10g}")
