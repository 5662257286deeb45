"""``nnunet-cpr prepare``: convert a challenge archive to nnU-Net's raw format."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from nnunet_cpr.cli._errors import report_errors, stop
from nnunet_cpr.cli._options import DEFAULT_PROCESSES, ProcessesOption


def prepare(
    dataset: Annotated[str, typer.Argument(help="btcv, heart, brats2020, amos22 or hippocampus.")],
    source: Annotated[Path, typer.Argument(help="Folder of the extracted archive.")],
    dataset_id: Annotated[
        int | None,
        typer.Option(min=1, max=999, help="nnU-Net's dataset id, if not the usual one."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Dataset name after DatasetXXX_, if not the usual one.")
    ] = None,
    processes: ProcessesOption = DEFAULT_PROCESSES,
) -> None:
    """Convert a challenge archive to a verified data set in nnUNet_raw."""
    import re
    import shlex

    from rich.console import Console

    from nnunet_cpr.datasets.archive import InvalidCases, PrepareError
    from nnunet_cpr.datasets.registry import DATA_SETS, prepare_data_set
    from nnunet_cpr.nnunet.commands import CommandFailed

    if dataset not in DATA_SETS:
        stop(f"unknown data set {dataset!r}; choose from {', '.join(DATA_SETS)}")
    raw = os.environ.get("nnUNet_raw")
    if not raw:
        stop("nnUNet_raw is not set; run: export nnUNet_raw=FOLDER with the folder for data sets")
    if not os.path.isdir(raw):
        stop(f"nnUNet_raw: {raw} does not exist; run: mkdir -p {shlex.quote(raw)}")
    if name is not None and not re.fullmatch(r"\w[\w-]*", name):
        stop(f"--name: expected letters, digits, '_' and '-', got {name!r}")
    data_set = DATA_SETS[dataset]
    number = data_set.number if dataset_id is None else dataset_id
    target = Path(raw).absolute() / f"Dataset{number:03d}_{name or data_set.name}"
    console = Console(highlight=False)
    with report_errors(
        PrepareError, CommandFailed, OSError, interrupted="interrupted; nothing was written"
    ):
        try:
            prepare_data_set(data_set, source, target, processes, console)
        except InvalidCases as error:
            for line in error.lines:
                print(*line.splitlines(), file=sys.stderr)
            raise
    console.print(f"{target} is ready. Next:", markup=False, soft_wrap=True)
    console.print(f"  nnUNetv2_plan_and_preprocess -d {number} --verify_dataset_integrity")
    preset = f"Dataset{data_set.number:03d}_{data_set.name}"
    other = "" if target.name == preset else f" --dataset {target.name}"
    console.print(f"  nnunet-cpr study run {dataset}{other}", soft_wrap=True)
