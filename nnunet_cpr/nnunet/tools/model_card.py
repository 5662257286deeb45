"""Model card: what a trained model is and how well it did, as Markdown beside the exported weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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
_LONGEST = 500  # characters of a value from a file of others


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
        str(name): label
        for name, label in _mapping(dataset.get("labels")).items()
        if name not in ("background", "ignore")
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
    return environment.get_template("model_card.md.j2").render(
        dataset=_cell(plans.get("dataset_name")),
        configuration=_cell(model.configuration),
        folder=_cell(model.target.name),
        folds=model.folds,
        chk="" if is_final else f" -chk {model.checkpoints[0]}",
        data=_data(dataset, foreground),
        training=_training(model, plans),
        bounds=[row for fold in model.folds for row in _bounds(model.source / f"fold_{fold}", fold)],
        classes=list(foreground),
        validation=[
            _dice(model.source / f"fold_{fold}" / "validation" / "summary.json", fold, foreground)
            for fold in model.folds
        ],
        versions=_versions(model),
    )


def _data(dataset: Mapping[str, Any], foreground: Mapping[str, Any]) -> list[tuple[str, Any]]:
    channels = _mapping(dataset.get("channel_names"))
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
    found = _mapping(_mapping(plans.get("configurations")).get(model.configuration))
    network = _mapping(found.get("architecture")).get("network_class_name", "")
    return [
        ("trainer", f"`{model.trainer}`"),
        ("plans", plans.get("plans_name")),
        ("configuration", model.configuration),
        ("network", str(network).rpartition(".")[2]),
        ("patch size", _by(found.get("patch_size"))),
        ("voxel spacing in mm", _by(found.get("spacing"))),
        ("batch size", found.get("batch_size")),
    ]


def _bounds(folder: Path, fold: str) -> list[tuple[Any, ...]]:
    """Return the row of a fold, none if it was trained without CPR."""
    if not (folder / CSV_NAME).is_file():
        return []
    history = History.read(folder)
    kappa = history.stack("kappa")
    known = np.isfinite(kappa)
    last = kappa[:, -1][known[:, -1]]
    count = f"{len(last)} of {len(kappa)}" if len(last) < len(kappa) else str(len(kappa))
    bounds = f"{last.min():.3g} to {last.max():.3g}" if len(last) else "none"
    complete = np.flatnonzero(known.all(axis=0))
    step = history.steps[complete[0]] if len(complete) else "never"
    return [(fold, count, bounds, step, judge(history).text)]


def _dice(summary: Path, fold: str, foreground: Mapping[str, Any]) -> tuple[Any, ...]:
    content = _read(summary) if summary.is_file() else {}
    cases = content.get("metric_per_case")
    means = _mapping(content.get("mean"))
    return (
        fold,
        len(cases) if isinstance(cases, list) else None,
        _percent(_mapping(content.get("foreground_mean"))),
        *(_percent(_mapping(means.get(_key(label)))) for label in foreground.values()),
    )


def _key(label: Any) -> str:
    """Return the key of a label or region in nnU-Net's summary."""
    return str(tuple(label)) if isinstance(label, list) else str(label)


def _percent(metrics: Mapping[str, Any]) -> str | None:
    value = finite_number(metrics.get("Dice"))
    return None if value is None else f"{100 * value:.2f}"


def _versions(model: ExportedModel) -> list[tuple[str, Any]]:
    torch_versions = set()
    for fold in model.folds:
        debug = model.source / f"fold_{fold}" / "debug.json"
        if debug.is_file():
            torch_versions.add(str(_read(debug).get("torch_version", _UNKNOWN)))
    return [
        ("torch, training", ", ".join(sorted(torch_versions))),
        ("nnU-Net, export", version("nnunetv2")),
        ("nnunet-cpr, export", nnunet_cpr.__version__),
    ]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return _mapping(read_json(path))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got: {' '.join(str(error).split())}") from error


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _by(values: Any) -> str:
    return " x ".join(f"{value:g}" for value in values or () if isinstance(value, int | float))


def _cell(value: Any) -> str:
    """Return a value as one line for a table; files of others may contain anything."""
    if value is None or value == "":
        return _UNKNOWN
    text = value if isinstance(value, str) else json.dumps(value)
    text = " ".join(text.split())
    text = "".join(c for c in text if c.isprintable())
    text = re.sub(r"([|<\[\]])", r"\\\1", text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
