"""Study files and presets: reading, writing, finding, and their JSON schema."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pydantic
import yaml

from nnunet_cpr.files import atomic_write
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies.study import Study, TrainerEntry
from nnunet_cpr.yaml_files import read_yaml

PRESETS = Path(__file__).parent / "presets"


def load(name: str, called: str | None = None) -> Study:
    """Return the study of a YAML file or preset.

    Args:
        name: path of a file, or name of a preset.
        called: name of the study if the file gives none; by default the name of the file.

    Raises:
        Refusal: the file does not exist or is invalid.

    Example:
        >>> load("quick").folds
        (0, 1, 2)
    """
    path = find_study(name)
    try:
        return read_yaml(path, Study, TrainerEntry, name=called or path.stem, datasets=())
    except ValueError as error:
        is_of_file = str(error).endswith(f"got {path.stem!r}")
        raise Refusal(f"{error}; choose one with --name" if is_of_file else str(error)) from error


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of study files, in which the name and the data sets may be left out."""
    return {**pydantic.TypeAdapter(Study).json_schema(), "required": ["trainers"]}


def save(study: Study, path: Path) -> None:
    """Write a study as a file that :func:`load` reads."""
    document = asdict(study)
    document["trainers"] = [{k: v for k, v in entry.items() if v} for entry in document["trainers"]]
    with atomic_write(path) as temporary:
        temporary.write_text(yaml.safe_dump(document, sort_keys=False))


def preset_names() -> list[str]:
    """Return the names of the studies that come with the package.

    Example:
        >>> "btcv" in preset_names()
        True
    """
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def saved_files(studies: Path) -> dict[str, Path]:
    """Return the definitions of the studies that have been run, by name.

    Args:
        studies: ``nnUNet_results/studies``.
    """
    return {path.parent.name: path for path in sorted(studies.glob("*/study.yaml"))}


def find_study(given: str, studies: Path | None = None, saved_first: bool = False) -> Path:
    """Return the YAML file of a study.

    Args:
        given: path of a file, name of a study that has been run, or name of a preset.
        studies: ``nnUNet_results/studies``; without it, studies that have been run are not found.
        saved_first: prefer a study that has been run to a preset of the same name.

    Raises:
        Refusal: there is none; the message lists the names.
    """
    presets = {name: PRESETS / f"{name}.yaml" for name in preset_names()}
    saved = {} if studies is None else saved_files(studies)
    known = presets | saved if saved_first else saved | presets
    file = Path(given) if Path(given).is_file() else known.get(given)
    if file is None:
        raise Refusal(
            f"study {given!r}: expected a file, a study in nnUNet_results/studies or a preset",
            f"choose from {', '.join([*saved, *presets])}",
        )
    return file
