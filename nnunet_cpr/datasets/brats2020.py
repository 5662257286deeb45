"""BraTS 2020: MRI of brain tumors in four modalities, with three nested regions."""

from __future__ import annotations

import re
from collections.abc import Sequence
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

MODALITIES = {"t1": "T1", "t1ce": "T1ce", "t2": "T2", "flair": "Flair"}  # nnU-Net's order and names
LABELS = {"background": 0, "necrotic and non-enhancing core": 1, "edema": 2, "enhancing tumor": 4}
# nnU-Net requires consecutive values, and regions in the order in which they overwrite each other. These
# are the values of its own converters for BraTS.
TO_NNUNET = {0: 0, 2: 1, 1: 2, 4: 3}
REGIONS: dict[str, int | Sequence[int]] = {
    "background": 0,
    "whole tumor": (1, 2, 3),
    "tumor core": (2, 3),
    "enhancing tumor": (3,),
}
REGIONS_CLASS_ORDER = (1, 2, 3)
CHALLENGE_CASES = 369  # training cases of the challenge


class BraTS2020(DataSet):
    """BraTS 2020 with ``BraTS20_Training_001/BraTS20_Training_001_{t1,t1ce,t2,flair,seg}.nii``."""

    number = 82
    name = "BraTS2020"

    def open(self, source: Path) -> Archive:
        folder = find_folder(
            source,
            places=(
                ".",
                "MICCAI_BraTS2020_TrainingData",
                "BraTS2020_TrainingData/MICCAI_BraTS2020_TrainingData",
            ),
            content=("BraTS20_Training_*/",),
            layout="the folders BraTS20_Training_001 and so on",
        )
        remarks = []
        cases = []
        for path in sorted(folder.iterdir()):
            if path.is_dir() and re.fullmatch(r"BraTS20_Training_\d+", path.name):
                case, remark = _case(path)
                cases.append(case)
                remarks += remark
        if len(cases) != CHALLENGE_CASES:
            remarks.append(
                f"expected the {CHALLENGE_CASES} training cases of the challenge, found {len(cases)}"
            )
        return Archive(
            folder=folder,
            training=cases,
            unseen=(),
            channels=tuple(MODALITIES.values()),
            labels=LABELS,
            read=read_with_simpleitk,
            remarks=remarks,
        )

    def write(self, archive: Archive, folder: Path, processes: int, console: Console) -> None:
        write_cases(
            archive,
            folder,
            processes,
            console,
            labels=REGIONS,
            new_values=TO_NNUNET,
            regions_class_order=REGIONS_CLASS_ORDER,
            description="Training data of the Multimodal Brain Tumor Segmentation Challenge 2020",
            reference="https://www.med.upenn.edu/cbica/brats2020/data.html",
        )


def _case(folder: Path) -> tuple[Case, list[str]]:
    """Return the case in a folder, and remarks about it."""
    files = {case_identifier(path): path for path in nifti_files(folder)}
    expected = {what: f"{folder.name}_{what}" for what in (*MODALITIES, "seg")}
    found = {what: files.pop(name, folder / f"{name}.nii.gz") for what, name in expected.items()}
    remarks = []
    # The segmentation of case 355 has the name of another collection.
    if not found["seg"].is_file() and len(files) == 1:
        ((name, path),) = files.items()
        if "seg" in name.lower():
            found["seg"] = path
            remarks.append(f"{folder.name}: using {path.name} as {expected['seg']}")
    images = tuple(found[modality] for modality in MODALITIES)
    return Case(folder.name, images, found["seg"]), remarks
