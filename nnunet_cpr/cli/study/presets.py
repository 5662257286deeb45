"""``nnunet-cpr study presets``, ``new`` and ``list``: the studies that there are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument

from nnunet_cpr import studies
from nnunet_cpr.cli._errors import stop
from nnunet_cpr.cli._options import print_json


def presets() -> None:
    """List the studies that come with the package."""
    for name in studies.preset_names():
        lines = (studies.PRESETS / f"{name}.yaml").read_text().splitlines()
        description = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
        print(f"{name:<13}{description}")


def new(
    preset: Annotated[str, Argument(help="Preset to start from.")],
    file: Annotated[Path, Argument(help="New study file.")],
) -> None:
    """Copy a preset to a new study file."""
    from nnunet_cpr._files import atomic_write

    if preset not in studies.preset_names():
        stop(f"unknown preset {preset!r}; choose from {', '.join(studies.preset_names())}")
    if file.exists():
        stop(f"{file}: file exists; choose another name")
    with atomic_write(file) as temporary:
        temporary.write_bytes((studies.PRESETS / f"{preset}.yaml").read_bytes())
    print(f"edit {file}, then: nnunet-cpr study run {file}")


def schema() -> None:
    """Print the JSON schema of study files, for editors that check YAML."""
    print_json(studies.json_schema())


def list_studies() -> None:
    """List the studies in nnUNet_results/studies with their progress."""
    results = Path(studies.nnunet_folders(os.environ, ["nnUNet_results"])["nnUNet_results"])
    saved = results / "studies"
    for name in studies.saved_names(saved):
        try:
            study = studies.load(str(studies.saved_file(saved, name)))
            found = studies.states(study, studies.StudyPaths(results, saved / name))
            text = f"{studies.summary(found.values())}; {', '.join(study.datasets)}"
        except (studies.StudyError, OSError) as error:
            text = str(error)
        print(f"{name:<20} {text}")
