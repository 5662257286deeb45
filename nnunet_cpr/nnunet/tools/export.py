"""Export of a trained model for nnU-Net without this package.

CPR does not change the network, so only the name of the trainer is replaced: by ``nnUNetTrainer``, or by
the trainer whose network it has. A model card is written beside the weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nnunet_cpr.files import atomic_directory, atomic_torch_save, read_json
from nnunet_cpr.nnunet import checkpoints
from nnunet_cpr.nnunet.base_trainer import NamedTrainer, other_trainer
from nnunet_cpr.nnunet.bounds_verdict import judge_bounds
from nnunet_cpr.nnunet.classes import search_trainer
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT, RECORD
from nnunet_cpr.nnunet.history import History
from nnunet_cpr.nnunet.run_record import describe_weights, record_of
from nnunet_cpr.nnunet.tools.explain_name import training_of
from nnunet_cpr.refusals import Refusal

NEEDED = ("network_weights", "init_args", "trainer_name")
"""Entries of a checkpoint that inference needs; the optimizer state is larger than the weights."""
KEPT = ("network_weights", "init_args", "inference_allowed_mirroring_axes")

MODEL_FILES = ("plans.json", "dataset.json", "dataset_fingerprint.json")
FOLD_FILES = ("progress.png", "validation/summary.json", RECORD)
"""Files that nnU-Net packs into the zip file of a model, and what the run is made from."""
CROSS_VALIDATION_FILES = ("summary.json", "postprocessing.pkl", "postprocessing.json", "plans.json")


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
        Refusal: the model cannot be exported, or a file is damaged or not a checkpoint of nnU-Net.
        WrongName: nnU-Net does not find the trainer.
        OSError: a file cannot be read or written.
    """
    model = model.resolve()
    if folds is None:
        folds = sorted(folder.name.removeprefix("fold_") for folder in model.glob("fold_*"))
    if not folds or model.name.count("__") != 2:
        raise Refusal(f"{model}: expected TRAINER__PLANS__CONFIGURATION with folders such as fold_0")
    places = [Path(f"fold_{fold}") / name for fold in folds for name in names]
    for place in places:
        if place.parts[1:] != (place.name,) or not (model / place).is_file():
            raise Refusal(
                f"{model / place} does not exist",
                "choose existing folds with --folds and checkpoints with --checkpoint",
            )
    dataset = read_json(model / "dataset.json")
    trainer, plans, configuration = model.name.split("__")
    without_cpr = _trainer_without_cpr(trainer)
    target = output.resolve() / model.parent.name / f"{without_cpr}__{plans}__{configuration}"
    if target.parent == model.parent:
        raise Refusal(
            f"{output} is nnUNet_results of the original, where the copy would look like a model "
            "trained without CPR",
            "choose another folder",
        )
    if target.exists():
        raise Refusal(f"{target} exists", "move it away or choose another folder")
    files = [*MODEL_FILES, *(f"fold_{fold}/{name}" for fold in folds for name in FOLD_FILES)]
    for results in model.glob("crossval_results_folds_*"):
        if set(results.name.split("_")[3:]) <= set(folds):
            files += [f"{results.name}/{name}" for name in CROSS_VALIDATION_FILES]
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(target) as work:
        for place in places:
            (work / place).parent.mkdir(parents=True, exist_ok=True)
            checkpoint = checkpoints.read(model / place, NEEDED)
            kept = {key: checkpoint[key] for key in KEPT if key in checkpoint}
            names_in_file = {"trainer_name": without_cpr, "trained_by": checkpoint["trainer_name"]}
            atomic_torch_save(kept | names_in_file, work / place)
        for name in files:
            if (model / name).is_file():
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(model / name, work / name)
        options = "" if names[0] == FINAL_CHECKPOINT else f" -chk {names[0]}"
        template = Path(__file__).with_name("model_card.template.md").read_text(encoding="utf-8")
        card = template.format(
            title=f"{target.parent.name}, {configuration}",
            options=f"-m {target.name} -f {' '.join(folds)}{options}",
            trainer=trainer,
            channels=", ".join(dataset.get("channel_names", {}).values()),
            labels=", ".join(dataset["labels"]),
            settings=_describe_settings(trainer, model / f"fold_{folds[0]}"),
            checkpoint=names[0],
            folds="\n".join(_describe_fold(model / f"fold_{fold}", names[0]) for fold in folds),
        )
        (work / "model_card.md").write_text(card, encoding="utf-8")
    return target


def _describe_settings(trainer: str, fold: Path) -> str:
    """Return the table of the model card with all that a trainer's name trains, and what a fold says."""
    training, weights = training_of(trainer), record_of(fold).weights
    rows = [] if training is None else training.rows()
    if weights:
        rows.append(("pretrained weights", describe_weights(weights)))
    lines = [f"| {title} | {text} |" for title, text in rows]
    return "\n".join(["| setting | value |", "| --- | --- |", *lines]) if lines else ""


def _describe_fold(folder: Path, checkpoint: str) -> str:
    """Return the row of a fold in the model card: Dice of a checkpoint, and the verdict of CPR."""
    summary, dice, verdict = folder / "validation" / "summary.json", "not validated", "not recorded"
    validated = record_of(folder).validated.get("checkpoint", FINAL_CHECKPOINT)
    with suppress(FileNotFoundError, ValueError, LookupError, TypeError):  # a killed one may be damaged
        if validated == checkpoint:
            dice = f"{100 * read_json(summary)['foreground_mean']['Dice']:.2f}"
    with suppress(FileNotFoundError, ValueError):  # without CPR, or damaged, which a training reports
        verdict = judge_bounds(History.read(folder)).text
    return f"| {folder.name} | {dice} | {verdict} |"


def _trainer_without_cpr(name: str) -> str:
    """Return the name of the trainer whose network a trainer of this package has.

    Raises:
        WrongName: nnU-Net does not find it.
        Refusal: it is not from this package, or has a network of its own.
    """
    trainer = search_trainer(name)
    if not issubclass(trainer, NamedTrainer):
        raise Refusal(f"trainer {name} of the model is not from nnunet-cpr", "nothing to export")
    other = other_trainer(trainer)
    if trainer.build_network_architecture is not other.build_network_architecture:
        raise Refusal(
            f"trainer {name} of the model builds its own network instead of that of {other.__name__}"
        )
    return other.__name__
