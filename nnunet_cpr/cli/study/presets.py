"""``nnunet-cpr study presets``, ``new`` and ``list``: the studies that there are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument

from nnunet_cpr import studies
from nnunet_cpr.cli.options import print_json
from nnunet_cpr.refusals import Refusal, counted


def presets() -> None:
    """List the studies that come with the package."""
    for name in studies.preset_names():
        lines = (studies.PRESETS / f"{name}.yaml").read_text().splitlines()
        description = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
        study = studies.load(name)
        if not study.datasets:  # a data set of one's own, named with --dataset
            study = study.changed(datasets=["Dataset001_Own"])
        runs = counted(len([*study.runs()]), "run")
        if not study.seeds:
            with_seeds = len([*study.changed(seeds=[1, 2, 3]).runs()])
            runs += f", {with_seeds} with --seeds 1-3, which a verdict needs"
        print(f"{name:<13}{description} {runs}.")


def new(
    preset: Annotated[str, Argument(help="Preset to start from.")],
    file: Annotated[Path, Argument(help="New study file.")],
) -> None:
    """Copy a preset to a new study file."""
    if preset not in studies.preset_names():
        raise Refusal(f"unknown preset {preset!r}", f"choose from {', '.join(studies.preset_names())}")
    if file.exists():
        raise Refusal(f"{file}: file exists", "choose another name")
    file.write_bytes((studies.PRESETS / f"{preset}.yaml").read_bytes())
    print(f"edit {file}, then: nnunet-cpr study run {file}")


def schema() -> None:
    """Print the JSON schema of study files, for editors that check YAML."""
    print_json(studies.json_schema())


def list_studies() -> None:
    """List the studies in nnUNet_results/studies with their progress."""
    folders = studies.nnunet_folders(os.environ, ["nnUNet_results"])
    for name, file in studies.saved_files(Path(folders["nnUNet_results"]) / "studies").items():
        try:
            study = studies.load(str(file))
            found = studies.states(study, studies.StudyPaths.of(file.parent.name, folders))
            line = f"{studies.summary(found.values())}; {', '.join(study.datasets)}"
        except (OSError, ValueError) as error:
            line = f"unreadable: {error}"
        print(f"{name:<20} {line}")
