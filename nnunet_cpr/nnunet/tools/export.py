"""Export of a trained model for nnU-Net without this package.

CPR does not change the network, so only the name of the trainer is replaced: by ``nnUNetTrainer``, or by
the trainer whose network it has. A model card is written beside the weights.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nnunet_cpr._files import atomic_directory, atomic_torch_save, read_json
from nnunet_cpr.names import WrongName
from nnunet_cpr.nnunet import checkpoints
from nnunet_cpr.nnunet.base_trainer import NamedTrainer
from nnunet_cpr.nnunet.composition import search_trainer
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT
from nnunet_cpr.nnunet.history import CSV_NAME, History
from nnunet_cpr.nnunet.verdict import judge

CARD_NAME = "model_card.md"
_TEMPLATE = Path(__file__).with_name("model_card.template.md")

READ = ("network_weights", "init_args", "trainer_name")
"""Entries of a checkpoint that inference needs; the optimizer state is larger than the weights."""

MODEL_FILES = ("plans.json", "dataset.json", "dataset_fingerprint.json")
FOLD_FILES = ("progress.png", "validation/summary.json")
"""Files that nnU-Net packs into the zip file of a model."""
CROSS_VALIDATION_FILES = ("summary.json", "postprocessing.pkl", "postprocessing.json", "plans.json")


class ExportError(RuntimeError):
    """Model that cannot be exported; the message is one line."""


def export_model(model: Path, output: Path, folds: Sequence[str] | None, names: Sequence[str]) -> Path:
    """Write ``output/DATASET/nnUNetTrainer__PLANS__CONFIGURATION`` atomically.

    Args:
        model: folder of a trained model, with ``plans.json`` and ``fold_X``; it is not changed.
        output: a folder with the layout of ``nnUNet_results``.
        folds: folds such as ``0`` and ``all``; None means all existing folds.
        names: file names of the checkpoints, such as ``checkpoint_final.pth``.

    Returns:
        The new model folder.

    Raises:
        ExportError: the model cannot be exported.
        UnusableCheckpoint: a file is damaged or not a checkpoint of nnU-Net.
        OSError: a file cannot be read or written.
    """
    folds = _folds(model) if folds is None else folds
    places = [Path(f"fold_{fold}") / name for fold in folds for name in names]
    for place in places:
        if place.parts[1:] != (place.name,) or not (model / place).is_file():
            raise ExportError(
                f"{model / place} does not exist; choose existing folds with --folds and checkpoints "
                "with --checkpoint"
            )
    plans, dataset = _read_object(model / "plans.json"), _read_object(model / "dataset.json")
    first = checkpoints.read(model / places[0], READ)
    trainer, configuration = first["trainer_name"], first["init_args"].get("configuration")
    without_cpr = _trainer_without_cpr(trainer)
    target = _target(output, plans, configuration, without_cpr)
    if target.parent == model.resolve().parent:
        raise ExportError(
            f"{output} is nnUNet_results of the original, where the copy would look like a model "
            "trained without CPR; choose another folder"
        )
    if target.exists():
        raise ExportError(f"{target} exists; move it away or choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(target) as work:
        for place in places:
            _convert(model / place, work / place, (trainer, without_cpr), configuration)
        _copy(model, work, MODEL_FILES)
        for fold in folds:
            _copy(model, work, (f"fold_{fold}/{name}" for name in FOLD_FILES))
        for results in model.glob("crossval_results_folds_*"):
            if set(results.name.split("_")[3:]) <= set(folds):
                _copy(model, work, (f"{results.name}/{name}" for name in CROSS_VALIDATION_FILES))
        options = "" if names[0] == FINAL_CHECKPOINT else f" -chk {names[0]}"
        card = _TEMPLATE.read_text(encoding="utf-8").format(
            title=f"{target.parent.name}, {configuration}",
            options=f"-m {target.name} -f {' '.join(folds)}{options}",
            trainer=trainer,
            channels=", ".join(dataset.get("channel_names", {}).values()),
            labels=", ".join(dataset["labels"]),
            folds="\n".join(_describe_fold(model / f"fold_{fold}") for fold in folds),
        )
        (work / CARD_NAME).write_text(card, encoding="utf-8")
    return target


def _describe_fold(folder: Path) -> str:
    """Return the row of a fold in the model card: Dice of its validation, and the verdict of CPR."""
    summary, dice, verdict = folder / "validation" / "summary.json", "", ""
    if summary.is_file():
        dice = f"{100 * _read_object(summary)['foreground_mean']['Dice']:.2f}"
    if (folder / CSV_NAME).is_file():
        verdict = judge(History.read(folder)).text
    return f"| {folder.name} | {dice or 'not validated'} | {verdict or 'not recorded'} |"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except (TypeError, ValueError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from error


def _folds(model: Path) -> list[str]:
    found = sorted(folder.name.removeprefix("fold_") for folder in model.glob("fold_*"))
    if not found:
        raise ExportError(f"{model}: expected folders such as fold_0, found none")
    return found


def _trainer_without_cpr(name: str) -> str:
    """Return the name of the trainer whose network a trainer of this package has.

    Raises:
        ExportError: it is not from this package, or has a network of its own.
    """
    try:
        trainer = search_trainer(name)
    except WrongName as error:
        raise ExportError(f"{error}; the model was trained with it") from error
    if not issubclass(trainer, NamedTrainer):
        raise ExportError(
            f"trainer {name} of the model is not from nnunet-cpr; there is nothing to export"
        )
    other = trainer.other_trainer()
    if trainer.build_network_architecture is not other.build_network_architecture:
        raise ExportError(
            f"trainer {name} of the model builds its own network instead of that of {other.__name__}"
        )
    return other.__name__


def _target(output: Path, plans: dict[str, Any], configuration: Any, trainer: str) -> Path:
    dataset, plans_name = plans.get("dataset_name"), plans.get("plans_name")
    for part in (dataset, plans_name, configuration):
        if not isinstance(part, str) or not re.fullmatch(r"[^./\\\0][^/\\\0]*", part):
            raise ExportError(
                f"plans.json or a checkpoint: expected a name valid for a folder, got {part!r}"
            )
    return output.resolve() / str(dataset) / f"{trainer}__{plans_name}__{configuration}"


def _convert(source: Path, target: Path, trainers: tuple[str, str], configuration: str) -> None:
    """Write a checkpoint with another trainer's name and the entries that inference needs.

    Args:
        source: the checkpoint.
        target: the new file.
        trainers: the expected trainer and the one to write.
        configuration: its expected value.
    """
    checkpoint = checkpoints.read(source, READ)
    found = checkpoint["trainer_name"], checkpoint["init_args"].get("configuration")
    if found != (trainers[0], configuration):
        raise ExportError(
            f"{source}: expected {trainers[0]}, {configuration}, got {found[0]}, {found[1]}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    entries = ("network_weights", "init_args", "inference_allowed_mirroring_axes")
    kept = {key: checkpoint[key] for key in entries if key in checkpoint}
    kept |= {"trainer_name": trainers[1], "trained_by": trainers[0]}
    atomic_torch_save(kept, target)


def _copy(model: Path, work: Path, names: Iterable[str]) -> None:
    for name in names:
        if (model / name).is_file():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model / name, work / name)
