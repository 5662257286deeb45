"""Options that several commands share."""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated

import typer

from nnunet_cpr._cores import available_cores
from nnunet_cpr.cli._errors import stop


class Device(str, Enum):
    """Device types that nnU-Net and PyTorch support here."""

    cuda = "cuda"
    cpu = "cpu"
    mps = "mps"


DeviceOption = Annotated[
    Device | None, typer.Option("--device", help="Device to train on; a GPU by default if there is one.")
]
TorchDeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", help="Device to train on: cuda, cuda:1, cpu or mps; cuda by default if available."
    ),
]
ProcessesOption = Annotated[
    int, typer.Option("--processes", "-np", min=1, help="Number of parallel processes.")
]
DEFAULT_PROCESSES = min(8, available_cores())
SeedsOption = Annotated[
    str | None, typer.Option("--seeds", help="Seeds, such as 1,2,3: one run for each of them.")
]
"""Text for :func:`parse_numbers`; None stands for the command's default."""


def parse_numbers(option: str, text: str | None) -> list[int]:
    """Parse the value of an option such as ``--seeds``; empty without one.

    Args:
        option: name of the option.
        text: different whole numbers separated by commas, each of at most nine digits.

    Raises:
        typer.Exit: it is anything else; one line is printed on stderr.

    Example:
        >>> parse_numbers("--seeds", "1,2,3")
        [1, 2, 3]
    """
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if re.fullmatch("[0-9]{1,9}", part)]
    if len(numbers) < len(parts) or len(set(numbers)) < len(numbers):
        stop(f"{option}: expected different whole numbers such as 1,2,3, got {text!r}")
    return numbers
