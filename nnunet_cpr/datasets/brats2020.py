"""BraTS 2020: MRI of brain tumors in four modalities, with three nested regions."""

from __future__ import annotations

from pathlib import Path

from nnunet_cpr.datasets.archive import Archive, Case, DataSet, find_folder
from nnunet_cpr.datasets.writing import write_cases

MODALITIES = {"t1": "T1", "t1ce": "T1ce", "t2": "T2", "flair": "Flair"}  # nnU-Net's order and names
# The archive has 1 for the necrotic and non-enhancing core, 2 for edema and 4 for the enhancing tumor.
# nnU-Net requires consecutive values, and regions in the order in which they overwrite each other. These
# are the values of its own converters for BraTS.
TO_NNUNET = {0: 0, 2: 1, 1: 2, 4: 3}
REGIONS = {
    "background": 0,
    "whole tumor": (1, 2, 3),
    "tumor core": (2, 3),
    "enhancing tumor": (3,),
}


class BraTS2020(DataSet):
    """BraTS 2020 with ``BraTS20_Training_001/BraTS20_Training_001_{t1,t1ce,t2,flair,seg}.nii``."""

    number = 82
    name = "BraTS2020"

    def open(self, source: Path) -> Archive:
        folder = find_folder(source, "BraTS20_Training_*/*.nii*")
        cases = [
            Case(
                path.name,
                tuple(_file(path, modality, f"*_{modality}.nii*") for modality in MODALITIES),
                # The segmentation of case 355 is called W39_1998.09.19_Segm.nii.
                _file(path, "seg", "*_[Ss]eg*.nii*"),
            )
            for path in sorted(folder.glob("BraTS20_Training_*"))
            if path.is_dir()
        ]
        return Archive(folder, cases, TO_NNUNET)

    def write(self, archive: Archive, folder: Path, processes: int) -> None:
        write_cases(
            archive,
            folder,
            processes,
            channels=[*MODALITIES.values()],
            new_values=TO_NNUNET,
            labels=dict(REGIONS),
            regions_class_order=(1, 2, 3),
            reference="https://www.med.upenn.edu/cbica/brats2020/data.html",
        )


def _file(folder: Path, ending: str, pattern: str) -> Path:
    """Return the first file of a pattern, without the hidden files of macOS (``._name``)."""
    return min(folder.glob(f"[!.]{pattern}"), default=folder / f"{folder.name}_{ending}.nii")
