"""``nnunet-cpr prepare``: from a challenge's archive to nnU-Net's raw format."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from nnunet_cpr.cli._errors import stop


def prepare(
    dataset: Annotated[str, typer.Argument(help="btcv, heart, brats2020, amos22 or hippocampus.")],
    source: Annotated[Path, typer.Argument(help="The folder of the extracted archive.")],
    dataset_id: Annotated[
        int | None,
        typer.Option(min=1, max=999, help="nnU-Net's number for it, instead of the preset's."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="nnU-Net's name for it, what follows DatasetXXX_.")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", "-np", min=1, help="Cases to read and write at the same time.")
    ] = min(8, os.cpu_count() or 1),
) -> None:
    """Make an archive, as the challenge ships it, a checked data set in nnUNet_raw."""
    import re
    import shlex

    from rich.console import Console

    from nnunet_cpr.datasets.archive import BadCases, PrepareError
    from nnunet_cpr.datasets.registry import DATA_SETS
    from nnunet_cpr.datasets.registry import prepare as prepare_data_set
    from nnunet_cpr.nnunet.commands import CommandFailed

    if dataset not in DATA_SETS:
        stop(f"there is no data set {dataset!r}; choose one of {', '.join(DATA_SETS)}")
    raw = os.environ.get("nnUNet_raw")
    if not raw:
        stop("nnUNet_raw is not set; run: export nnUNet_raw=FOLDER, where nnU-Net's data sets are to be")
    if not os.path.isdir(raw):
        stop(f"nnUNet_raw is {raw}, which is not there; run: mkdir -p {shlex.quote(raw)}")
    if name is not None and not re.fullmatch(r"\w[\w-]*", name):
        stop(f"--name must be letters, digits, '_' and '-', not {name!r}")
    data_set = DATA_SETS[dataset]
    number = data_set.number if dataset_id is None else dataset_id
    target = Path(raw).absolute() / f"Dataset{number:03d}_{name or data_set.name}"
    console = Console(highlight=False)
    try:
        prepare_data_set(data_set, source, target, processes, console)
    except BadCases as error:
        for line in error.lines:
            print(*line.splitlines(), file=sys.stderr)
        stop(str(error))
    except (PrepareError, CommandFailed, OSError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop("interrupted; nothing was written", status=130)
    console.print(f"{target} is ready. Next:", markup=False, soft_wrap=True)
    console.print(f"  nnUNetv2_plan_and_preprocess -d {number} --verify_dataset_integrity")
    preset = f"Dataset{data_set.number:03d}_{data_set.name}"
    other = "" if target.name == preset else f" --dataset {target.name}"
    console.print(f"  nnunet-cpr study run {dataset}{other}", soft_wrap=True)
