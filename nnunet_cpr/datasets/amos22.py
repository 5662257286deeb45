"""AMOS22, task 1: CT, 15 organs, through nnU-Net's own converter."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from nnunet_cpr.datasets.archive import AGAIN, Archive, Case, DataSet, PrepareError, find_folder
from nnunet_cpr.datasets.description import ENDING, read_description
from nnunet_cpr.datasets.volume import read_with_nibabel
from nnunet_cpr.datasets.writing import convert

# The lists of dataset.json, their folders' endings, and the last case of each that the converter takes
# for CT: MRI has higher numbers.
PARTS = {"training": ("Tr", 410), "validation": ("Va", 409), "test": ("Ts", 500)}


class AMOS22(DataSet):
    """``dataset.json``, ``imagesTr``, ``labelsTr``, ``imagesVa``, ``labelsVa`` and ``imagesTs``.

    It must be the archive from after the challenge, which has the validation cases' labels: nnU-Net's
    converter makes them training cases. MRI is left alone, as it is there.
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
            read=read_with_nibabel,  # as nnU-Net will: the converter says so in its dataset.json
        )

    def write(self, archive: Archive, folder: Path, processes: int, console: Console) -> None:
        convert(
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
            f"{folder / 'dataset.json'} lists {name!r}, which is no name such as amos_0001; {AGAIN}"
        )
    return int(digits)
