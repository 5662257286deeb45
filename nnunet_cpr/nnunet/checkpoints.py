"""Safe loading of nnU-Net's checkpoints, and checks that they match the training.

A checkpoint is a zip file with a pickle, and unpickling can execute arbitrary code. Only tensors, plain
values and the types in :data:`SAFE_GLOBALS` are loaded.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import pickle
import re
import stat
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnunet_cpr._validation import list_names
from nnunet_cpr.cpr import CPRSettings
from nnunet_cpr.nnunet.fold_files import (
    CHECKPOINTS,
    FINAL_CHECKPOINT,
    LATEST_CHECKPOINT,
    is_complete_checkpoint,
)

if TYPE_CHECKING:
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

START_ANEW = "to start a new training from its weights, pass it to -pretrained_weights"

_numpy_scalar = np.float32(0).__reduce__()[0]
SAFE_GLOBALS: tuple[Any, ...] = (
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),  # written with numpy 1
    np.dtype,
    *(type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"),
)
"""Types beyond tensors and plain values that nnU-Net's checkpoints need: NumPy scalars in the logs."""

NOT_NNUNET = "is not a checkpoint of nnU-Net"

_KINDS: dict[str, type | tuple[type, ...]] = {
    "network_weights": Mapping,
    "optimizer_state": Mapping,
    "grad_scaler_state": (Mapping, type(None)),
    "logging": dict,
    "_best_ema": (float, np.floating, type(None)),
    "current_epoch": int,
    "init_args": Mapping,
    "trainer_name": str,
}


class UnusableCheckpoint(RuntimeError):
    """Checkpoint that cannot be used; the message is one line with the file and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")


class DamagedCheckpoint(UnusableCheckpoint):
    """Checkpoint that is truncated or corrupted."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, f"is damaged: {reason}")


@contextmanager
def restricted_loading() -> Iterator[None]:
    """Restrict every ``torch.load`` in this context to what :func:`read` loads."""
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ[names[0]] = "1"
    try:
        with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
            yield
    finally:
        del os.environ[names[0]]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def read(path: Path, needed: Collection[str] = tuple(_KINDS)) -> dict[str, Any]:
    """Load a checkpoint of nnU-Net to the CPU.

    Args:
        path: the file.
        needed: required entries.

    Raises:
        DamagedCheckpoint: it is truncated or corrupted.
        UnusableCheckpoint: it cannot be opened, is not a checkpoint of nnU-Net, or contains objects
            that such a checkpoint does not need.
    """
    try:
        _check_integrity(path)
        with restricted_loading():
            checkpoint = _load(path)
    except OSError as error:
        raise UnusableCheckpoint(path, f"cannot be read: {error.strerror or error}") from error
    if not isinstance(checkpoint, dict):
        raise UnusableCheckpoint(path, NOT_NNUNET)
    wrong = [
        key for key in needed if key not in checkpoint or not isinstance(checkpoint[key], _KINDS[key])
    ]
    if not wrong and not all(isinstance(w, Tensor) for w in checkpoint["network_weights"].values()):
        wrong = ["network_weights"]
    if wrong:
        raise UnusableCheckpoint(
            path, f"{NOT_NNUNET}: {list_names(wrong)} is missing or of another type"
        )
    return checkpoint


class Age(NamedTuple):
    """When a checkpoint was written.

    Attributes:
        start: time at which its training was started, in seconds since the epoch of Unix.
        epochs: number of epochs that were finished.
    """

    start: float
    epochs: int


def age(path: Path) -> Age | None:
    """Return when a checkpoint was written, None if it cannot be read.

    The tensors are not read.
    """
    try:
        with restricted_loading():
            checkpoint = torch.load(path, map_location="meta", weights_only=True, mmap=True)
        starts = checkpoint.get("logging", {}).get("epoch_start_timestamps")
        starts = starts or [path.stat().st_mtime]  # of a training that is in its first epoch
        found = Age(float(starts[0]), checkpoint["current_epoch"])
    except Exception:  # a damaged file can fail in any way
        return None
    return found if type(found.epochs) is int and found.epochs >= 0 else None


def newest_first(path: Path) -> list[Path]:
    """Return the checkpoints that ``--c`` tries one after the other.

    Those of the training that was started last come first, by their number of finished epochs. Files
    that are damaged or cannot be read come before them, so that they are reported. Of two equally new
    ones ``checkpoint_latest.pth`` comes last: nnU-Net writes it before it updates the best pseudo Dice.

    Args:
        path: the checkpoint that nnU-Net has chosen. The best one is returned alone, since nnU-Net
            chooses it where there is no other and for ``--val_best``.
    """
    if path.name not in (FINAL_CHECKPOINT, LATEST_CHECKPOINT):
        return [path]

    def order(path: Path) -> tuple[float, float, bool]:
        found = age(path) if _is_intact(path) else None
        if found is None:
            return -math.inf, 0, False
        return -found.start, -found.epochs, path.name == LATEST_CHECKPOINT

    found = [other for other in map(path.with_name, CHECKPOINTS) if other.exists()]
    return sorted(found, key=order) if len(found) > 1 else [path]


def read_first_intact(paths: Sequence[Path], warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Load the first checkpoint that is not damaged.

    Args:
        paths: the files, at least one.
        warn: called with a message for every damaged file before it.

    Returns:
        The path and the checkpoint.

    Raises:
        DamagedCheckpoint: all are damaged; the error is that of the last one.
        UnusableCheckpoint: as :func:`read`.
    """
    for path, fallback in itertools.pairwise(paths):
        try:
            return path, read(path)
        except DamagedCheckpoint as error:
            warn(f"{error}; trying {fallback.name}")
    return paths[-1], read(paths[-1])


def _check_integrity(path: Path) -> None:
    """Compare the contents with their checksums, which torch writes but does not verify."""
    with open(path, "rb"):
        pass  # an OSError if it cannot be read
    if not is_complete_checkpoint(path):
        raise DamagedCheckpoint(path, "it is truncated or not a checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            corrupted = archive.testzip()
            # torch would load arbitrary values, without an error, for a file that is marked as a folder.
            folders = [
                info.filename
                for info in archive.infolist()
                if info.external_attr & stat.FILE_ATTRIBUTE_DIRECTORY
            ]
    except Exception as error:  # zipfile fails in many ways on flipped bits
        # A flipped bit of a position makes it seek to a negative one, which is an OSError too.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise DamagedCheckpoint(path, _first_line(error)) from error
    if corrupted is not None:
        raise DamagedCheckpoint(path, f"the checksum of {corrupted!r} is wrong")
    if folders:
        raise DamagedCheckpoint(path, f"{folders[0]!r} is marked as a folder")


def _is_intact(path: Path) -> bool:
    try:
        _check_integrity(path)
    except (OSError, DamagedCheckpoint):
        return False
    return True


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnusableCheckpoint(path, _refusal(error)) from error
    except OSError:
        raise
    except Exception as error:  # a crafted pickle can fail in any way
        raise DamagedCheckpoint(path, _first_line(error)) from error


def _refusal(error: pickle.UnpicklingError) -> str:
    found = re.findall(r"(?:GLOBAL|unrecognized function|class) ([\w.]+)", str(error))
    name = found[0] if found else "an object"
    return (
        f"contains {name}, which checkpoints of nnU-Net do not need; it was not executed. "
        "Do not use this file unless you trust its source"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def check_matches(
    path: Path, checkpoint: Mapping[str, Any], trainer: nnUNetTrainer, keeps_optimizer: bool
) -> None:
    """Check that a checkpoint was written by an equivalent training.

    Args:
        path: the file.
        checkpoint: its content.
        trainer: the trainer of this training.
        keeps_optimizer: True if its optimizer is that of another trainer, which may change the
            optimizer and its settings during the training.

    Raises:
        UnusableCheckpoint: data set, configuration, fold, network or optimizer differ.
    """
    _check_training(path, checkpoint["init_args"], trainer)
    network = trainer.network.module if trainer.is_ddp else trainer.network
    weights = checkpoint["network_weights"]
    # As nnU-Net does, for weights saved from within torch's DataParallel.
    network = getattr(network, "_orig_mod", network)
    own = network.state_dict().keys()
    weights = {key if key in own else key.removeprefix("module."): w for key, w in weights.items()}
    check_network(path, weights, network)
    difference = _optimizer_difference(checkpoint["optimizer_state"], trainer.optimizer, keeps_optimizer)
    if difference:
        written_by, expected = checkpoint["trainer_name"], type(trainer).__name__
        raise UnusableCheckpoint(
            path, f"was written by {written_by}, expected {expected}: {difference}; {START_ANEW}"
        )


def check_network(path: Path, weights: Mapping[str, Tensor], network: nn.Module) -> None:
    """Check that the weights have the names and shapes of the network's parameters.

    Raises:
        UnusableCheckpoint: they do not.
    """
    own = {key: list(value.shape) for key, value in network.state_dict().items()}
    missing = [key for key in own if key not in weights]
    unknown = [key for key in weights if key not in own]
    if missing or unknown:
        what = f"{list_names(missing)} is missing" if missing else f"{list_names(unknown)} is unexpected"
        raise UnusableCheckpoint(path, f"belongs to another network: {what}")
    for key, shape in own.items():
        before = list(weights[key].shape)
        if before != shape:
            raise UnusableCheckpoint(
                path, f"belongs to another network: {key!r}: expected shape {shape}, got {before}"
            )


def _check_training(path: Path, init_args: Mapping[str, Any], trainer: nnUNetTrainer) -> None:
    plans = init_args.get("plans")
    for what, before, now in (
        (
            "data set",
            plans.get("dataset_name") if isinstance(plans, dict) else None,
            trainer.plans_manager.dataset_name,
        ),
        ("configuration", init_args.get("configuration"), trainer.configuration_name),
        ("fold", init_args.get("fold"), trainer.fold),
    ):
        if before != now:
            raise UnusableCheckpoint(path, f"belongs to another {what}: expected {now}, got {before}")


_NOT_COMPARED = {
    "params",
    "lr",  # the schedule sets it
    "initial_lr",
    "foreach",  # the implementation of the step, not its result
    "fused",
    "capturable",
    "differentiable",
    "param_names",  # the network's own names have been compared
    *CPRSettings.KEYS,  # CPR compares them itself, for each parameter
}


def _optimizer_difference(
    saved: Mapping[str, Any], optimizer: Optimizer, keeps_optimizer: bool
) -> str | None:
    """Return the first difference that ``load_state_dict`` would not report, None if there is none.

    torch replaces the optimizer's settings by the saved ones and ignores unknown entries.
    """
    own = optimizer.state_dict()
    for key, title in (("cpr", "CPR"), ("baseline", "a comparison method")):
        if (key in saved) != (key in own):
            return f"{'with' if key in saved else 'without'} {title}"
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return "its optimizer state is damaged"
    if keeps_optimizer:
        return None
    for group, before in zip(optimizer.param_groups, groups):
        if any((key in group) != (key in before) for key in ("momentum", "betas")):
            return "with another optimizer"
        for key in sorted(group.keys() & before.keys() - _NOT_COMPARED):
            if before[key] != group[key]:
                return f"{key}: expected {group[key]}, got {before[key]}"
    return None
