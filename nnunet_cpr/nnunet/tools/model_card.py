"""Model card: what a trained model is and how well it did, as Markdown beside the exported weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

import nnunet_cpr
from nnunet_cpr._files import finite_number, read_json
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT
from nnunet_cpr.nnunet.history import CSV_NAME, History
from nnunet_cpr.nnunet.verdict import judge

CARD_NAME = "model_card.md"

_UNKNOWN = "not recorded"


@dataclass(frozen=True)
class ExportedModel:
    """Model to describe.

    Attributes:
        source: folder of the trained model, with ``plans.json`` and ``fold_X``.
        target: folder of the exported model.
        trainer: class name of the trainer.
        configuration: nnU-Net's name, such as ``3d_fullres``.
        folds: exported folds such as ``0`` and ``all``.
        checkpoints: file names of the exported checkpoints.
    """

    source: Path
    target: Path
    trainer: str
    configuration: str
    folds: Sequence[str]
    checkpoints: Sequence[str]


def model_card(model: ExportedModel) -> str:
    """Return the card of an exported model as Markdown.

    Values that the files of the model do not have are "not recorded". Equal files give equal cards.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged.
    """
    plans, dataset = _read(model.source / "plans.json"), _read(model.source / "dataset.json")
    foreground = {
        name: label for name, label in dataset["labels"].items() if name not in ("background", "ignore")
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["cell"] = _cell
    is_final = list(model.checkpoints) == [FINAL_CHECKPOINT]
    folders = {fold: model.source / f"fold_{fold}" for fold in model.folds}
    return environment.get_template("model_card.md.j2").render(
        dataset=_cell(plans.get("dataset_name")),
        configuration=_cell(model.configuration),
        folder=_cell(model.target.name),
        folds=model.folds,
        chk="" if is_final else f" -chk {model.checkpoints[0]}",
        data=_data(dataset, foreground),
        training=_training(model, plans),
        bounds=[_bounds(f, fold) for fold, f in folders.items() if (f / CSV_NAME).is_file()],
        classes=list(foreground),
        validation=[_dice(folder, fold, foreground) for fold, folder in folders.items()],
        versions=_versions(folders.values()),
    )


def _data(dataset: Mapping[str, Any], foreground: Mapping[str, Any]) -> list[tuple[str, Any]]:
    channels = dataset.get("channel_names", {})
    return [
        ("name", dataset.get("name")),
        ("description", dataset.get("description")),
        ("origin", dataset.get("reference")),
        ("licence of the data", dataset.get("licence", dataset.get("license"))),
        ("training cases", dataset.get("numTraining")),
        ("channels", ", ".join(f"{key}: {value}" for key, value in channels.items())),
        ("structures", ", ".join(f"{name} ({label})" for name, label in foreground.items())),
    ]


def _training(model: ExportedModel, plans: Mapping[str, Any]) -> list[tuple[str, Any]]:
    configuration = plans["configurations"].get(model.configuration, {})
    network = configuration.get("architecture", {}).get("network_class_name", "")
    return [
        ("trainer", f"`{model.trainer}`"),
        ("plans", plans.get("plans_name")),
        ("configuration", model.configuration),
        ("network", network.rpartition(".")[2]),
        ("patch size", " x ".join(f"{edge:g}" for edge in configuration.get("patch_size", ()))),
        ("voxel spacing in mm", " x ".join(f"{edge:g}" for edge in configuration.get("spacing", ()))),
        ("batch size", configuration.get("batch_size")),
    ]


def _bounds(folder: Path, fold: str) -> tuple[Any, ...]:
    """Return the row of a fold that was trained with CPR."""
    history = History.read(folder)
    kappa = history.stack("kappa")
    known = np.isfinite(kappa)
    last = kappa[:, -1][known[:, -1]]
    count = f"{len(last)} of {len(kappa)}" if len(last) < len(kappa) else str(len(kappa))
    bounds = f"{last.min():.3g} to {last.max():.3g}" if len(last) else "none"
    complete = np.flatnonzero(known.all(axis=0))
    step = history.steps[complete[0]] if len(complete) else "never"
    return fold, count, bounds, step, judge(history).text


def _dice(folder: Path, fold: str, foreground: Mapping[str, Any]) -> tuple[Any, ...]:
    summary = folder / "validation" / "summary.json"
    if not summary.is_file():
        return (fold, *[None] * (2 + len(foreground)))
    content = _read(summary)
    # nnU-Net writes a region as the text of a tuple.
    keys = [
        str(tuple(label)) if isinstance(label, list) else str(label) for label in foreground.values()
    ]
    means = content.get("mean", {})
    metrics = [content.get("foreground_mean", {}), *(means.get(key, {}) for key in keys)]
    dice = [finite_number(each.get("Dice")) for each in metrics]
    texts = [None if value is None else f"{100 * value:.2f}" for value in dice]
    cases = content.get("metric_per_case")
    return fold, None if cases is None else len(cases), *texts


def _versions(folders: Iterable[Path]) -> list[tuple[str, Any]]:
    files = [folder / "debug.json" for folder in folders]
    found = {str(_read(file).get("torch_version", _UNKNOWN)) for file in files if file.is_file()}
    return [
        ("torch, training", ", ".join(sorted(found))),
        ("nnU-Net, export", version("nnunetv2")),
        ("nnunet-cpr, export", nnunet_cpr.__version__),
    ]


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got: {' '.join(str(error).split())}") from error


def _cell(value: Any) -> str:
    """Return a value as one line for a table."""
    if value is None or value == "":
        return _UNKNOWN
    return re.sub(r"([|<\[\]])", r"\\\1", " ".join(str(value).split()))
