"""Registry of the data sets, and their preparation."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from nnunet_cpr._files import add_path_to_os_errors, atomic_directory
from nnunet_cpr.datasets.amos22 import AMOS22
from nnunet_cpr.datasets.archive import DataSet, PrepareError, check_cases
from nnunet_cpr.datasets.brats2020 import BraTS2020
from nnunet_cpr.datasets.btcv import BTCV
from nnunet_cpr.datasets.decathlon import Decathlon
from nnunet_cpr.datasets.writing import verify_data_set
from nnunet_cpr.nnunet.commands import FOLDER_VARIABLES

DATA_SETS: dict[str, DataSet] = {  # the study presets have the same names
    "btcv": BTCV(),
    "heart": Decathlon("Task02_Heart"),
    "brats2020": BraTS2020(),
    "amos22": AMOS22(),
    "hippocampus": Decathlon("Task04_Hippocampus"),
}


def prepare_data_set(
    data_set: DataSet, source: Path, target: Path, processes: int, console: Console
) -> None:
    """Convert an archive to a data set of nnU-Net.

    The archive is checked before, and the data set by nnU-Net afterwards; only a correct one is moved to
    its target.

    Args:
        data_set: one of :data:`DATA_SETS`.
        source: folder of the archive.
        target: new folder ``DatasetXXX_Name`` in ``nnUNet_raw``.
        processes: number of parallel processes or threads.
        console: for remarks and progress bars.

    Raises:
        PrepareError: the dataset id is in use, or the archive is invalid.
        CommandFailed: nnU-Net's converter or its integrity check failed.
        OSError: a file cannot be written.
    """
    refuse_used_id(target)
    archive = data_set.open(source)
    for remark in archive.remarks:
        console.print(f"note: {remark}", markup=False, soft_wrap=True)
    check_cases(archive, processes, console)
    with add_path_to_os_errors(target), atomic_directory(target) as folder:
        data_set.write(archive, folder, processes, console)
        verify_data_set(folder, processes, console)


def refuse_used_id(target: Path) -> None:
    """Raise if another data set of nnU-Net has the same id.

    nnU-Net searches for ids in all of its folders and fails if it finds two names. The same name in the
    folders of preprocessed data and of results is accepted.

    Raises:
        PrepareError: the id is in use.
    """
    prefix = target.name.partition("_")[0]
    for variable in FOLDER_VARIABLES:
        folder = target.parent if variable == "nnUNet_raw" else os.environ.get(variable)
        for existing in sorted(Path(folder).glob(f"{prefix}*")) if folder else ():
            if variable == "nnUNet_raw" or existing.name != target.name:
                raise PrepareError(
                    f"{existing} exists; remove it or choose another id with --dataset-id"
                )
