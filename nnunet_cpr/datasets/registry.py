"""The data sets that can be prepared, and how one is."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from nnunet_cpr._files import add_path_to_os_errors, atomic_directory
from nnunet_cpr.datasets.amos22 import AMOS22
from nnunet_cpr.datasets.archive import DataSet, PrepareError, check
from nnunet_cpr.datasets.brats2020 import BraTS2020
from nnunet_cpr.datasets.btcv import BTCV
from nnunet_cpr.datasets.decathlon import Decathlon
from nnunet_cpr.datasets.writing import verify

DATA_SETS: dict[str, DataSet] = {  # by the name of the study's preset
    "btcv": BTCV(),
    "heart": Decathlon("Task02_Heart"),
    "brats2020": BraTS2020(),
    "amos22": AMOS22(),
    "hippocampus": Decathlon("Task04_Hippocampus"),
}


def prepare(data_set: DataSet, source: Path, target: Path, processes: int, console: Console) -> None:
    """Check an archive, write it, let nnU-Net check it, and only then put it into its place.

    Args:
        data_set: one of :data:`DATA_SETS`.
        source: the archive's folder.
        target: ``DatasetXXX_Name`` in ``nnUNet_raw``; must not be there.
        processes: how many files to read at the same time.
        console: for remarks and progress bars.

    Raises:
        PrepareError: something is in the way or, as ``BadCases``, wrong in the archive.
        CommandFailed: nnU-Net's converter or its check failed.
        OSError: something cannot be written.
    """
    refuse_taken(target)
    archive = data_set.open(source)
    for remark in archive.remarks:
        console.print(f"note: {remark}", markup=False, soft_wrap=True)
    check(archive, processes, console)
    with add_path_to_os_errors(target), atomic_directory(target) as folder:
        data_set.write(archive, folder, processes, console)
        verify(folder, processes, console)


def refuse_taken(target: Path) -> None:
    """Refuse a number that nnU-Net has another data set for.

    nnU-Net finds data sets by their number in all of its folders, and gives up when it finds two names.
    The same name in the folders of preprocessed data and of results is no obstacle.

    Raises:
        PrepareError: it is taken.
    """
    prefix = target.name.partition("_")[0]
    for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        folder = target.parent if variable == "nnUNet_raw" else os.environ.get(variable)
        for taken in sorted(Path(folder).glob(f"{prefix}*")) if folder else ():
            if variable == "nnUNet_raw" or taken.name != target.name:
                raise PrepareError(
                    f"{taken} is there already; remove it or choose another number with --dataset-id"
                )
