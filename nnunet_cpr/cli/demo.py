"""``nnunet-cpr demo``: train with and without CPR on synthetic data."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from nnunet_cpr.cli._errors import stop


def demo(
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep everything in this folder, new or empty. Without it the pictures only."),
    ] = None,
) -> None:
    """Train, validate and predict with and without CPR on synthetic data: a few minutes on a CPU."""
    from rich.console import Console

    from nnunet_cpr.demo import keep_only, pictures, print_results, run_demo
    from nnunet_cpr.nnunet.commands import CommandFailed

    try:
        if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            stop(f"{folder} is not an empty folder; name another one with --folder")
        where = folder or Path(tempfile.mkdtemp(prefix="nnunet-cpr-demo-"))
        where.mkdir(parents=True, exist_ok=True)
        console = Console()
        results = run_demo(where.resolve(), console)
        files = pictures(results)
        if folder is None:
            files = keep_only(files, where.resolve())
    except (CommandFailed, OSError) as error:
        stop(str(error))
    print_results(results, files, console)
