"""Registry of the data sets, and the check of their dataset ids."""

from __future__ import annotations

import os
from pathlib import Path

from nnunet_cpr.datasets.amos22 import AMOS22
from nnunet_cpr.datasets.archive import DataSet, PrepareError
from nnunet_cpr.datasets.brats2020 import BraTS2020
from nnunet_cpr.datasets.btcv import BTCV
from nnunet_cpr.datasets.decathlon import Decathlon
from nnunet_cpr.nnunet.commands import FOLDER_VARIABLES

DATA_SETS: dict[str, DataSet] = {  # the study presets have the same names
    "btcv": BTCV(),
    "heart": Decathlon("Task02_Heart"),
    "brats2020": BraTS2020(),
    "amos22": AMOS22(),
    "hippocampus": Decathlon("Task04_Hippocampus"),
}


def refuse_used_id(target: Path) -> None:
    """Raise if another data set of nnU-Net has the same id.

    nnU-Net searches for ids in all of its folders and fails if it finds two names. The same name in the
    folders of preprocessed data and of results is accepted.

    Args:
        target: new folder ``DatasetXXX_Name`` in ``nnUNet_raw``.

    Raises:
        PrepareError: the id is in use.
    """
    prefix = target.name.partition("_")[0]
    folders = [Path(os.environ[name]) for name in FOLDER_VARIABLES if os.environ.get(name)]
    for existing in (path for folder in folders for path in sorted(folder.glob(f"{prefix}*"))):
        if existing == target or existing.name != target.name:
            raise PrepareError(f"{existing} exists; remove it or choose another id with --dataset-id")
