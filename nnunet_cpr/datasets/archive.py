"""Contents of a challenge archive, and the base class of the data sets."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

AGAIN = "extract it from the archive again"


class PrepareError(ValueError):
    """Data set that cannot be prepared; the message is one line."""


@dataclass(frozen=True)
class Case:
    """Expected files of one case, which need not exist.

    Attributes:
        name: nnU-Net's case identifier.
        images: one file for each channel; a DICOM image is a folder.
        label: segmentation, None for a test case.
    """

    name: str
    images: tuple[Path, ...]
    label: Path | None = None


@dataclass(frozen=True)
class Archive:
    """Contents of an archive.

    Attributes:
        folder: root of its files.
        cases: training and test cases.
        label_values: values in the archive's segmentations, including the background.
        advice: what to do with a file that is missing or damaged.
    """

    folder: Path
    cases: Sequence[Case]
    label_values: Collection[int]
    advice: str = AGAIN


class DataSet(ABC):
    """Base class of the data sets: layout of the archive and conversion to nnU-Net's raw format.

    Attributes:
        number: default dataset id of nnU-Net.
        name: default dataset name of nnU-Net, without ``DatasetXXX_``.
    """

    number: int
    name: str

    @abstractmethod
    def open(self, source: Path) -> Archive:
        """List the archive's cases.

        Raises:
            PrepareError: the folder does not have the layout of this archive.
        """

    @abstractmethod
    def write(self, archive: Archive, folder: Path, processes: int) -> None:
        """Write a checked archive in nnU-Net's raw format.

        Args:
            archive: result of :meth:`open`.
            folder: new folder ``DatasetXXX_Name`` in an otherwise empty folder.
            processes: number of parallel processes or threads.

        Raises:
            CommandFailed: nnU-Net's converter failed.
            OSError: a file cannot be written.
        """


def find_folder(source: Path, content: str) -> Path:
    """Return the folder of an archive: the source, or the first one at most three levels below it.

    Args:
        source: folder given by the user.
        content: glob pattern of a file or folder that the archive has.

    Raises:
        PrepareError: no folder has it.
    """
    for depth in range(4):
        if found := sorted(source.absolute().glob("*/" * depth + content)):
            return found[0].parents[content.count("/")]
    if content.endswith(".nii.gz") and any(source.rglob(content.removesuffix(".gz"))):
        raise PrepareError(unpacked(source))
    raise PrepareError(f"{source}: found no {content} in it; give the folder of the extracted archive")


def unpacked(folder: Path) -> str:
    """Return the message about an archive whose files have lost their compression."""
    got = "got .nii, as Kaggle and browsers unpack them"
    command = f"find {shlex.quote(str(folder))} -name '*.nii' -exec gzip {{}} +"
    return f"{folder}: expected .nii.gz files, {got}; run: {command}"


def map_cases(function: Callable[[Case], Any], archive: Archive, threads: int, title: str) -> list[Any]:
    """Return the results of a function for each case, with a progress bar.

    Threads suffice, since compression and NumPy release the GIL.
    """
    with ThreadPoolExecutor(threads) as pool:
        results = pool.map(function, archive.cases)
        return list(track(results, title, total=len(archive.cases)))
