"""``nnunet-cpr study report``: compare the finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from nnunet_cpr import studies
from nnunet_cpr.cli._options import JsonOption, print_json
from nnunet_cpr.cli.study._options import StudyOptions


def report(
    options: StudyOptions,
    output: Annotated[Path | None, Option("--output", "-o", help="Folder of the report.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the finished runs: tables, statistics, and an HTML page.

    Needs nnUNet_results only; pictures of cases and surface metrics need the data as well.
    """
    import pandas as pd

    from nnunet_cpr.reports import write_report

    study, paths, folders = options.select()
    data = [folders.get(name) for name in ("nnUNet_raw", "nnUNet_preprocessed")]
    raw, preprocessed = (Path(folder) if folder else None for folder in data)
    folder, console = output or paths.study / "report", Console(quiet=as_json)
    try:
        files = write_report(study, paths.results, raw, preprocessed, folder, console, paths.splits)
    except OSError as error:
        if output is not None or not str(error.filename).startswith(str(paths.study)):
            raise
        raise studies.StudyError(f"{folder}: {error.strerror}; choose another folder with -o") from error
    for file in files:
        console.print(f"wrote {file}", soft_wrap=True, markup=False)
    if as_json:
        tables = {name: pd.read_csv(folder / f"{name}.csv") for name in ("table", "comparisons")}
        rows = {name: table.to_dict("records") for name, table in tables.items()}
        print_json({**rows, "files": files})
