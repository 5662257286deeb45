"""The ``nnunet-cpr`` command, one module for each subcommand.

Slow imports are done when a subcommand runs.
"""

from __future__ import annotations

import io
import sys
import warnings
from typing import Annotated, Any

import typer

from nnunet_cpr.cli import study, vision
from nnunet_cpr.cli.doctor_and_demo import demo, doctor
from nnunet_cpr.cli.errors import report_errors
from nnunet_cpr.cli.prepare import prepare
from nnunet_cpr.cli.trainers import export, extend, finish, trainers

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Constrained Parameter Regularization for nnU-Net. Train with nnU-Net's own command: "
    "nnUNetv2_train DATASET CONFIGURATION FOLD -tr nnUNetTrainerCPR",
)
for command in (trainers, finish, extend, prepare, export, demo, doctor):
    writes = command in (prepare, export)
    app.command()(report_errors("interrupted; nothing was written" if writes else "stopped")(command))
app.add_typer(study.app, name="study")
app.add_typer(vision.app, name="vision")


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from nnunet_cpr import __version__

        print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of the ``nnunet-cpr`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # paths may contain bytes that are not text
    warnings.showwarning = _show_warning
    warnings.filterwarnings("ignore", r".*torch\.jit\.", FutureWarning)  # from timm
    app()


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"nnunet-cpr: warning: {message}", file=sys.stderr)
