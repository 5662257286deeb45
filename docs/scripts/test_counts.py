"""Write the numbers of tests: ``python docs/scripts/test_counts.py [STAGE=FILE ...]``.

Each file is the JUnit file of a run of one stage, ``python -m pytest --junitxml FILE``. Its counts
replace those of the stage in :data:`TABLE`; other stages keep theirs. Then the column *tests* of
:data:`PAGE` is written anew.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

TABLE = Path(__file__).parents[1] / "developers" / "test-counts.csv"
PAGE = TABLE.with_name("guarantees.md")
STAGES = ("default", "slow", "release")
COLUMNS = ("stage", "file", "passed", "skipped", "examples")


def count(stage: str, path: Path) -> list[dict[str, str | int]]:
    """Return a row of :data:`TABLE` for each test file of a run.

    Raises:
        ValueError: a test failed.
    """
    passed, skipped, examples = Counter[str](), Counter[str](), Counter[str]()
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            raise ValueError(
                f"{path}: expected that all tests pass, got a failure of {case.get('name')}"
            )
        file = _file(case.attrib["classname"])
        (passed if case.find("skipped") is None else skipped)[file] += 1
        for found in case.iter("property"):
            if found.get("name") == "examples":
                examples[file] += int(found.attrib["value"])
    return [
        dict(zip(COLUMNS, (stage, file, passed[file], skipped[file], examples[file])))
        for file in sorted(passed | skipped)
    ]


def _file(classname: str) -> str:
    """Return the file of a test below ``tests/``, from a name such as ``tests.nnunet.test_kills``."""
    parts = classname.split(".")
    modules = [i for i, part in enumerate(parts) if part.startswith("test_")]
    last = modules[0] if modules else len(parts) - 1
    return "/".join(parts[1 : last + 1]) + ".py"


def read() -> list[dict[str, str]]:
    """Return the rows of :data:`TABLE`."""
    with open(TABLE, newline="") as file:
        return list(csv.DictReader(file))


def filled(text: str, rows: list[dict[str, str]]) -> str:
    """Return a page with the numbers of tests of the files that each row of a table names."""
    totals: dict[str, Counter[str]] = {}
    for row in rows:
        total = totals.setdefault(row["file"], Counter())
        total[row["stage"]] += int(row["passed"])
        total["examples"] += int(row["examples"]) if row["stage"] == "release" else 0

    def fill(match: re.Match[str]) -> str:
        names = re.findall(r"`((?:\w+/)*\w+\.py|\w+/)`", match[2])
        found = [total for name in names for file, total in totals.items() if file.startswith(name)]
        total = sum(found, Counter[str]())
        parts = [
            f"{total[stage]:,}" + f" {stage}" * (stage != "default") for stage in STAGES if total[stage]
        ]
        random = [f"{total['examples']:,} random cases"] if total["examples"] else []
        return f"{match[1]}|{match[2]}| {', '.join(parts + random)} |" if found else match[0]

    return re.sub(r"^(\|[^|\n]*)\|([^|\n]*)\|[^|\n]*\|$", fill, text, flags=re.MULTILINE)


def main() -> None:
    """Write table and page."""
    parser = argparse.ArgumentParser(description="Write the counts of tests from JUnit files.")
    parser.add_argument("runs", nargs="*", metavar="STAGE=FILE", help=f"STAGE: {', '.join(STAGES)}")
    runs = dict(run.split("=", 1) for run in parser.parse_args().runs)
    if unknown := set(runs) - set(STAGES):
        parser.error(f"unknown stage {unknown.pop()!r}; choose from {', '.join(STAGES)}")
    kept = [row for row in read() if row["stage"] not in runs] if TABLE.exists() else []
    try:
        rows = [*kept, *(row for stage, path in runs.items() for row in count(stage, Path(path)))]
    except ValueError as error:
        sys.exit(str(error))
    with open(TABLE, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            sorted(rows, key=lambda row: (STAGES.index(str(row["stage"])), str(row["file"])))
        )
    PAGE.write_text(filled(PAGE.read_text(), read()))


if __name__ == "__main__":
    main()
