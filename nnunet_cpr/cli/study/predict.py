"""``nnunet-cpr study predict``: segment images with all folds and seeds of a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Option

from nnunet_cpr import studies
from nnunet_cpr.cli.study._options import DeviceOption, StudyOptions
from nnunet_cpr.cli.study.run import gpu_names


def predict(
    options: StudyOptions,
    images: Annotated[Path, Option("--input", "-i", help="Folder of images, named as nnU-Net does.")],
    output: Annotated[Path, Option("--output", "-o", help="Folder of the segmentations.")],
    setting: Annotated[
        str | None, Option("--setting", help="Label or class name of one of the study's trainers.")
    ] = None,
    device: DeviceOption = None,
) -> None:
    """Segment images with all folds and seeds of a trainer. Run it again to continue.

    It averages them as nnU-Net does, and applies the postprocessing that nnU-Net has determined.
    """
    study, paths, _ = options.select()
    ensemble, console = studies.select_ensemble(study, paths.results, setting), Console(highlight=False)
    gpu_names(None, device)  # refuses a GPU that torch does not find
    for model in ensemble.models:
        folds = ", ".join(map(str, ensemble.folds))
        console.print(f"{model.name}: folds {folds}", soft_wrap=True, markup=False)
    console.print(ensemble.find_postprocessing()[1], soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("cases", total=None)
        for done, total in studies.predict(ensemble, images, output, device):
            progress.update(task, completed=done, total=total)
            if not console.is_terminal:
                console.print(f"{done} of {total} cases")
    console.print(f"wrote {output}", soft_wrap=True, markup=False)
