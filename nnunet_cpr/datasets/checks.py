"""Checks of the images and labels of an archive, before anything is written."""

from __future__ import annotations

import gzip
from collections.abc import Collection
from pathlib import Path

import numpy as np
from nibabel import Nifti1Image

from nnunet_cpr.datasets.archive import AGAIN, Archive, Case, PrepareError, map_cases

_TOLERANCE = 0.1
"""Largest accepted distance between the same voxel of two files, relative to the smallest voxel side.

It allows for rounding in headers. nnU-Net only warns of different origins and directions, but a label
that is a voxel off is useless.
"""


def find_problems(archive: Archive, threads: int) -> list[str]:
    """Read every image and label completely, and return one line for each invalid case."""

    def find_problem(case: Case) -> str:
        try:
            _check_case(case, archive.label_values)
        except PrepareError as error:
            return f"{case.name}: {error}"
        return ""

    return [line for line in map_cases(find_problem, archive, threads, "checking") if line]


def read_nifti(path: Path) -> Nifti1Image:
    """Read a 3-D NIfTI file up to its last byte, which includes the checksum of gzip.

    Raises:
        PrepareError: the file is missing, damaged or not a 3-D image.
    """
    if not path.is_file():
        raise PrepareError(f"{path} is missing; {AGAIN}")
    try:
        content = path.read_bytes()
        image = Nifti1Image.from_bytes(gzip.decompress(content) if path.suffix == ".gz" else content)
        voxels = np.asarray(image.dataobj)
    except Exception as error:  # gzip, zlib, nibabel and NumPy have one each for damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PrepareError(f"{path} cannot be read ({reason}); {AGAIN}") from error
    if voxels.ndim != 3:
        raise PrepareError(f"{path}: expected 3 dimensions, got {voxels.ndim}; {AGAIN}")
    if not np.isfinite(image.affine).all():
        raise PrepareError(f"{path}: expected a finite affine matrix in the header; {AGAIN}")
    return Nifti1Image(voxels, image.affine, image.header)


def _check_case(case: Case, label_values: Collection[int]) -> None:
    """Raise a PrepareError with the first problem of a case."""
    first, *others = case.images
    reference = read_nifti(first)
    for path in others:
        _check_geometry(path, read_nifti(path), first, reference)
    if case.label is not None:
        label = read_nifti(case.label)
        _check_geometry(case.label, label, first, reference)
        if unknown := np.setdiff1d(label.dataobj, list(label_values))[:5].tolist():
            allowed = f"labels from {sorted(label_values)}"
            raise PrepareError(f"{case.label}: expected {allowed}, got {unknown}; {AGAIN}")


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
    raise PrepareError(f"{path}: expected the geometry of {first}, got {difference}; {AGAIN}")
