"""Model card: Markdown beside exported weights that describes the model and its validation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nnunet_cpr._files import finite_number, read_json
from nnunet_cpr.nnunet.fold_files import FINAL_CHECKPOINT
from nnunet_cpr.nnunet.history import CSV_NAME, History
from nnunet_cpr.nnunet.verdict import judge

CARD_NAME = "model_card.md"


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

    Values that the files of the model do not have are "not recorded".

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not JSON or not a history.
    """
    plans, dataset = _read(model.source / "plans.json"), _read(model.source / "dataset.json")
    channels, labels = dataset.get("channel_names", {}), dataset["labels"]
    facts = [
        ("data set", dataset.get("name")),
        ("licence of the data", dataset.get("licence", dataset.get("license"))),
        ("training cases", dataset.get("numTraining")),
        ("channels", ", ".join(f"{key}: {value}" for key, value in channels.items())),
        ("labels", ", ".join(f"{name} ({label})" for name, label in labels.items())),
        ("trainer", model.trainer),
        ("plans", plans.get("plans_name")),
        *((f"{package}, export", version(package)) for package in ("nnunetv2", "nnunet-cpr")),
    ]
    is_final = list(model.checkpoints) == [FINAL_CHECKPOINT]
    checkpoint = "" if is_final else f" -chk {model.checkpoints[0]}"
    template = Path(__file__).with_name("model_card.template.md").read_text(encoding="utf-8")
    return template.format(
        title=f"{_cell(plans.get('dataset_name'))}, {_cell(model.configuration)}",
        options=f"-m {model.target.name} -f {' '.join(model.folds)}{checkpoint}",
        facts=_table(facts),
        folds=_table(_fold(model.source / f"fold_{fold}", fold) for fold in model.folds),
    )


def _fold(folder: Path, fold: str) -> tuple[Any, ...]:
    """Return the row of a fold."""
    summary = folder / "validation" / "summary.json"
    content = _read(summary) if summary.is_file() else {}
    dice = finite_number(content.get("foreground_mean", {}).get("Dice"))
    verdict = judge(History.read(folder)).text if (folder / CSV_NAME).is_file() else None
    cases = len(content["metric_per_case"]) if "metric_per_case" in content else None
    return fold, cases, None if dice is None else f"{100 * dice:.2f}", verdict


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got: {' '.join(str(error).split())}") from error


def _table(rows: Iterable[tuple[Any, ...]]) -> str:
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows)


def _cell(value: Any) -> str:
    """Return a value as one line for a table."""
    if value is None or value == "":
        return "not recorded"
    return re.sub(r"([|<\[\]])", r"\\\1", " ".join(str(value).split()))
