"""``nnunet-cpr prepare``: convert a challenge archive to nnU-Net's raw format."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from nnunet_cpr import studies
from nnunet_cpr.cli._errors import report_errors, stop
from nnunet_cpr.cli._options import DEFAULT_PROCESSES, ProcessesOption


def prepare(
    dataset: Annotated[str, Argument(help="btcv, heart, brats2020, amos22 or hippocampus.")],
    source: Annotated[Path, Argument(help="Folder of the extracted archive.")],
    dataset_id: Annotated[int | None, Option(min=1, max=999, help="Another dataset id.")] = None,
    name: Annotated[str | None, Option(help="Another name after DatasetXXX_.")] = None,
    processes: ProcessesOption = DEFAULT_PROCESSES,
) -> None:
    """Convert a challenge archive to a verified data set in nnUNet_raw."""
    from nnunet_cpr.datasets.archive import InvalidCases, PrepareError
    from nnunet_cpr.datasets.registry import DATA_SETS, prepare_data_set
    from nnunet_cpr.nnunet.commands import CommandFailed

    if dataset not in DATA_SETS:
        stop(f"unknown data set {dataset!r}; choose from {', '.join(DATA_SETS)}")
    if name is not None and not re.fullmatch(r"\w[\w-]*", name):
        stop(f"--name: expected letters, digits, '_' and '-', got {name!r}")
    console, data_set = Console(highlight=False), DATA_SETS[dataset]
    number = dataset_id or data_set.number
    expected = (studies.StudyError, PrepareError, CommandFailed, OSError)
    with report_errors(*expected, interrupted="interrupted; nothing was written"):
        raw = Path(studies.nnunet_folders(os.environ, ["nnUNet_raw"])["nnUNet_raw"])
        if not raw.is_dir():
            stop(f"nnUNet_raw: {raw} does not exist; run: mkdir -p {shlex.quote(str(raw))}")
        target = raw / f"Dataset{number:03d}_{name or data_set.name}"
        try:
            prepare_data_set(data_set, source, target, processes, console)
        except InvalidCases as error:
            for line in error.lines:
                print(*line.splitlines(), file=sys.stderr)
            raise
    console.print(f"{target} is ready. Next:", markup=False, soft_wrap=True)
    console.print(f"  nnUNetv2_plan_and_preprocess -d {number} --verify_dataset_integrity")
    console.print(f"  nnunet-cpr study run {dataset} --dataset {target.name}", soft_wrap=True)
