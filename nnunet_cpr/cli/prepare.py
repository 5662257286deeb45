"""``nnunet-cpr prepare``: convert a challenge archive to nnU-Net's raw format."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

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
    """Check the files of a challenge archive and convert it to a data set in nnUNet_raw."""
    from nnunet_cpr._files import add_path_to_os_errors, atomic_directory
    from nnunet_cpr.datasets.archive import PrepareError
    from nnunet_cpr.datasets.checks import find_problems
    from nnunet_cpr.datasets.registry import DATA_SETS, refuse_used_id
    from nnunet_cpr.nnunet.commands import CommandFailed

    if dataset not in DATA_SETS:
        stop(f"unknown data set {dataset!r}; choose from {', '.join(DATA_SETS)}")
    if name is not None and not re.fullmatch(r"\w[\w-]*", name):
        stop(f"--name: expected letters, digits, '_' and '-', got {name!r}")
    data_set = DATA_SETS[dataset]
    number = dataset_id or data_set.number
    expected = (studies.StudyError, PrepareError, CommandFailed, OSError)
    with report_errors(*expected, interrupted="interrupted; nothing was written"):
        raw = Path(studies.nnunet_folders(os.environ, ["nnUNet_raw"])["nnUNet_raw"])
        if not raw.is_dir():
            stop(f"nnUNet_raw: {raw} does not exist; run: mkdir -p {shlex.quote(str(raw))}")
        target = raw / f"Dataset{number:03d}_{name or data_set.name}"
        refuse_used_id(target)
        archive = data_set.open(source)
        problems = find_problems(archive, processes)
        for problem in problems:
            print(problem, file=sys.stderr)
        if problems:
            stop(f"{archive.folder}: invalid cases: {len(problems)}, see above; nothing was written")
        with add_path_to_os_errors(target), atomic_directory(target) as folder:
            data_set.write(archive, folder, processes)
    print(f"{target}: {len(archive.cases)} cases. Next:")
    print(f"  nnUNetv2_plan_and_preprocess -d {number} --verify_dataset_integrity")
    print(f"  nnunet-cpr study run {dataset} --dataset {target.name}")
