"""Abdomen of BTCV (Beyond the Cranial Vault): CT, 13 organs."""

from __future__ import annotations

from pathlib import Path

from nnunet_cpr.datasets.archive import Archive, Case, DataSet, find_folder
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


class BTCV(DataSet):
    """BTCV: ``Training/img/img0001.nii.gz``, ``Training/label/label0001.nii.gz``, ``Testing/img``."""

    number = 17
    name = "BTCV"

    def open(self, source: Path) -> Archive:
        training = find_folder(source, "label/label*.nii.gz")
        images, labels, test = training / "img", training / "label", training.parent / "Testing" / "img"
        cases = [
            Case(f"img{n}", (images / f"img{n}.nii.gz",), labels / f"label{n}.nii.gz")
            for n in sorted(_numbers(images) | _numbers(labels))
        ]
        cases += [Case(f"img{n}", (test / f"img{n}.nii.gz",)) for n in sorted(_numbers(test))]
        return Archive(training.parent, cases, LABELS.values())

    def write(self, archive: Archive, folder: Path, processes: int) -> None:
        write_cases(
            archive,
            folder,
            processes,
            channels=["CT"],
            new_values={value: value for value in LABELS.values()},
            labels=dict(LABELS),
            reference="https://www.synapse.org/Synapse:syn3193805",
        )


def _numbers(folder: Path) -> set[str]:
    """Return the digits in the names of the files of ``img`` or ``label``."""
    files = folder.glob(f"{folder.name}[0-9]*.nii.gz")
    return {path.name.removeprefix(folder.name).removesuffix(".nii.gz") for path in files}
