"""Errors of commands as one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer


def stop(message: str, status: int = 1) -> NoReturn:
    """Print an error as one line to stderr and exit."""
    print(f"nnunet-cpr: {' '.join(message.splitlines())}", file=sys.stderr)
    raise typer.Exit(status)


@contextmanager
def report_errors(*errors: type[Exception], interrupted: str = "stopped") -> Iterator[None]:
    """Report expected errors as one line with exit status 1, and Ctrl-C with status 130.

    Args:
        errors: the expected errors.
        interrupted: message after Ctrl-C.
    """
    try:
        yield
    except errors as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop(interrupted, status=130)
