"""``nnunet-cpr demo``: train with and without CPR on synthetic data."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from nnunet_cpr.cli._errors import report_errors, stop


def demo(
    folder: Annotated[
        Path | None, Option(help="New folder to keep all files in; by default only the figures.")
    ] = None,
) -> None:
    """Train, validate and predict with and without CPR on synthetic data: a few minutes on a CPU."""
    from nnunet_cpr.demo import figures, keep_only, print_results, run_demo
    from nnunet_cpr.nnunet.commands import CommandFailed

    with report_errors(CommandFailed, OSError):
        if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            stop(f"--folder: expected a new or empty folder, got {folder}")
        where = folder or Path(tempfile.mkdtemp(prefix="nnunet-cpr-demo-"))
        where.mkdir(parents=True, exist_ok=True)
        console = Console()
        results = run_demo(where.resolve(), console)
        files = figures(results)
        if folder is None:
            files = keep_only(files, where.resolve())
    print_results(results, files, console)
