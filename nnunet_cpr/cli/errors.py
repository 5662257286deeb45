"""Errors of the commands: one line on stderr and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from nnunet_cpr.nnunet.commands import FOLDER_VARIABLES
from nnunet_cpr.nnunet.processes import Terminated, raise_on_termination
from nnunet_cpr.refusals import Refusal


def _describe(error: Exception) -> str:
    """Return an error as text; a path is given with the variable of nnU-Net's folder it is in."""
    if not (isinstance(error, OSError) and error.filename and error.strerror):
        return str(error)
    folders = {name: os.environ.get(name) for name in FOLDER_VARIABLES}
    inside = [
        f"{key}: " for key, value in folders.items() if value and str(error.filename).startswith(value)
    ]
    return f"{''.join(inside)}{error.filename}: {error.strerror}"


@contextmanager
def report_errors(interrupted: str = "stopped") -> Iterator[None]:
    """End the command with one line on stderr on a refusal, an OSError, Ctrl-C or a termination signal.

    Args:
        interrupted: message for Ctrl-C and signals; exit status 128 + signal, as shells use it.

    Raises:
        typer.Exit: one of them was raised; the status of refusals and errors is 1.

    Example:
        >>> with report_errors():
        ...     print("no error")
        no error
    """
    try:
        with raise_on_termination():
            yield
    except (Refusal, OSError) as error:
        _end(_describe(error), 1)
    except Terminated as error:
        _end(interrupted, error.status)
    except KeyboardInterrupt:
        _end(interrupted, 130)


def _end(message: str, status: int) -> NoReturn:
    print(f"nnunet-cpr: {' '.join(message.splitlines())}", file=sys.stderr)
    raise typer.Exit(status)
