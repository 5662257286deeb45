"""Cases of a challenge archive, and their check before anything is written."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nnunet_cpr.datasets.volume import Reader, Unreadable, Volume, geometry_differences

AGAIN = "extract it from the archive again"


class PrepareError(ValueError):
    """Data set that cannot be prepared; the message is one line."""


class InvalidCases(PrepareError):
    """Cases of an archive that failed the check.

    Attributes:
        lines: one line for each problem, with the case and the remedy.
    """

    def __init__(self, message: str, lines: Sequence[str]) -> None:
        super().__init__(message)
        self.lines = lines


@dataclass(frozen=True)
class Case:
    """Expected files of one case; :func:`check_cases` checks that they exist.

    Attributes:
        name: nnU-Net's case identifier.
        images: one file for each channel, or one with all channels in the fourth dimension.
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
        training: cases with labels.
        unseen: cases without labels.
        channels: names of the channels in nnU-Net's order.
        labels: value of each label in the archive's files, including the background.
        read: reader of one file, with the library that nnU-Net will use for the data set.
        problems: problems found without opening an image, as lines of :class:`InvalidCases`.
        remarks: notes for the user that are not problems.
    """

    folder: Path
    training: Sequence[Case]
    unseen: Sequence[Case]
    channels: Sequence[str]
    labels: Mapping[str, int]
    read: Reader
    problems: Sequence[str] = ()
    remarks: Sequence[str] = ()

    @property
    def cases(self) -> list[Case]:
        """Cases with and without labels."""
        return [*self.training, *self.unseen]


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
    def write(self, archive: Archive, folder: Path, processes: int, console: Console) -> None:
        """Write a checked archive in nnU-Net's raw format.

        Args:
            archive: result of :meth:`open`.
            folder: new folder ``DatasetXXX_Name`` in an otherwise empty folder.
            processes: number of parallel processes or threads.
            console: for a progress bar.
        """


def check_cases(archive: Archive, threads: int, console: Console) -> None:
    """Check every image and label of an archive, up to the last voxel.

    Raises:
        PrepareError: the archive has no training case.
        InvalidCases: with all problems of all cases.
    """
    if not archive.training:
        raise PrepareError(f"{archive.folder}: found no training case; extract the archive again")
    cases = archive.cases
    found = map_in_threads(lambda case: _check_case(case, archive), cases, threads, "checking", console)
    lines = [
        *archive.problems,
        *(f"{case.name}: {problem}" for case, problems in zip(cases, found) for problem in problems),
    ]
    if lines:
        problems = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        raise InvalidCases(f"{archive.folder}: {problems}, see above; nothing was written", lines)


def find_folder(source: Path, places: Iterable[str], content: Sequence[str], layout: str) -> Path:
    """Return the first folder that has the contents of the archive.

    Args:
        source: folder given by the user.
        places: candidates relative to it.
        content: glob patterns of required files and folders.
        layout: description of the expected layout for the error message.

    Raises:
        PrepareError: no candidate has them.
    """
    source = Path(os.path.abspath(source))  # has a name even for "."; links are not resolved
    if not source.is_dir():
        found = "a file" if source.exists() else "nothing"
        raise PrepareError(f"{source}: expected the folder of the extracted archive, found {found}")
    for place in places:
        folder = source / place
        if all(any(folder.glob(pattern)) for pattern in content):
            return folder
    names = sorted(path.name for path in source.iterdir())
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    raise PrepareError(f"{source}: expected {layout}, found {shown or 'nothing'}")


def nifti_files(folder: Path) -> list[Path]:
    """Return the NIfTI files of a folder, without the metadata files of macOS (``._name``)."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.endswith((".nii", ".nii.gz")) and not path.name.startswith((".", "_"))
    )


def case_identifier(path: Path) -> str:
    """Return a file name without ``.nii`` or ``.nii.gz``.

    Example:
        >>> case_identifier(Path("img0001.nii.gz"))
        'img0001'
    """
    return path.name.removesuffix(".gz").removesuffix(".nii")


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def map_in_threads(
    function: Callable[[_Item], _Result],
    items: Sequence[_Item],
    threads: int,
    title: str,
    console: Console,
) -> list[_Result]:
    """Return the results of a function in the order of the items, with a progress bar.

    Threads suffice, since decompression, SimpleITK and NumPy release the GIL.
    """
    with ThreadPoolExecutor(threads) as pool, progress_bar(console) as progress:
        bar = progress.add_task(title, total=len(items))
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
                progress.advance(bar)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def progress_bar(console: Console) -> Progress:
    """Return a progress bar with counts."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _check_case(case: Case, archive: Archive) -> list[str]:
    """Return the problems of a case, each with its remedy."""
    problems: list[str] = []

    def read(path: Path, kind: str, volumes: int) -> Volume | None:
        subject = f"{kind} {os.path.relpath(path, archive.folder)}"
        if not path.is_file():
            problems.append(f"{subject} is missing; {AGAIN}")
            return None
        try:
            volume = archive.read(path)
        except Unreadable as error:
            problems.append(f"{subject} cannot be read ({error}); {AGAIN}")
            return None
        if volume.volumes != volumes:
            problems.append(f"{subject}: expected {volumes} volumes, got {volume.volumes}; {AGAIN}")
            return None
        if kind == "image":
            if volume.voxels.dtype.kind == "f" and not np.isfinite(volume.voxels).all():
                problems.append(f"{subject} has NaN or infinite voxels; {AGAIN}")
        elif unknown := _unknown_values(volume.voxels, archive.labels.values()):
            allowed = ", ".join(map(str, sorted(archive.labels.values())))
            problems.append(f"{subject}: expected values of {allowed}, got {unknown}; {AGAIN}")
        return volume

    volumes = len(archive.channels) // len(case.images)
    read_files = [(path, read(path, "image", volumes)) for path in case.images]
    if case.label is not None:
        read_files.append((case.label, read(case.label, "label", 1)))
    complete = [(path, volume) for path, volume in read_files if volume is not None]
    for path, volume in complete[1:]:
        first, reference = complete[0]
        if different := geometry_differences(reference, volume):
            where, other = (os.path.relpath(p, archive.folder) for p in (path, first))
            problems.append(
                f"{where}: expected the geometry of {other}, got {' and '.join(different)}; extract "
                "both from the archive again or correct the wrong header"
            )
    return problems


def _unknown_values(voxels: np.ndarray, allowed: Iterable[int]) -> str:
    """Return the first values that are not allowed, as text."""
    values = set(allowed)
    found = [value for value in np.sort(pd.unique(voxels.ravel())) if value not in values]
    shown = ", ".join(str(value).removesuffix(".0") for value in found[:5])  # shortest unique digits
    return shown + (" and more" if len(found) > 5 else "")
