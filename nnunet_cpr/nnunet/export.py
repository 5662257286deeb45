"""A trained model as plain nnU-Net uses it, without this package.

CPR leaves the network as it is, so all that a model needs for it is the stock trainer's name where ours
stood. Whether that is so, nnU-Net itself is asked: it has to load every checkpoint that was written.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

from nnunet_cpr._files import atomic_directory, atomic_torch_save
from nnunet_cpr.nnunet import checkpoints
from nnunet_cpr.nnunet.base_trainer import NamedTrainer

STOCK = nnUNetTrainer.__name__
READ = ("network_weights", "init_args", "trainer_name")
"""What a checkpoint needs for inference; the optimizer's state is larger than the weights."""

MODEL_FILES = ("plans.json", "dataset.json", "dataset_fingerprint.json")
FOLD_FILES = ("progress.png", "validation/summary.json")
"""What nnU-Net asks for when it packs a model into a zip file."""
CROSS_VALIDATION_FILES = ("summary.json", "postprocessing.pkl", "postprocessing.json", "plans.json")


class ExportError(RuntimeError):
    """A model cannot be exported; the message is one line."""


def export(model: Path, output: Path, folds: Sequence[str] | None, names: Sequence[str]) -> Path:
    """Write ``output/DATASET/nnUNetTrainer__PLANS__CONFIGURATION``, whole or not at all.

    Args:
        model: nnU-Net's folder of a trained model, with ``plans.json`` and ``fold_X``. It is only read.
        output: a folder that will be laid out as ``nnUNet_results``.
        folds: such as ``0`` and ``all``; None means all that are there.
        names: of the checkpoints' files, such as ``checkpoint_final.pth``.

    Returns:
        The new model folder.

    Raises:
        ExportError: it would be wrong, or cannot be done.
        UnusableCheckpoint: a file is damaged, or is no checkpoint of nnU-Net's.
        OSError: something cannot be read or written.
    """
    plans, _ = _read_json(model / "plans.json"), _read_json(model / "dataset.json")
    folds = _folds(model) if folds is None else folds
    places = [Path(f"fold_{fold}") / name for fold in folds for name in names]
    for place in places:
        if place.parts[1:] != (place.name,) or not (model / place).is_file():
            raise ExportError(
                f"{model / place} is not there; say which folds with --folds, and which checkpoint of "
                "theirs with --checkpoint"
            )
    first = checkpoints.read(model / places[0], READ)
    trainer, configuration = first["trainer_name"], first["init_args"].get("configuration")
    del first
    _check_trainer(trainer)
    target = _target(output, plans, configuration)
    if target.parent == model.resolve().parent:
        raise ExportError(
            f"in {target.parent} the model would pass for one that was trained without CPR; name "
            "another folder"
        )
    if target.is_relative_to(model.resolve()):
        raise ExportError(f"{output} is in the model's own folder; name another one")
    if os.path.lexists(target):
        raise ExportError(f"{target} exists; move it away, or name another folder")

    made = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_directory(target) as work:
            for i, place in enumerate(places):
                _convert(model / place, work / place, trainer, configuration, len(places) - i)
            _copy(model, work, MODEL_FILES)
            for fold in folds:
                _copy(model, work, (f"fold_{fold}/{name}" for name in FOLD_FILES))
            for results in model.glob("crossval_results_folds_*"):
                if set(results.name.split("_")[3:]) <= set(folds):
                    _copy(model, work, (f"{results.name}/{name}" for name in CROSS_VALIDATION_FILES))
            for place in places:
                _check_with_nnunet(work, place, model)
    except BaseException:
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise
    return target


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ExportError(f"{path} is not there: {path.parent} is no trained model of nnU-Net's")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ExportError(f"{path} is none of nnU-Net's")
    return content


def _folds(model: Path) -> list[str]:
    found = sorted(folder.name.removeprefix("fold_") for folder in model.glob("fold_*"))
    if not found:
        raise ExportError(f"{model} has no fold_0 or other fold")
    return found


def _check_trainer(name: str) -> None:
    """That a trainer is one of ours, with nnU-Net's network."""
    try:
        with redirect_stdout(io.StringIO()):  # the places where nnU-Net looks
            trainer = recursive_find_trainer_class_by_name(name)
    except Exception as error:  # it imports whatever nnUNet_extTrainer has
        raise ExportError(
            f"the model's trainer {name!r} is not found here; set nnUNet_extTrainer as for its training"
        ) from error
    if not issubclass(trainer, NamedTrainer):
        raise ExportError(f"the model's trainer {name} is none of nnunet-cpr's; there is nothing to do")
    if trainer.build_network_architecture is not nnUNetTrainer.build_network_architecture:
        raise ExportError(f"the model's trainer {name} makes a network of its own, not nnU-Net's")


def _target(output: Path, plans: dict[str, Any], configuration: Any) -> Path:
    dataset, plans_name = plans.get("dataset_name"), plans.get("plans_name")
    for part in (dataset, plans_name, configuration):
        if not isinstance(part, str) or not re.fullmatch(r"[^./\\\0][^/\\\0]*", part):
            raise ExportError(
                f"plans.json or a checkpoint has a name that cannot be a folder's: {part!r}"
            )
    return output.resolve() / str(dataset) / f"{STOCK}__{plans_name}__{configuration}"


def _convert(source: Path, target: Path, trainer: str, configuration: str, left: int) -> None:
    """One checkpoint with the stock trainer's name, and nothing that inference does not need."""
    checkpoint = checkpoints.read(source, READ)
    found = checkpoint["trainer_name"], checkpoint["init_args"].get("configuration")
    if found != (trainer, configuration):
        raise ExportError(f"{source} is {found[0]}'s {found[1]}, not {trainer}'s {configuration}")
    needed = sum(w.numel() * w.element_size() for w in checkpoint["network_weights"].values())
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed * left:
        raise ExportError(
            f"{target.parents[3]} has {free / 1e6:,.0f} MB left, and the model needs "
            f"{needed * left / 1e6:,.0f} MB"
        )
    kept = {
        "network_weights": checkpoint["network_weights"],
        "init_args": checkpoint["init_args"],
        "trainer_name": STOCK,
        "trained_by": trainer,
    }
    axes = "inference_allowed_mirroring_axes"
    if axes in checkpoint:
        kept[axes] = checkpoint[axes]
    atomic_torch_save(kept, target)


def _copy(model: Path, work: Path, names: Iterable[str]) -> None:
    for name in names:
        if (model / name).is_file():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model / name, work / name)


def _check_with_nnunet(work: Path, place: Path, model: Path) -> None:
    """That nnU-Net loads what was written into the network that it makes itself."""
    fold = place.parts[0].removeprefix("fold_")
    try:
        with redirect_stdout(io.StringIO()):
            predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
            predictor.initialize_from_trained_model_folder(str(work), [fold], place.name)
    except Exception as error:  # plans.json may say anything
        reason = " ".join(str(error).split())
        raise ExportError(f"nnU-Net does not load {model / place}: {reason[:300]}") from error
