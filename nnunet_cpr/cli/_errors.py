"""How every command ends on an error."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer


def stop(message: str, status: int = 1) -> NoReturn:
    """Say in one line on stderr what is wrong, and end with this exit status."""
    print(f"nnunet-cpr: {' '.join(message.splitlines())}", file=sys.stderr)
    raise typer.Exit(status)
