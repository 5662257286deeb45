"""AMOS22, task 1: CT, 15 organs, converted by nnU-Net."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

from nnunet_cpr.datasets.archive import Archive, Case, DataSet, PrepareError, find_folder
from nnunet_cpr.datasets.decathlon import read_listed_cases
from nnunet_cpr.datasets.writing import run_converter

LAST_CT = {"imagesTr": 410, "imagesVa": 409, "imagesTs": 500}
"""Last case number of CT in each folder; nnU-Net's converter leaves out the cases of MRI after it."""


class AMOS22(DataSet):
    """AMOS22: ``dataset.json``, ``imagesTr``, ``labelsTr``, ``imagesVa``, ``labelsVa``, ``imagesTs``.

    nnU-Net's converter uses the validation cases for training, so the archive must be the one published
    after the challenge, which has their labels. Cases of MRI are ignored.
    """

    number = 218
    name = "AMOS2022_postChallenge_task1"

    def open(self, source: Path) -> Archive:
        folder = find_folder(source, "imagesVa")
        if not (folder / "labelsVa").is_dir():
            raise PrepareError(
                f"{folder}: found no labelsVa, so that it is the archive from before the end of the "
                "challenge; download amos22.zip from https://zenodo.org/record/7262581"
            )
        archive = read_listed_cases(folder, {"training": "Tr", "validation": "Va", "test": "Ts"})
        return dataclasses.replace(archive, cases=[each for each in archive.cases if _is_ct(each)])

    def write(self, archive: Archive, folder: Path, processes: int) -> None:
        converter = "nnunetv2.dataset_conversion.Dataset218_Amos2022_task1"
        run_converter([sys.executable, "-m", converter, str(archive.folder)], folder)


def _is_ct(case: Case) -> bool:
    number = re.fullmatch(r"amos_(\d{4})", case.name)
    return number is None or int(number[1]) <= LAST_CT[case.images[0].parent.name]
