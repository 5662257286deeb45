"""Checks of the images and labels of an archive, before anything is written."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
from nibabel import Nifti1Image

from nnunet_cpr.datasets import formats
from nnunet_cpr.datasets.archive import Archive, Case, PrepareError, map_cases

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
        except PrepareError as error:
            return CheckedCase(f"{case.name}: {error}; {archive.advice}")

    return map_cases(check, archive, threads, "checking")


def read_image(path: Path) -> Nifti1Image:
    """Read a 3-D image up to its last byte, which includes the checksum of gzip.

    Raises:
        PrepareError: the file is missing, damaged or not a 3-D image.
    """
    if not path.exists():
        raise PrepareError(f"{path} is missing")
    try:
        image = formats.read(path)
        voxels = np.asarray(image.dataobj)
    except Exception as error:  # gzip, zlib, nibabel and NumPy have one each for damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PrepareError(f"{path} cannot be read ({reason})") from error
    if voxels.ndim != 3:
        raise PrepareError(f"{path}: expected 3 dimensions, got {voxels.ndim}")
    if not np.isfinite(image.affine).all():
        raise PrepareError(f"{path}: expected a finite affine matrix in the header")
    return Nifti1Image(voxels, image.affine, image.header)


def _check_case(case: Case, allowed: Collection[int]) -> CheckedCase:
    """Raise a PrepareError with the first problem of a case."""
    first, *others = case.images
    reference = read_image(first)
    for path in others:
        _check_geometry(path, read_image(path), first, reference)
    values: list[int] = []
    if case.label is not None:
        label = read_image(case.label)
        _check_geometry(case.label, label, first, reference)
        values = np.unique(label.dataobj).tolist()
        if unknown := [value for value in values if value not in allowed][:5]:
            known = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else sorted(allowed)
            raise PrepareError(f"{case.label}: expected labels from {known}, got {unknown}")
    spacing = tuple(map(float, reference.header.get_zooms()))
    return CheckedCase("", reference.shape, spacing, frozenset(map(int, values)))


def _check_geometry(path: Path, image: Nifti1Image, first: Path, reference: Nifti1Image) -> None:
    """Raise a PrepareError if an image has another geometry than the first one of its case."""
    if image.shape != reference.shape:
        difference = f"size {image.shape} instead of {reference.shape}"
    else:
        # Upper limit of the distances in mm: that of the origins, and what each axis adds up to its end.
        distance = (np.abs(image.affine - reference.affine) @ [*image.shape, 1]).max()
        if distance <= _TOLERANCE * min(reference.header.get_zooms()):
            return
        difference = f"voxels up to {distance:.2g} mm away"
    raise PrepareError(f"{path}: expected the geometry of {first}, got {difference}")
