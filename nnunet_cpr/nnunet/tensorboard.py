"""Logger for TensorBoard with the interface of nnU-Net's loggers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

VARIABLE = "nnUNet_tensorboard_enabled"
"""Environment variable that enables the logger, with the values of ``nnUNet_wandb_enabled``."""
FOLDER = "tensorboard"
"""Folder of the event files in the folder of a fold."""


class TensorBoardMissing(RuntimeError):
    """Package tensorboard that is not installed; the message is one line."""


def require_tensorboard() -> type[SummaryWriter]:
    """Return the class that writes event files.

    Raises:
        TensorBoardMissing: the package tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TensorBoardMissing(
            f"{VARIABLE} is set, but TensorBoard cannot be imported ({error}); "
            "run: pip install 'nnunet-cpr[tensorboard]'"
        ) from None
    return SummaryWriter


class TensorBoardLogger:
    """Logger that writes the values of nnU-Net and CPR to TensorBoard's event files.

    Steps are epochs. A continued training replaces the epochs that are trained again.

    Args:
        folder: the folder of a fold.
        epoch: the epoch that is about to start; event files there may have values of it and later ones.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        self._writer = require_tensorboard()(str(folder / FOLDER), purge_step=epoch)
        self._epoch = epoch

    def update_config(self, config: dict) -> None:
        """Write settings as text."""
        for key, value in config.items():
            text = json.dumps(value, indent=1, default=str)
            self._writer.add_text(key, f"```\n{text}\n```", global_step=self._epoch)

    def log(self, key: str, value: float, step: int) -> None:
        """Write the value of an epoch.

        TensorBoard's scalars are float32. A timestamp therefore is also the wall time of its event.
        """
        self._epoch = step
        walltime = value if key.endswith("_timestamps") else None
        self._writer.add_scalar(key, value, step, walltime=walltime)
        if key == "epoch_end_timestamps":
            self._writer.flush()  # before the epoch's checkpoint is written

    def log_summary(self, key: str, value: float) -> None:
        """Write a value of the whole training at its last epoch."""
        self._writer.add_scalar(key, value, self._epoch)
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()
