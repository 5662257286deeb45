"""The tasks of the Medical Segmentation Decathlon, through nnU-Net's own converter."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from nnunet_cpr.datasets.archive import (
    AGAIN,
    Archive,
    Case,
    DataSet,
    PrepareError,
    find_folder,
)
from nnunet_cpr.datasets.description import ENDING, read_description
from nnunet_cpr.datasets.volume import read_with_simpleitk
from nnunet_cpr.datasets.writing import convert


class Decathlon(DataSet):
    """``TaskXX_Name`` with ``dataset.json``, ``imagesTr``, ``labelsTr`` and ``imagesTs``.

    Args:
        task: the folder's name, such as ``Task02_Heart``; nnU-Net's id and name are taken from it.
    """

    def __init__(self, task: str) -> None:
        self.task = task
        number, self.name = task.removeprefix("Task").split("_")
        self.number = int(number)

    def open(self, source: Path) -> Archive:
        parts = ("dataset.json", "imagesTr", "labelsTr", "imagesTs")
        layout = f"{self.task} with {', '.join(parts)}"
        folder = find_folder(source, (".", self.task), parts, layout)
        if folder.name != self.task:  # the converter reads it
            raise PrepareError(f"expected a folder of the name {self.task}, found {folder}; rename it")
        description = read_description(folder, ("training", "test"))
        if not description.channels:
            raise PrepareError(f"{folder / 'dataset.json'} has no entry 'modality'; {AGAIN}")
        # The converter takes the files that are in the folders, whatever dataset.json lists.
        listed = set(description.lists["training"])
        there = _names(folder / "imagesTr") | _names(folder / "labelsTr")
        unseen = set(description.lists["test"]) | _names(folder / "imagesTs")
        problems = [
            f"{name}: it is not in the list of dataset.json; remove its files or take dataset.json "
            "from the archive again"
            for name in sorted(there - listed)
        ]
        if description.training_cases != len(listed):
            problems.append(
                f"dataset.json: it lists {len(listed)} training cases and says that there are "
                f"{description.training_cases}; {AGAIN}"
            )
        return Archive(
            folder=folder,
            training=[
                Case(
                    name,
                    (folder / "imagesTr" / f"{name}{ENDING}",),
                    folder / "labelsTr" / f"{name}{ENDING}",
                )
                for name in sorted(there | listed)
            ],
            unseen=[Case(name, (folder / "imagesTs" / f"{name}{ENDING}",)) for name in sorted(unseen)],
            channels=description.channels,
            labels=description.labels,
            read=read_with_simpleitk,
            problems=problems,
        )

    def write(self, archive: Archive, folder: Path, processes: int, console: Console) -> None:
        convert(
            "nnunetv2.dataset_conversion.convert_MSD_dataset",
            "convert_msd_dataset",
            {"source_folder": str(archive.folder), "num_processes": processes},
            archive,
            folder,
            console,
        )


def _names(folder: Path) -> set[str]:
    """What the converter takes: no other ending, nothing that macOS leaves beside files (``._name``)."""
    return {
        path.name.removesuffix(ENDING)
        for path in folder.glob(f"*{ENDING}")
        if not path.name.startswith((".", "_"))
    }
