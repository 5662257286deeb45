"""Options that several commands share."""

from __future__ import annotations

import os
from enum import Enum
from typing import Annotated

import typer


class Device(str, Enum):
    """Device types that nnU-Net and PyTorch support here."""

    cuda = "cuda"
    cpu = "cpu"
    mps = "mps"


DeviceOption = Annotated[
    Device | None, typer.Option("--device", help="Device to train on; a GPU by default if there is one.")
]
ProcessesOption = Annotated[
    int, typer.Option("--processes", "-np", min=1, help="Number of parallel processes.")
]
DEFAULT_PROCESSES = min(8, os.cpu_count() or 1)
