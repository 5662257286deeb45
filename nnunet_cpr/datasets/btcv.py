"""Abdomen of BTCV (Beyond the Cranial Vault): CT, 13 organs."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from nnunet_cpr.datasets.archive import (
    Archive,
    Case,
    DataSet,
    case_identifier,
    find_folder,
    nifti_files,
)
from nnunet_cpr.datasets.volume import read_with_simpleitk
from nnunet_cpr.datasets.writing import write_cases

LABELS = {
    "background": 0,
    "spleen": 1,
    "right kidney": 2,
    "left kidney": 3,
    "gallbladder": 4,
    "esophagus": 5,
    "liver": 6,
    "stomach": 7,
    "aorta": 8,
    "inferior vena cava": 9,
    "portal and splenic veins": 10,
    "pancreas": 11,
    "right adrenal gland": 12,
    "left adrenal gland": 13,
}
CHALLENGE_CASES = 30  # training cases of the challenge


class BTCV(DataSet):
    """BTCV: ``Training/img/img0001.nii.gz``, ``Training/label/label0001.nii.gz``, ``Testing/img``."""

    number = 17
    name = "BTCV"

    def open(self, source: Path) -> Archive:
        training = find_folder(
            source,
            places=(".", "Training", "RawData/Training", "Abdomen/RawData/Training"),
            content=("img/img*.nii*", "label"),
            layout="RawData/Training with img/img0001.nii.gz, label/label0001.nii.gz and so on",
        )
        images, labels = _numbered(training / "img"), _numbered(training / "label")
        cases = [
            Case(
                name=f"img{number}",
                images=(images.get(number, training / "img" / f"img{number}.nii.gz"),),
                label=labels.get(number, training / "label" / f"label{number}.nii.gz"),
            )
            for number in sorted(images.keys() | labels.keys())
        ]
        unseen = _numbered(training.parent / "Testing" / "img")
        few = f"expected the {CHALLENGE_CASES} training cases of the challenge, found {len(cases)}"
        return Archive(
            folder=training,
            training=cases,
            unseen=[Case(f"img{number}", (path,)) for number, path in unseen.items()],
            channels=("CT",),
            labels=LABELS,
            read=read_with_simpleitk,
            remarks=() if len(cases) == CHALLENGE_CASES else (few,),
        )

    def write(self, archive: Archive, folder: Path, processes: int, console: Console) -> None:
        write_cases(
            archive,
            folder,
            processes,
            console,
            labels=LABELS,
            description="Abdomen of the challenge Beyond the Cranial Vault",
            reference="https://www.synapse.org/Synapse:syn3193805",
        )


def _numbered(folder: Path) -> dict[str, Path]:
    """Return the files of ``img`` or ``label`` by the digits in their names."""
    found = {}
    for path in nifti_files(folder):
        if match := re.fullmatch(rf"{folder.name}(\d+)", case_identifier(path)):
            found[match[1]] = path
    return found
