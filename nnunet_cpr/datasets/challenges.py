"""Challenges whose archives are converted, and the check of their dataset ids.

AMOS22, BraTS 2020, BTCV and tasks of the Medical Segmentation Decathlon. To add one, write a subclass of
:class:`~nnunet_cpr.datasets.archive.DataSet` here and add a line to :data:`DATA_SETS`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from nnunet_cpr.datasets.archive import AGAIN, Archive, Case, DataSet, find_folder, unpacked
from nnunet_cpr.datasets.raw import run_converter, write_cases
from nnunet_cpr.files import read_json
from nnunet_cpr.nnunet.commands import FOLDER_VARIABLES
from nnunet_cpr.refusals import Refusal

AMOS_LAST_CT = {"imagesTr": 410, "imagesVa": 409, "imagesTs": 500}
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
            raise Refusal(
                f"{folder}: found no labelsVa, so that it is the archive from before the end of the "
                "challenge",
                "download amos22.zip from https://zenodo.org/record/7262581",
            )
        archive = read_listed_cases(folder, {"training": "Tr", "validation": "Va", "test": "Ts"})
        return dataclasses.replace(archive, cases=[each for each in archive.cases if _is_ct(each)])

    def write(self, archive: Archive, folder: Path, processes: int) -> None:
        converter = "nnunetv2.dataset_conversion.Dataset218_Amos2022_task1"
        run_converter([sys.executable, "-m", converter, str(archive.folder)], folder)


def _is_ct(case: Case) -> bool:
    number = re.fullmatch(r"amos_(\d{4})", case.name)
    return number is None or int(number[1]) <= AMOS_LAST_CT[case.images[0].parent.name]


# nnU-Net's order and names.
BRATS_MODALITIES = {"t1": "T1", "t1ce": "T1ce", "t2": "T2", "flair": "Flair"}
# The archive has 1 for the necrotic and non-enhancing core, 2 for edema and 4 for the enhancing tumor.
# nnU-Net requires consecutive values, and regions in the order in which they overwrite each other. These
# are the values of its own converters for BraTS.
BRATS_TO_NNUNET = {0: 0, 2: 1, 1: 2, 4: 3}
BRATS_REGIONS = {
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
                tuple(_brats_file(path, kind, f"*_{kind}.nii*") for kind in BRATS_MODALITIES),
                # The segmentation of case 355 is called W39_1998.09.19_Segm.nii.
                _brats_file(path, "seg", "*_[Ss]eg*.nii*"),
            )
            for path in sorted(folder.glob("BraTS20_Training_*"))
            if path.is_dir()
        ]
        return Archive(folder, cases, BRATS_TO_NNUNET)

    def write(self, archive: Archive, folder: Path, processes: int) -> None:
        write_cases(
            archive,
            folder,
            processes,
            channels=[*BRATS_MODALITIES.values()],
            new_values=BRATS_TO_NNUNET,
            labels=dict(BRATS_REGIONS),
            regions_class_order=(1, 2, 3),
            reference="https://www.med.upenn.edu/cbica/brats2020/data.html",
        )


def _brats_file(folder: Path, ending: str, pattern: str) -> Path:
    """Return the first file of a pattern, without the hidden files of macOS (``._name``)."""
    return min(folder.glob(f"[!.]{pattern}"), default=folder / f"{folder.name}_{ending}.nii")


BTCV_LABELS = {
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
            for n in sorted(_btcv_numbers(images) | _btcv_numbers(labels))
        ]
        cases += [Case(f"img{n}", (test / f"img{n}.nii.gz",)) for n in sorted(_btcv_numbers(test))]
        return Archive(training.parent, cases, BTCV_LABELS.values())

    def write(self, archive: Archive, folder: Path, processes: int) -> None:
        write_cases(
            archive,
            folder,
            processes,
            channels=["CT"],
            new_values={value: value for value in BTCV_LABELS.values()},
            labels=dict(BTCV_LABELS),
            reference="https://www.synapse.org/Synapse:syn3193805",
        )


def _btcv_numbers(folder: Path) -> set[str]:
    """Return the digits in the names of the files of ``img`` or ``label``."""
    files = folder.glob(f"{folder.name}[0-9]*.nii.gz")
    return {path.name.removeprefix(folder.name).removesuffix(".nii.gz") for path in files}


class Decathlon(DataSet):
    """Decathlon: ``TaskXX_Name`` with ``dataset.json``, ``imagesTr``, ``labelsTr`` and ``imagesTs``.

    Args:
        task: name of the folder, such as ``Task02_Heart``, which gives the dataset id and name.
    """

    def __init__(self, task: str) -> None:
        self.task = task
        number, self.name = task.removeprefix("Task").split("_")
        self.number = int(number)

    def open(self, source: Path) -> Archive:
        folder = find_folder(source, "imagesTr")
        if folder.name != self.task:  # the converter parses it
            is_other = re.match("Task[0-9]{2}_", folder.name)
            advice = f"got {folder.name}" if is_other else "give its path or rename it"
            raise Refusal(f"{folder}: expected the folder {self.task}", f"{advice}")
        return read_listed_cases(folder, {"training": "Tr", "test": "Ts"})

    def write(self, archive: Archive, folder: Path, processes: int) -> None:
        converter = ["nnUNetv2_convert_MSD_dataset", "-i", str(archive.folder), "-np", str(processes)]
        run_converter(converter, folder)


def read_listed_cases(folder: Path, parts: dict[str, str]) -> Archive:
    """Return the cases that ``dataset.json`` lists.

    Args:
        folder: folder of the archive.
        parts: names of the lists, and the suffix of the folders ``images`` and ``labels`` of each;
            those of the test cases, ``Ts``, have no labels.

    Raises:
        Refusal: ``dataset.json`` is missing, damaged or incomplete, or the folders have other files
            than it lists.
    """
    path = folder / "dataset.json"
    try:
        document = read_json(path)
        cases = [
            _decathlon_case(entry, folder / f"images{suffix}", folder / f"labels{suffix}")
            for part, suffix in parts.items()
            for entry in document[part]
        ]
        archive = Archive(folder, cases, [int(value) for value in document["labels"]])
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Refusal(f"{path} is missing, damaged or incomplete ({reason})", f"{AGAIN}") from error
    images = [f"images{suffix}" for suffix in parts.values()]
    labels = [f"labels{suffix}" for suffix in parts.values() if suffix != "Ts"]
    _refuse_unlisted(archive, [*images, *labels])
    return archive


def _refuse_unlisted(archive: Archive, folders: Sequence[str]) -> None:
    """Raise if there are files that are not listed, which nnU-Net's converter would take unchecked.

    Files of missing cases are reported with those cases.
    """
    listed = {path for case in archive.cases for path in (*case.images, case.label) if path}
    # The converter ignores the same hidden files.
    found = {path for name in folders for path in (archive.folder / name).glob("[!._]*.nii*")}
    if any(path.with_name(f"{path.name}.gz") in listed for path in found - listed):
        raise Refusal(unpacked(archive.folder))
    if unlisted := sorted(str(path.relative_to(archive.folder)) for path in found - listed):
        names = ", ".join(unlisted[:3]) + (", ..." if unlisted[3:] else "")
        raise Refusal(
            f"{archive.folder}: expected the files that dataset.json lists, got {len(unlisted)} others "
            f"({names})",
            "move them away, or list them in dataset.json",
        )


def _decathlon_case(entry: str | dict[str, str], images: Path, labels: Path) -> Case:
    """Return the case of an entry, which is a path or ``{"image": path, ...}``."""
    path = Path(entry if isinstance(entry, str) else entry["image"])
    name = path.name.removesuffix(".nii.gz")
    label = None if labels.name == "labelsTs" else labels / f"{name}.nii.gz"
    return Case(name, (images / f"{name}.nii.gz",), label)


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
        Refusal: the id is in use.
    """
    prefix = target.name.partition("_")[0]
    folders = [Path(os.environ[name]) for name in FOLDER_VARIABLES if os.environ.get(name)]
    for existing in (path for folder in folders for path in sorted(folder.glob(f"{prefix}*"))):
        if existing == target or existing.name != target.name:
            raise Refusal(f"{existing} exists", "remove it or choose another id with --dataset-id")
