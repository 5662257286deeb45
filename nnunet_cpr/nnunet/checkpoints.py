"""Reading of checkpoints, without executing code in them.

A checkpoint is a zip file with a pickle, and unpickling can execute arbitrary code. Only tensors, plain
values and the types in :data:`SAFE_GLOBALS` are loaded.
"""

from __future__ import annotations

import pickle
import stat
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from nnunet_cpr.environment import changed_environment
from nnunet_cpr.refusals import Refusal, RefusedItem, one_line

START_ANEW = "to start a new training from its weights, pass it to -pretrained_weights"

_numpy_scalar = np.float32(0).__reduce__()[0]
SAFE_GLOBALS: tuple[Any, ...] = (
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),  # written with numpy 1
    np.dtype,
    *(type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"),
)
"""Types beyond tensors and plain values that nnU-Net's checkpoints need: NumPy scalars in the logs."""

ENTRIES = ("network_weights", "optimizer_state", "logging", "current_epoch", "init_args", "trainer_name")
"""Entries that a training needs to continue."""


@contextmanager
def restricted_loading() -> Iterator[None]:
    """Restrict every ``torch.load`` in this context to what :func:`read` loads.

    nnU-Net asks torch to load everything; these variables overrule it.
    """
    variables = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": None}
    with changed_environment(variables), torch.serialization.safe_globals(list(SAFE_GLOBALS)):
        yield


def is_there(path: Path) -> bool:
    """Return True if a checkpoint exists; ``Path.exists`` may take an error of the machine for False.

    Raises:
        Refusal: the file system cannot tell at the moment.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {one_line(error)}", "try again") from error
    return True


def read(path: Path, needed: Sequence[str] = ENTRIES) -> dict[str, Any]:
    """Load a checkpoint of nnU-Net to the CPU.

    Args:
        path: the file.
        needed: required entries.

    Raises:
        RefusedItem: its content is damaged.
        Refusal: it cannot be read at the moment, is not a checkpoint of nnU-Net, or contains
            objects that such a checkpoint does not need.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch does not compare the checksums that it writes
            # It loads arbitrary values for a file that is marked as a folder.
            marks = [file.external_attr & stat.FILE_ATTRIBUTE_DIRECTORY for file in archive.infolist()]
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged!r} is wrong")
        if any(marks):
            raise zipfile.BadZipFile("a file in it is marked as a folder")
        with restricted_loading():
            checkpoint = torch.load(path, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise Refusal(
            f"{path} contains objects that checkpoints of nnU-Net do not need",
            "they were not loaded. Do not use this file unless you trust its source",
        ) from error
    except (OSError, MemoryError) as error:
        raise Refusal(f"{path} cannot be read: {one_line(error)}", "try again") from error
    except Exception as error:  # flipped bits can fail in any way
        if isinstance(error.__context__, OSError):  # which zipfile takes for damage
            reason = one_line(error.__context__)
            raise Refusal(f"{path} cannot be read: {reason}", "try again") from error
        raise RefusedItem(f"{path} is damaged: {one_line(error)}") from error
    missing = [key for key in needed if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise Refusal(f"{path} is not a checkpoint of nnU-Net: {missing[0]!r} is missing")
    return dict(checkpoint)


def count_parameters(path: Path) -> int:
    """Return the number of network parameters in a checkpoint, without reading their values.

    nnU-Net's networks hold most layers under several names, whose tensors share their memory.
    """
    with restricted_loading():
        checkpoint = torch.load(path, map_location="cpu", mmap=True)
    weights = checkpoint["network_weights"].values()
    by_memory = {(value.data_ptr(), value.shape): value.numel() for value in weights}
    return sum(by_memory.values())


def optimizer_differences(
    saved: Mapping[str, Any], optimizer: Optimizer, compare_groups: bool
) -> Iterator[str]:
    """Yield each difference of a saved optimizer that torch would load without an error.

    torch replaces the optimizer's settings by the saved ones and ignores unknown entries.

    Args:
        saved: the state dict.
        optimizer: the optimizer of this training.
        compare_groups: False if the training may change the settings of the parameter groups.
    """
    own = optimizer.state_dict()
    for key, title in (("cpr", "CPR"), ("baseline", "a comparison method")):
        if (key in saved) != (key in own):
            yield f"{'with' if key in saved else 'without'} {title}"
    for group, before in zip(optimizer.param_groups, saved["param_groups"] if compare_groups else ()):
        for key in ("momentum", "betas", "weight_decay", "adamw_for"):
            if before.get(key) != group.get(key):
                yield f"{key}: expected {group.get(key)}, got {before.get(key)}"
