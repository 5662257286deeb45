"""Logger for TensorBoard with the interface of nnU-Net's loggers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnunetv2.utilities.label_handling.label_handling import LabelManager

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

VARIABLE = "nnUNet_tensorboard_enabled"
"""Environment variable that enables the logger, with the values of ``nnUNet_wandb_enabled``."""
FOLDER = "tensorboard"
"""Folder of the event files in the folder of a fold."""

_START, _END = "epoch_start_timestamps", "epoch_end_timestamps"


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
        logged: values of nnU-Net's local logger, which are written if there are no event files yet.
        names: class names by label, see :func:`class_names`.
    """

    def __init__(
        self, folder: Path, epoch: int, logged: Mapping[str, Sequence], names: Mapping[Any, str]
    ) -> None:
        has_files = any((folder / FOLDER).glob("events.out.tfevents.*"))
        self._writer = require_tensorboard()(str(folder / FOLDER), purge_step=epoch if has_files else 0)
        self._renamed = {
            **{f"dice_per_class_or_region/class_{i}": name for i, name in enumerate(names.values(), 1)},
            **{f"final_val/class_{label}_dice": f"{name}_dice" for label, name in names.items()},
        }
        self._epoch = epoch
        self._start: tuple[int, float] | None = None
        if not has_files:
            self._write_previous(epoch, logged)

    def update_config(self, config: dict) -> None:
        """Write settings as text."""
        for key, value in config.items():
            text = json.dumps(value, indent=1, default=str)
            self._writer.add_text(key, f"```\n{text}\n```", global_step=self._epoch)

    def log(self, key: str, value: float, step: int) -> None:
        """Write the value of an epoch.

        TensorBoard's scalars are float32. A timestamp therefore is also the wall time of its event, and
        the duration of an epoch is a scalar of its own.
        """
        self._epoch = step
        is_timestamp = key in (_START, _END)
        self._writer.add_scalar(self._tag(key), value, step, walltime=value if is_timestamp else None)
        if key == _START:
            self._start = step, value
        elif key == _END:
            if self._start is not None and self._start[0] == step:
                self._writer.add_scalar("epoch_seconds", value - self._start[1], step)
            self._writer.flush()  # before the epoch's checkpoint is written

    def log_summary(self, key: str, value: float) -> None:
        """Write a value of the whole training at its last epoch."""
        self._writer.add_scalar(self._tag(key), value, self._epoch)
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()

    def _tag(self, key: str) -> str:
        name = self._renamed.get(key)
        return key if name is None else f"{key.partition('/')[0]}/{name}"

    def _write_previous(self, epochs: int, logged: Mapping[str, Sequence]) -> None:
        for epoch in range(epochs):
            for key, values in logged.items():
                if isinstance(values[epoch], list):
                    for i, of_class in enumerate(values[epoch], 1):
                        self.log(f"{key}/class_{i}", of_class, epoch)
                else:
                    self.log(key, values[epoch], epoch)


def class_names(labels: LabelManager) -> dict[Any, str]:
    """Return the names of the foreground labels, or regions, in the order of nnU-Net's Dice values."""
    names = {
        tuple(label) if isinstance(label, list) else label: name
        for name, label in labels.label_dict.items()
    }
    foreground = labels.foreground_regions if labels.has_regions else labels.foreground_labels
    return {label: names.get(label, f"class_{i}") for i, label in enumerate(foreground, 1)}
