"""Challenge archives: their contents, the base class of the data sets, and checks of the images."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from nibabel import Nifti1Image
from rich.progress import track

from nnunet_cpr.datasets import formats
from nnunet_cpr.refusals import Refusal

AGAIN = "extract it from the archive again"


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
            Refusal: the folder does not have the layout of this archive.
        """

    @abstractmethod
    def write(self, archive: Archive, folder: Path, processes: int) -> None:
        """Write a checked archive in nnU-Net's raw format.

        Args:
            archive: result of :meth:`open`.
            folder: new folder ``DatasetXXX_Name`` in an otherwise empty folder.
            processes: number of parallel processes or threads.

        Raises:
            Refusal: nnU-Net's converter failed.
            OSError: a file cannot be written.
        """


def find_folder(source: Path, content: str) -> Path:
    """Return the folder of an archive: the source, or the first one at most three levels below it.

    Args:
        source: folder given by the user.
        content: glob pattern of a file or folder that the archive has.

    Raises:
        Refusal: no folder has it.
    """
    for depth in range(4):
        if found := sorted(source.absolute().glob("*/" * depth + content)):
            return found[0].parents[content.count("/")]
    if content.endswith(".nii.gz") and any(source.rglob(content.removesuffix(".gz"))):
        raise Refusal(unpacked(source))
    raise Refusal(f"{source}: found no {content} in it", "give the folder of the extracted archive")


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


_TOLERANCE = 0.1
"""Largest accepted distance between the same voxel of two files, relative to the smallest voxel side.

It allows for rounding in headers. nnU-Net only warns of different origins and directions, but a label
that is a voxel off is useless.
"""


class CheckedCase(NamedTuple):
    """Result of the checks of a case.

    Attributes:
        problem: the first problem in one line, empty if there is none.
        size: voxels along each axis.
        spacing: sides of a voxel in mm.
        label_values: values in the segmentation.
    """

    problem: str
    size: tuple[int, ...] = ()
    spacing: tuple[float, ...] = ()
    label_values: frozenset[int] = frozenset()


def check_cases(archive: Archive, threads: int) -> list[CheckedCase]:
    """Read every image and label of an archive completely."""

    def check(case: Case) -> CheckedCase:
        try:
            return _check_case(case, archive.label_values)
        except Refusal as error:
            return CheckedCase(f"{case.name}: {error}; {archive.advice}")

    return map_cases(check, archive, threads, "checking")


def read_image(path: Path) -> Nifti1Image:
    """Read a 3-D image up to its last byte, which includes the checksum of gzip.

    Raises:
        Refusal: the file is missing, damaged or not a 3-D image.
    """
    if not path.exists():
        raise Refusal(f"{path} is missing")
    try:
        return formats.read(path)
    except Exception as error:  # gzip, zlib, nibabel and NumPy have one each for damaged files
        reason = " ".join(str(error).split()).rpartition("ITK ERROR: ")[2] or type(error).__name__
        raise Refusal(f"{path} cannot be read ({reason})") from error


def _check_case(case: Case, allowed: Collection[int]) -> CheckedCase:
    """Raise a Refusal with the first problem of a case."""
    first, *others = case.images
    reference = _read_finite(first)
    for path in others:
        _check_geometry(path, _read_finite(path), first, reference)
    values = np.array([], int)
    if case.label is not None:
        label = read_image(case.label)
        _check_geometry(case.label, label, first, reference)
        values = np.unique(label.dataobj)
        if unknown := values[~np.isin(values, [*allowed])][:5].tolist():
            known = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else sorted(allowed)
            raise Refusal(f"{case.label}: expected labels from {known}, got {unknown}")
    spacing = tuple(map(float, reference.header.get_zooms()))
    return CheckedCase("", reference.shape, spacing, frozenset(map(int, values)))


def _read_finite(path: Path) -> Nifti1Image:
    """Read an image that nnU-Net can normalize."""
    image = read_image(path)
    if number := np.size(image.dataobj) - np.isfinite(image.dataobj).sum():
        raise Refusal(f"{path}: expected finite voxels, got {number} that are NaN or infinite")
    return image


def _check_geometry(path: Path, image: Nifti1Image, first: Path, reference: Nifti1Image) -> None:
    """Raise a Refusal if an image has another geometry than the first one of its case."""
    zooms, expected = (each.header.get_zooms() for each in (image, reference))
    if image.shape != reference.shape:
        difference = f"size {image.shape} instead of {reference.shape}"
    elif not np.allclose(zooms, expected):  # nnU-Net compares them so
        got, needed = (" x ".join(f"{side:.7g}" for side in each) for each in (zooms, expected))
        difference = f"voxels of {got} mm instead of {needed} mm"
    else:
        # Upper limit of the distances in mm: that of the origins, and what each axis adds up to its end.
        distance = (np.abs(image.affine - reference.affine) @ [*image.shape, 1]).max()
        if distance <= _TOLERANCE * min(expected):
            return
        difference = f"voxels up to {distance:.2g} mm away"
    raise Refusal(f"{path}: expected the geometry of {first}, got {difference}")
