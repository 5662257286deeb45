"""Continuation of a training as the one of more epochs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnunet_cpr.files import atomic_torch_save, read_json
from nnunet_cpr.names import WrongName
from nnunet_cpr.names.suffixes import find_suffix
from nnunet_cpr.names.trainer_name import TrainerName
from nnunet_cpr.names.training import Training, titles
from nnunet_cpr.nnunet import fold_files
from nnunet_cpr.nnunet.base_trainer import NamedTrainer, parts_of
from nnunet_cpr.nnunet.checkpoint_policy import FINISHED, read_checkpoints
from nnunet_cpr.nnunet.classes import find_trainer, resolve_settings, search
from nnunet_cpr.nnunet.history import CSV_NAME
from nnunet_cpr.nnunet.parts.settings import FOLLOWED
from nnunet_cpr.nnunet.processes import is_of_this_machine, running_process
from nnunet_cpr.nnunet.run_record import read_record
from nnunet_cpr.nnunet.tools.explain_name import build_without_data
from nnunet_cpr.refusals import Refusal, counted

_COPIED = ("training_log_*.txt", CSV_NAME, fold_files.RESOURCES)
"""Records of the epochs so far."""


def with_epochs(name: str, epochs: int) -> tuple[str, TrainerName]:
    """Return the name of a trainer with another number of epochs, and its settings.

    Raises:
        WrongName: the trainer is not from this package, or its settings do not fit the number.

    Example:
        >>> with_epochs("nnUNetTrainerCPR_anytime_100epochs_seed1", 200)[0]
        'nnUNetTrainerCPR_anytime_200epochs_seed1'
    """
    if resolve_settings(name) is None and not hasattr(search(name), "is_family"):  # or derived from one
        raise WrongName(
            f"{name}: expected a trainer of nnunet-cpr, whose name can hold the number of epochs, such "
            "as nnUNetTrainerSGD_anytime"
        )
    own, ending, other = TrainerName.split(name)
    tokens = own.split("_")
    place = next((place for place, token in enumerate(tokens) if _is_epochs(token)), len(tokens))
    tokens[place : place + 1] = [f"{epochs}epochs"]
    longer = "_".join(tokens) + ending + other
    settings = resolve_settings(longer)
    assert settings is not None  # the family is the same
    return longer, settings


def _is_epochs(token: str) -> bool:
    suffix = find_suffix(TrainerName.suffixes, token)
    return suffix is not None and suffix.field == "epochs"


def extend_model(model: Path, epochs: int, report: Callable[[str], None]) -> tuple[Path, list[str]]:
    """Make the folder of a training of more epochs from that of a shorter one.

    Args:
        model: folder of the shorter training, ``TRAINER__PLANS__CONFIGURATION``; it is not changed.
        epochs: number of epochs of the longer one.
        report: function that shows a message.

    Returns:
        The longer training's folder, and its folds.

    Raises:
        Refusal: the folder has no training, the longer one exists, more than the number of epochs would
            differ in it, or a fold has so many epochs or no checkpoint that can be read.
        WrongName: the trainer is not from this package.
        OSError: a file cannot be read or written.
    """
    model = model.resolve()
    folds = sorted(path for path in model.glob("fold_*") if _has_checkpoint(path))
    if not folds or model.name.count("__") != 2:
        raise Refusal(
            f"{model}: expected TRAINER__PLANS__CONFIGURATION with checkpoints in folders such as fold_0"
        )
    trainer, plans, configuration = model.name.split("__")
    longer, _ = with_epochs(trainer, epochs)
    target = model.with_name(f"{longer}__{plans}__{configuration}")
    if target == model:
        raise Refusal(
            f"{model}: its name has {counted(epochs, 'epoch')}",
            "continue it with --c, or if it was finished early, extend it to another number",
        )
    # Those of an earlier call, which may have failed after them, can be continued.
    if not (missing := [fold for fold in folds if not _is_extended(target / fold.name)]):
        raise Refusal(f"{target / folds[0].name} has a checkpoint", "continue it with --c")
    for fold in missing:  # all of them, before anything is written
        _read_shorter(fold, longer, epochs, report)
    for fold in missing:
        _extend_fold(fold, target / fold.name, longer, epochs, report)
    return target, [fold.name.removeprefix("fold_") for fold in folds]


def _extend_fold(
    fold: Path, target: Path, trainer: str, epochs: int, report: Callable[[str], None]
) -> None:
    """Make the folder of a fold of a longer training; see :func:`extend_model`."""
    found, training = _read_shorter(fold, trainer, epochs, report)
    newest = next(iter(found.values()))
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for file in fold.glob(pattern):
            shutil.copyfile(file, target / file.name)
    if record := read_record(fold):
        changes = {"trainer": trainer, "training": training.plain(), "validated": {}}
        record.changed(target, finished_after=None, **changes)
    # The latest last: without it there is nothing to continue.
    if best := found.get(fold / fold_files.BEST_CHECKPOINT):
        atomic_torch_save(_renamed(best, trainer), target / fold_files.BEST_CHECKPOINT)
    atomic_torch_save(_renamed(newest, trainer), target / fold_files.LATEST_CHECKPOINT)


def _read_shorter(
    fold: Path, trainer: str, epochs: int, report: Callable[[str], None]
) -> tuple[dict[Path, dict[str, Any]], Training]:
    """Return the checkpoints of a shorter training, the newest first, and what the longer one trains.

    Raises:
        Refusal: the training cannot be extended.
    """
    process = running_process(fold)
    if process is not None and is_of_this_machine(process):  # claims of others may be left over
        raise Refusal(f"{fold} is trained at the moment", "end it with nnunet-cpr finish first")
    found = read_checkpoints(fold, report)
    path, newest = next(iter(found.items()))
    if (done := newest["current_epoch"]) >= epochs:
        remedy = f"expected --epochs above that, got {epochs}"
        raise Refusal(f"{path} has {counted(done, 'epoch')}", remedy)
    shorter, _, configuration = fold.parent.name.split("__")
    files = [fold.parent / name for name in ("plans.json", "dataset.json")]
    described = [*map(read_json, files), configuration] if all(map(Path.exists, files)) else []
    begun, continued = (
        build_without_data(_named_trainer(name), *described) for name in (shorter, trainer)
    )
    before = parts_of(begun).settings.training_that_began_with(
        newest["init_args"].get(FOLLOWED, math.inf)
    )
    if changed := [field for field in continued.training.differences(before) if field != "epochs"]:
        raise Refusal(
            f"{fold}: its {' and '.join(titles(changed))} would be another one in a training of "
            f"{counted(epochs, 'epoch')}",
            f"train {trainer} from its start; trainings with _anytime can be extended",
        )
    return found, continued.training


def _named_trainer(name: str) -> type[NamedTrainer]:
    trainer = find_trainer(name)
    assert issubclass(trainer, NamedTrainer)  # of this package, whose name has a number of epochs
    return trainer


def _is_extended(fold: Path) -> bool:
    # The best checkpoint is written before the latest.
    names = (fold_files.LATEST_CHECKPOINT, fold_files.FINAL_CHECKPOINT)
    return any((fold / name).exists() for name in names)


def _has_checkpoint(fold: Path) -> bool:
    return any((fold / name).exists() for name in fold_files.CHECKPOINTS)


def _renamed(checkpoint: dict[str, Any], trainer: str) -> dict[str, Any]:
    arguments = {key: value for key, value in checkpoint["init_args"].items() if key != FINISHED}
    return {**checkpoint, "trainer_name": trainer, "init_args": arguments}
