"""The ``nnunet-cpr`` command. Whatever takes time to import is imported by the command that needs it."""

from __future__ import annotations

import io
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, TextIO

import typer

from nnunet_cpr import cli_study, cli_vision
from nnunet_cpr.cli_errors import stop
from nnunet_cpr.cli_export import export
from nnunet_cpr.cli_prepare import prepare

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Constrained Parameter Regularization for nnU-Net. Train with nnU-Net's own command: "
    "nnUNetv2_train DATASET CONFIGURATION FOLD -tr nnUNetTrainerCPR",
)
app.command()(prepare)
app.command()(export)
app.add_typer(cli_study.app, name="study")
app.add_typer(cli_vision.app, name="vision")


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from nnunet_cpr import __version__

        print(__version__)
        raise typer.Exit


@app.command()
def demo(
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep everything in this folder, new or empty. Without it the pictures only."),
    ] = None,
) -> None:
    """Train, validate and predict with and without CPR on synthetic data: a few minutes on a CPU."""
    from rich.console import Console

    from nnunet_cpr.nnunet.commands import CommandFailed
    from nnunet_cpr.nnunet.demo import keep_only, pictures, print_results, run_demo

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


@app.command()
def doctor() -> None:
    """Say whether everything fits together; exit status 1 when something is wrong."""
    from rich.console import Console

    from nnunet_cpr.nnunet.doctor import examine

    console = Console(highlight=False)
    wrong = 0
    for finding in examine():
        mark = "[red]wrong[/red]" if finding.remedy else "[green]ok[/green]   "
        console.print(f"{mark} [bold]{finding.subject}[/bold]", end=": ")
        console.print(finding.what, markup=False, soft_wrap=True)
        if finding.remedy:
            wrong += 1
            console.print(f"      run: {finding.remedy}", markup=False, soft_wrap=True)
    if wrong:
        stop(f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong, see above")


def main() -> None:
    """Entry point of the ``nnunet-cpr`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may be no text
    warnings.showwarning = _show_warning
    warnings.filterwarnings("ignore", r".*torch\.jit\.", FutureWarning)  # timm's, when it is imported
    app()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One of ours in one line, as errors are; those of libraries as ever."""
    text = warnings.formatwarning(message, category, filename, lineno, line)
    if Path(filename).is_relative_to(Path(__file__).parent):
        text = f"nnunet-cpr: warning: {message}\n"
    print(text, end="", file=sys.stderr)
