"""AMOS22, task 1: CT, 15 organs, converted by nnU-Net."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from nnunet_cpr.datasets.archive import AGAIN, Archive, Case, DataSet, PrepareError, find_folder
from nnunet_cpr.datasets.description import ENDING, read_description
from nnunet_cpr.datasets.volume import read_with_nibabel
from nnunet_cpr.datasets.writing import convert_with_nnunet

# Lists of dataset.json with the suffix of their folders and the last case number that nnU-Net's
# converter takes for CT. Cases of MRI have higher numbers.
PARTS = {"training": ("Tr", 410), "validation": ("Va", 409), "test": ("Ts", 500)}


class AMOS22(DataSet):
    """AMOS22: ``dataset.json``, ``imagesTr``, ``labelsTr``, ``imagesVa``, ``labelsVa``, ``imagesTs``.

    nnU-Net's converter uses the validation cases for training, so the archive must be the one published
    after the challenge, which has their labels. Cases of MRI are ignored.
    """

    number = 218
    name = "AMOS2022_postChallenge_task1"

    def open(self, source: Path) -> Archive:
        parts = ("dataset.json", "imagesTr", "labelsTr", "imagesVa", "labelsVa", "imagesTs")
        folder = find_folder(source, (".", "amos22"), parts, f"amos22 with {', '.join(parts)}")
        description = read_description(folder, tuple(PARTS))
        cases: dict[str, list[Case]] = {}
        for part, (ending, last) in PARTS.items():
            cases[part] = [
                Case(
                    name=name,
                    images=(folder / f"images{ending}" / f"{name}{ENDING}",),
                    label=None if part == "test" else folder / f"labels{ending}" / f"{name}{ENDING}",
                )
                for name in description.lists[part]
                if _number(name, folder) <= last
            ]
        return Archive(
            folder=folder,
            training=cases["training"] + cases["validation"],
            unseen=cases["test"],
            channels=("CT",),
            labels=description.labels,
            read=read_with_nibabel,  # the reader that the converter writes to dataset.json
        )

    def write(self, archive: Archive, folder: Path, processes: int, console: Console) -> None:
        convert_with_nnunet(
            "nnunetv2.dataset_conversion.Dataset218_Amos2022_task1",
            "convert_amos_task1",
            {"amos_base_dir": str(archive.folder)},
            archive,
            folder,
            console,
        )


def _number(name: str, folder: Path) -> int:
    digits = name.rpartition("_")[2]
    if not digits.isdecimal() or len(digits) > 9:
        raise PrepareError(
            f"{folder / 'dataset.json'}: expected a name such as amos_0001, got {name!r}; {AGAIN}"
        )
    return int(digits)
