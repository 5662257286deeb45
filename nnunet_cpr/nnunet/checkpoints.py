"""nnU-Net's checkpoints: read without trusting them, and refused where they do not fit.

A checkpoint is a zip file with a pickle in it, and a pickle can run anything. So only tensors, plain
values and what nnU-Net's logger leaves (:data:`NEEDED`) are read, and nothing else is run.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnunet_cpr._validation import list_names
from nnunet_cpr.cpr import CPRSettings

if TYPE_CHECKING:
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

RESUMED_FROM = ("checkpoint_final.pth", "checkpoint_latest.pth", "checkpoint_best.pth")
"""What ``--c`` continues from: the first that is there."""

BEGIN_ANEW = "to begin a training with its weights give it to -pretrained_weights"

_numpy_scalar = np.float32(0).__reduce__()[0]
NEEDED: tuple[Any, ...] = (
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),  # written with numpy 1
    np.dtype,
    type(np.dtype(np.float32)),
    type(np.dtype(np.float64)),
)
"""What nnU-Net's checkpoints hold beyond tensors and plain values: numpy's numbers, in the logs."""

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
    """A checkpoint that cannot be used; the message names the file and the reason, in one line."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")


class DamagedCheckpoint(UnusableCheckpoint):
    """A file that is torn, cut short or has flipped bits."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, f"is damaged: {reason}")


@contextmanager
def restricted_loading() -> Iterator[None]:
    """Within it ``torch.load`` reads what :func:`read` does and nothing more, whoever calls it."""
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ[names[0]] = "1"
    try:
        with torch.serialization.safe_globals(list(NEEDED)):
            yield
    finally:
        del os.environ[names[0]]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def read(path: Path, needed: Collection[str] = tuple(_KINDS)) -> dict[str, Any]:
    """A checkpoint of nnU-Net, on the CPU.

    Args:
        path: the file.
        needed: the entries that it must have.

    Raises:
        DamagedCheckpoint: it is not whole.
        UnusableCheckpoint: it cannot be opened, is no checkpoint of nnU-Net's, or carries more than
            such a one needs.
    """
    try:
        _check_whole(path)
        with restricted_loading():
            checkpoint = _load(path)
    except OSError as error:
        raise UnusableCheckpoint(path, f"cannot be read: {error.strerror or error}") from error
    if not isinstance(checkpoint, dict):
        raise UnusableCheckpoint(path, "is no checkpoint of nnU-Net's")
    wrong = [
        key for key in needed if key not in checkpoint or not isinstance(checkpoint[key], _KINDS[key])
    ]
    if not wrong and not all(isinstance(w, Tensor) for w in checkpoint["network_weights"].values()):
        wrong = ["network_weights"]
    if wrong:
        raise UnusableCheckpoint(
            path, f"is no checkpoint of nnU-Net's: {list_names(wrong)} is not as there"
        )
    return checkpoint


def older_than(path: Path) -> list[Path]:
    """The other checkpoints of its fold that ``--c`` may continue from when this one is damaged."""
    names = RESUMED_FROM[RESUMED_FROM.index(path.name) + 1 :] if path.name in RESUMED_FROM else ()
    return [other for other in map(path.with_name, names) if other.exists()]


def read_first_whole(paths: Sequence[Path], say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The first of some checkpoints that is not damaged, and its path.

    Args:
        paths: the files, at least one.
        say: told of every damaged one before it.

    Raises:
        DamagedCheckpoint: all are; the error is the last one's.
        UnusableCheckpoint: as :func:`read`.
    """
    for path, older in itertools.pairwise(paths):
        try:
            return path, read(path)
        except DamagedCheckpoint as error:
            say(f"{error}; trying {older.name}")
    return paths[-1], read(paths[-1])


def _check_whole(path: Path) -> None:
    """Compare what is in the file with its checksums, which torch writes and does not look at."""
    if path.stat().st_size == 0:
        raise DamagedCheckpoint(path, "it is empty")
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
    except OSError:
        raise
    except zipfile.BadZipFile:
        raise DamagedCheckpoint(path, "it is cut short, or no checkpoint at all") from None
    except Exception as error:  # zipfile meets flipped bits in many ways
        raise DamagedCheckpoint(path, _first_line(error)) from error
    if torn is not None:
        raise DamagedCheckpoint(path, f"the checksum of {torn!r} is wrong")


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnusableCheckpoint(path, _not_allowed(path, error)) from error
    except OSError:
        raise
    except Exception as error:  # a made-up pickle can fail in any way
        raise DamagedCheckpoint(path, _first_line(error)) from error


def _not_allowed(path: Path, error: Exception) -> str:
    found = re.findall(r"(?:GLOBAL|unrecognized function|class) ([\w.]+)", str(error))
    what = found[0] if found else "something"
    return (
        f"carries {what}, which no checkpoint of nnU-Net's needs; it was not run. "
        "Do not use this file if it comes from a stranger"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


# Does it fit?


def check_fits(path: Path, checkpoint: Mapping[str, Any], trainer: nnUNetTrainer) -> None:
    """That a checkpoint means for this trainer what it meant where it was written.

    Raises:
        UnusableCheckpoint: it does not.
    """
    _check_training(path, checkpoint["init_args"], trainer)
    network = trainer.network.module if trainer.is_ddp else trainer.network
    weights = checkpoint["network_weights"]
    # As nnU-Net does, for weights saved from within torch's DataParallel.
    weights = {key.removeprefix("module."): value for key, value in weights.items()}
    check_network(path, weights, getattr(network, "_orig_mod", network))
    different = _optimizer_differs(checkpoint["optimizer_state"], trainer.optimizer)
    if different:
        writer, own = checkpoint["trainer_name"], type(trainer).__name__
        raise UnusableCheckpoint(path, f"is {writer}'s, {different} {own}; {BEGIN_ANEW}")


def check_network(path: Path, weights: Mapping[str, Tensor], network: nn.Module) -> None:
    """That the weights are those of the network.

    Raises:
        UnusableCheckpoint: they are not.
    """
    own = {key: list(value.shape) for key, value in network.state_dict().items()}
    missing = [key for key in own if key not in weights]
    unknown = [key for key in weights if key not in own]
    if missing or unknown:
        what = (
            f"lacks {list_names(missing)}"
            if missing
            else f"has {list_names(unknown)}, which is not here"
        )
        raise UnusableCheckpoint(path, f"is of another network: it {what}")
    for key, shape in own.items():
        before = list(weights[key].shape)
        if before != shape:
            raise UnusableCheckpoint(
                path, f"is of another network: {key!r} has shape {before} there and {shape} here"
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
            raise UnusableCheckpoint(path, f"is of {what} {before}, and this is {what} {now}")


_NOT_COMPARED = {
    "params",
    "lr",  # the schedule sets it
    "initial_lr",
    "foreach",  # how a step is computed, not what
    "fused",
    "capturable",
    "differentiable",
    "param_names",  # the network's own names have been compared
    *CPRSettings.KEYS,  # CPR compares them itself, matrix by matrix
}


def _optimizer_differs(saved: Mapping[str, Any], optimizer: Optimizer) -> str | None:
    """What torch would take over in silence, though it is not what the optimizer does.

    torch takes the settings of the saved one, whatever one's own are, and ignores what it does not know.

    Returns:
        Words between the names of the trainer that wrote it and of the one that reads it, or None.
    """
    own = optimizer.state_dict()
    for key, title in (("cpr", "CPR"), ("baseline", "the regularizer")):
        if (key in saved) != (key in own):
            return f"with {title}, unlike" if key in saved else f"without {title}, unlike"
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return "with a damaged optimizer state, of no use to"
    for group, before in zip(own["param_groups"], groups):
        if any((key in group) != (key in before) for key in ("momentum", "betas")):
            return "with another optimizer than that of"
        for key in sorted(group.keys() & before.keys() - _NOT_COMPARED):
            if before[key] != group[key]:
                return f"with {key} {before[key]} instead of the {group[key]} of"
    return None
