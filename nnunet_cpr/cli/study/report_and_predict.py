"""``nnunet-cpr study report`` and ``predict``: compare finished runs, and segment images with them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Option

from nnunet_cpr import studies
from nnunet_cpr.cli.options import JsonOption, print_json
from nnunet_cpr.cli.study.options import DeviceOption, StudyOptions
from nnunet_cpr.cli.study.run import gpu_names
from nnunet_cpr.refusals import Refusal


def report(
    options: StudyOptions,
    output: Annotated[Path | None, Option("--output", "-o", help="Folder of the report.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the finished runs: tables, statistics, and an HTML page.

    Needs nnUNet_results only; pictures of cases and surface metrics need the data as well.
    """
    import pandas as pd

    from nnunet_cpr.reports import write_report

    study, paths, folders = options.select()
    data = [folders.get(name) for name in ("nnUNet_raw", "nnUNet_preprocessed")]
    raw, preprocessed = (Path(folder) if folder else None for folder in data)
    folder, console = output or paths.study / "report", Console(quiet=as_json)
    try:
        files = write_report(study, paths.results, raw, preprocessed, folder, console, paths.splits)
    except OSError as error:
        if output is not None or not str(error.filename).startswith(str(paths.study)):
            raise
        raise Refusal(f"{folder}: {error.strerror}", "choose another folder with -o") from error
    for file in files:
        console.print(f"wrote {file}", soft_wrap=True, markup=False)
    if as_json:
        names = ("table", "comparisons", "non_inferiority", "over_datasets")
        written = [name for name in names if (folder / f"{name}.csv").exists()]
        tables = {name: pd.read_csv(folder / f"{name}.csv") for name in written}
        rows = {name: table.to_dict("records") for name, table in tables.items()}
        print_json({**rows, "files": files})


def predict(
    options: StudyOptions,
    images: Annotated[Path, Option("--input", "-i", help="Folder or pattern, as of `prepare folder`.")],
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
