"""A challenge's archive as a list of cases, and the check of all of them before anything is written."""

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

from nnunet_cpr.datasets.volume import Reader, Unreadable, Volume, differences

AGAIN = "take it from the archive again"


class PrepareError(ValueError):
    """A data set cannot be prepared; the message is one line."""


class BadCases(PrepareError):
    """The archive's check failed.

    Attributes:
        lines: one for each thing that is wrong: the case, what, and what to do.
    """

    def __init__(self, message: str, lines: Sequence[str]) -> None:
        super().__init__(message)
        self.lines = lines


@dataclass(frozen=True)
class Case:
    """One case and where its files must be; whether they are there, the check says.

    Attributes:
        name: nnU-Net's identifier.
        images: one file for each channel, or one with all channels in its fourth dimension.
        label: None for a case to predict.
    """

    name: str
    images: tuple[Path, ...]
    label: Path | None = None


@dataclass(frozen=True)
class Archive:
    """What an archive holds.

    Attributes:
        folder: where its files begin.
        training: the cases with labels.
        unseen: those to predict.
        channels: their names, in nnU-Net's order.
        labels: the value that each name has in the archive's files, the background's too.
        read: reads one file; the library must be the one that nnU-Net will read the data set with.
        problems: what was found to be wrong without opening an image, as lines of :class:`BadCases`.
        remarks: what is worth to be told although nothing is wrong.
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
        """All of them."""
        return [*self.training, *self.unseen]


class DataSet(ABC):
    """How one challenge's archive is laid out, and how it becomes nnU-Net's raw format.

    Attributes:
        number: nnU-Net's id for it, unless another one is asked for.
        name: nnU-Net's name for it, without ``DatasetXXX_``.
    """

    number: int
    name: str

    @abstractmethod
    def open(self, source: Path) -> Archive:
        """List the archive's cases.

        Raises:
            PrepareError: the folder is not laid out like this archive.
        """

    @abstractmethod
    def write(self, archive: Archive, folder: Path, processes: int, console: Console) -> None:
        """Write nnU-Net's raw format of a checked archive.

        Args:
            archive: what :meth:`open` returned.
            folder: ``DatasetXXX_Name`` in a folder with nothing else in it; not there yet.
            processes: how much to do at the same time.
            console: for a progress bar.
        """


def check(archive: Archive, processes: int, console: Console) -> None:
    """Read every image and label to the last voxel.

    Raises:
        PrepareError: it is empty; as :class:`BadCases`, with everything that is wrong in it.
    """
    if not archive.training:
        raise PrepareError(f"there is no training case in {archive.folder}; extract the archive again")
    cases = archive.cases
    found = in_parallel(lambda case: _check_case(case, archive), cases, processes, "checking", console)
    lines = [
        *archive.problems,
        *(f"{case.name}: {problem}" for case, problems in zip(cases, found) for problem in problems),
    ]
    if lines:
        many = "1 thing is" if len(lines) == 1 else f"{len(lines)} things are"
        raise BadCases(f"{many} wrong in {archive.folder}, see above; nothing was written", lines)


def find_folder(source: Path, places: Iterable[str], content: Sequence[str], layout: str) -> Path:
    """The first of some folders in and below ``source`` that has the archive's content.

    Args:
        source: what the user named.
        places: folders to try, relative to it.
        content: patterns of files and folders, each of which must be in it.
        layout: what is expected, for the error's message.

    Raises:
        PrepareError: there is none.
    """
    source = Path(os.path.abspath(source))  # with a name even for ".", and links are left as they are
    if not source.exists():
        raise PrepareError(f"{source} does not exist; name the folder of the extracted archive")
    if not source.is_dir():
        if source.suffix.lower() in (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"):
            raise PrepareError(f"{source} is the archive itself; extract it and name its folder")
        raise PrepareError(f"{source} is not a folder; name the folder of the extracted archive")
    for place in places:
        folder = source / place
        if all(any(folder.glob(pattern)) for pattern in content):
            return folder
    names = sorted(path.name for path in source.iterdir())
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    raise PrepareError(f"expected {layout} in {source}, found {shown or 'nothing'}")


def visible_images(folder: Path) -> list[Path]:
    """The NIfTI files of a folder without what macOS leaves beside them (``._name``)."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.endswith((".nii", ".nii.gz")) and not path.name.startswith((".", "_"))
    )


def identifier(path: Path) -> str:
    """A file's name without ``.nii`` or ``.nii.gz``."""
    return path.name.removesuffix(".gz").removesuffix(".nii")


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_parallel(
    function: Callable[[_Item], _Result],
    items: Sequence[_Item],
    threads: int,
    title: str,
    console: Console,
) -> list[_Result]:
    """The function's results in the order of the items, with a progress bar.

    Threads do: decompression, SimpleITK and NumPy let others run meanwhile.
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
    """A bar that counts cases."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _check_case(case: Case, archive: Archive) -> list[str]:
    """What is wrong with a case, each in a few words and with what to do."""
    problems: list[str] = []

    def read(path: Path, what: str, volumes: int) -> Volume | None:
        where = os.path.relpath(path, archive.folder)
        if not path.is_file():
            problems.append(f"its {what} {where} is missing; {AGAIN}")
            return None
        try:
            volume = archive.read(path)
        except Unreadable as error:
            problems.append(f"its {what} {where} cannot be read ({error}); {AGAIN}")
            return None
        if volume.volumes != volumes:
            problems.append(f"its {what} {where} has {volume.volumes} volumes, not {volumes}; {AGAIN}")
            return None
        if what == "image":
            if volume.voxels.dtype.kind == "f" and np.isnan(volume.voxels).any():
                problems.append(f"its {what} {where} has voxels that are no numbers (NaN); {AGAIN}")
        elif strange := _strange_values(volume.voxels, archive.labels.values()):
            allowed = ", ".join(map(str, sorted(archive.labels.values())))
            problems.append(f"its {what} {where} has the value {strange}, not of {allowed}; {AGAIN}")
        return volume

    volumes = len(archive.channels) // len(case.images)
    read_files = [(path, read(path, "image", volumes)) for path in case.images]
    if case.label is not None:
        read_files.append((case.label, read(case.label, "label", 1)))
    complete = [(path, volume) for path, volume in read_files if volume is not None]
    for path, volume in complete[1:]:
        first, reference = complete[0]
        if different := differences(reference, volume):
            where, other = (os.path.relpath(p, archive.folder) for p in (path, first))
            problems.append(
                f"its files must lie on the same grid, but {where} has {' and '.join(different)} "
                f"as {other} has; take both from the archive again or correct the wrong header"
            )
    return problems


def _strange_values(voxels: np.ndarray, allowed: Iterable[int]) -> str:
    """Values that a label must not have, the first few of them, in words."""
    found = sorted(set(pd.unique(voxels.ravel()).tolist()) - set(allowed))
    return ", ".join(f"{value:g}" for value in found[:5]) + (" and more" if len(found) > 5 else "")
