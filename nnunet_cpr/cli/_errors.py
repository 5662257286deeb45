"""Errors of the commands: one line on stderr and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from nnunet_cpr.nnunet.stop_signals import Terminated, raise_on_termination


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
    """Return an error as text; an error of a file begins with its path."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


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
