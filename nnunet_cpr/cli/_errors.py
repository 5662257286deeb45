"""Error messages and exit status of the commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer


def stop(message: str, status: int = 1) -> NoReturn:
    """Print a one-line error message to stderr and exit with this status."""
    print(f"nnunet-cpr: {' '.join(message.splitlines())}", file=sys.stderr)
    raise typer.Exit(status)


@contextmanager
def report_errors(*errors: type[Exception], interrupted: str = "stopped") -> Iterator[None]:
    """Print expected errors as one line and exit with status 1, or 130 on Ctrl-C.

    Args:
        errors: classes of the expected errors.
        interrupted: message on Ctrl-C.
    """
    try:
        yield
    except errors as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop(interrupted, status=130)
