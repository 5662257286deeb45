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


def stop(message: str, status: int = 1) -> NoReturn:
    """Print one line on stderr and end the command.

    Args:
        message: the error; line breaks become spaces.
        status: the exit status.

    Raises:
        typer.Exit: always.
    """
    print(f"nnunet-cpr: {' '.join(message.splitlines())}", file=sys.stderr)
    raise typer.Exit(status)


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
def report_errors(*errors: type[Exception], interrupted: str = "stopped") -> Iterator[None]:
    """End the command with :func:`stop` on expected errors, on Ctrl-C and on termination signals.

    Args:
        errors: exceptions whose message is meant for the user; exit status 1.
        interrupted: message for Ctrl-C and signals; exit status 128 + signal, as shells use it.

    Raises:
        typer.Exit: one of ``errors`` or KeyboardInterrupt was raised.

    Example:
        >>> with report_errors(OSError):
        ...     print("no error")
        no error
    """
    try:
        with raise_on_termination():
            yield
    except errors as error:
        stop(_describe(error))
    except Terminated as error:
        stop(interrupted, error.status)
    except KeyboardInterrupt:
        stop(interrupted, status=130)
