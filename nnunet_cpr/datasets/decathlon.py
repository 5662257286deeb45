"""Tasks of the Medical Segmentation Decathlon, converted by nnU-Net."""

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
from nnunet_cpr.datasets.writing import convert_with_nnunet


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
        parts = ("dataset.json", "imagesTr", "labelsTr", "imagesTs")
        layout = f"{self.task} with {', '.join(parts)}"
        folder = find_folder(source, (".", self.task), parts, layout)
        if folder.name != self.task:  # the converter parses it
            raise PrepareError(f"{folder}: expected the name {self.task}; rename it")
        description = read_description(folder, ("training", "test"))
        if not description.channels:
            raise PrepareError(f"{folder / 'dataset.json'} has no entry 'modality'; {AGAIN}")
        # The converter takes all files in the folders, even those that dataset.json does not list.
        listed = set(description.lists["training"])
        existing = _names(folder / "imagesTr") | _names(folder / "labelsTr")
        unseen = set(description.lists["test"]) | _names(folder / "imagesTs")
        problems = [
            f"{name}: not listed in dataset.json; remove its files or extract dataset.json from the "
            "archive again"
            for name in sorted(existing - listed)
        ]
        if description.training_cases != len(listed):
            problems.append(
                f"dataset.json: expected numTraining {len(listed)}, the length of its list, got "
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
                for name in sorted(existing | listed)
            ],
            unseen=[Case(name, (folder / "imagesTs" / f"{name}{ENDING}",)) for name in sorted(unseen)],
            channels=description.channels,
            labels=description.labels,
            read=read_with_simpleitk,
            problems=problems,
        )

    def write(self, archive: Archive, folder: Path, processes: int, console: Console) -> None:
        convert_with_nnunet(
            "nnunetv2.dataset_conversion.convert_MSD_dataset",
            "convert_msd_dataset",
            {"source_folder": str(archive.folder), "num_processes": processes},
            archive,
            folder,
            console,
        )


def _names(folder: Path) -> set[str]:
    """Return the names of the files that the converter takes, without metadata of macOS (``._name``)."""
    return {
        path.name.removesuffix(ENDING)
        for path in folder.glob(f"*{ENDING}")
        if not path.name.startswith((".", "_"))
    }
