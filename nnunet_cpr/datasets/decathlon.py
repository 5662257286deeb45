"""Tasks of the Medical Segmentation Decathlon with one channel, converted by nnU-Net."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from nnunet_cpr.datasets.archive import (
    AGAIN,
    Archive,
    Case,
    DataSet,
    PrepareError,
    find_folder,
    unpacked,
)
from nnunet_cpr.datasets.writing import run_converter
from nnunet_cpr.files import read_json


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
            raise PrepareError(f"{folder}: expected the folder {self.task}; {advice}")
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
        PrepareError: ``dataset.json`` is missing, damaged or incomplete, or the folders have other files
            than it lists.
    """
    path = folder / "dataset.json"
    try:
        document = read_json(path)
        cases = [
            _case(entry, folder / f"images{suffix}", folder / f"labels{suffix}")
            for part, suffix in parts.items()
            for entry in document[part]
        ]
        archive = Archive(folder, cases, [int(value) for value in document["labels"]])
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PrepareError(f"{path} is missing, damaged or incomplete ({reason}); {AGAIN}") from error
    images = [f"images{suffix}" for suffix in parts.values()]
    _refuse_unlisted(
        archive, [*images, *(f"labels{suffix}" for suffix in parts.values() if suffix != "Ts")]
    )
    return archive


def _refuse_unlisted(archive: Archive, folders: Sequence[str]) -> None:
    """Raise if there are files that are not listed, which nnU-Net's converter would take unchecked.

    Files of missing cases are reported with those cases.
    """
    listed = {path for case in archive.cases for path in (*case.images, case.label) if path}
    # The converter ignores the same hidden files.
    found = {path for name in folders for path in (archive.folder / name).glob("[!._]*.nii*")}
    if any(path.with_name(f"{path.name}.gz") in listed for path in found - listed):
        raise PrepareError(unpacked(archive.folder))
    if unlisted := sorted(str(path.relative_to(archive.folder)) for path in found - listed):
        names = ", ".join(unlisted[:3]) + (", ..." if unlisted[3:] else "")
        raise PrepareError(
            f"{archive.folder}: expected the files that dataset.json lists, got {len(unlisted)} others "
            f"({names}); move them away, or list them in dataset.json"
        )


def _case(entry: str | dict[str, str], images: Path, labels: Path) -> Case:
    """Return the case of an entry, which is a path or ``{"image": path, ...}``."""
    path = Path(entry if isinstance(entry, str) else entry["image"])
    name = path.name.removesuffix(".nii.gz")
    label = None if labels.name == "labelsTs" else labels / f"{name}.nii.gz"
    return Case(name, (images / f"{name}.nii.gz",), label)
