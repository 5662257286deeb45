"""``nnunet-cpr study report``: compare the finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from nnunet_cpr.cli.study._options import StudyOptions


def report(
    options: StudyOptions,
    output: Annotated[Path | None, Option("--output", "-o", help="Folder of the report.")] = None,
) -> None:
    """Compare the finished runs: tables, statistics, and an HTML page.

    Needs nnUNet_results only; pictures of cases and surface metrics need the data as well.
    """
    from nnunet_cpr.reports import write_report

    study, paths, folders, _ = options.select()
    data = [folders.get(name) for name in ("nnUNet_raw", "nnUNet_preprocessed")]
    raw, preprocessed = (Path(folder) if folder else None for folder in data)
    folder, console = output or paths.study / "report", Console()
    for file in write_report(study, paths.results, raw, preprocessed, folder, console):
        console.print(f"wrote {file}", soft_wrap=True, markup=False)
