"""Complete reading of image files, and comparison of their geometry."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import SimpleITK as sitk
from nibabel.openers import ImageOpener
from nibabel.spatialimages import HeaderDataError

# The spacing tolerance is that of nnU-Net's integrity check. nnU-Net only warns of different origins and
# directions, but a label that is a voxel off is useless. The tolerances allow for rounding in headers,
# which are single precision; 1e-4 in a cosine is 0.05 voxels at the end of 500.
SPACING_TOLERANCE = 1e-5  # relative
ORIGIN_TOLERANCE = 1e-2  # relative to the smallest spacing
DIRECTION_TOLERANCE = 1e-4  # of the direction cosines
_MAX_COORDINATE = 1e9  # mm
_MAX_COMPRESSION = 1032  # ratio of gzip


class Unreadable(ValueError):
    """File that cannot be read completely; the message is the reason, without the file name."""


@dataclass(frozen=True)
class Volume:
    """Voxels and geometry of one file.

    Attributes:
        voxels: values, in any order of the axes.
        size: number of voxels along x, y, z.
        volumes: size of the fourth dimension, 1 for files of 3 dimensions.
        spacing: mm along x, y, z.
        origin: mm.
        direction: 3 x 3 direction cosines, one column for each axis.
    """

    voxels: np.ndarray
    size: tuple[int, ...]
    volumes: int
    spacing: np.ndarray
    origin: np.ndarray
    direction: np.ndarray


Reader = Callable[[Path], Volume]


def read_with_simpleitk(path: Path) -> Volume:
    """Read a file with the geometry of nnU-Net's SimpleITKIO.

    Raises:
        Unreadable: it is damaged, not an image, or does not have 3 or 4 dimensions.
    """
    voxels, _ = read_voxels(path)
    header = sitk.ImageFileReader()
    header.SetFileName(str(path))
    try:
        header.ReadImageInformation()
    except RuntimeError as error:
        raise Unreadable(simpleitk_reason(error)) from error
    dimensions = header.GetDimension()
    _check_dimensions(dimensions, (3, 4))
    size = header.GetSize()
    return Volume(
        voxels=voxels,
        size=size[:3],
        volumes=size[3] if dimensions == 4 else 1,
        spacing=np.array(header.GetSpacing()[:3]),
        origin=np.array(header.GetOrigin()[:3]),
        direction=np.reshape(header.GetDirection(), (dimensions, dimensions))[:3, :3],
    )


def read_with_nibabel(path: Path) -> Volume:
    """Read a file with the geometry of nnU-Net's NibabelIO, whose axes need not be orthogonal.

    Raises:
        Unreadable: it is damaged, not an image, or does not have 3 dimensions.
    """
    voxels, affine = read_voxels(path)
    _check_dimensions(voxels.ndim, (3,))
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    return Volume(
        voxels=voxels,
        size=voxels.shape,
        volumes=1,
        spacing=spacing,
        origin=affine[:3, 3],
        direction=affine[:3, :3] / np.where(spacing > 0, spacing, 1),
    )


def simpleitk_reason(error: RuntimeError) -> str:
    """Return the message of an error of SimpleITK without the position in its source code."""
    return _one_line(str(error).rpartition("ERROR:")[2])


def geometry_differences(image: Volume, other: Volume) -> list[str]:
    """Return the differences in geometry between two volumes, as text."""
    found = []
    if image.size != other.size:
        found.append(f"size {_difference(other.size, image.size)}")
    if not np.allclose(other.spacing, image.spacing, rtol=SPACING_TOLERANCE):
        found.append(f"spacing {_difference(other.spacing, image.spacing)}")
    tolerance = ORIGIN_TOLERANCE * image.spacing.min()
    if not np.allclose(other.origin, image.origin, rtol=0, atol=tolerance):
        found.append(f"origin {_difference(other.origin, image.origin)}")
    if not np.allclose(other.direction, image.direction, rtol=0, atol=DIRECTION_TOLERANCE):
        found.append(f"direction {_difference(other.direction.ravel(), image.direction.ravel())}")
    return found


def read_voxels(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the voxels and the affine matrix of a file.

    nibabel is used since SimpleITK reads truncated files without an error, and NaN as 0.

    Raises:
        Unreadable: it is damaged, or not an image.
    """
    try:
        image: Any = nibabel.load(path)
        declared = math.prod(map(int, image.dataobj.shape)) * image.dataobj.dtype.itemsize
        if declared > path.stat().st_size * _MAX_COMPRESSION:  # before the memory is allocated
            raise Unreadable("its header declares more voxels than the file can hold")
        with ImageOpener(str(path)) as file:
            # image.header has been corrected by nibabel; SimpleITK uses the original.
            header = type(image.header).from_fileobj(file, check=False)
        if not _has_finite_geometry(header):
            raise Unreadable("its header has no finite spacing, origin or direction")
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                while file.read(2**20):
                    pass  # at the end gzip verifies the checksum
        voxels = np.asarray(image.dataobj)
    except nibabel.filebasedimages.ImageFileError as error:
        raise Unreadable("damaged, or not a NIfTI file") from error
    except MemoryError as error:
        raise Unreadable("not enough memory for its voxels") from error
    except (OSError, EOFError, ValueError, OverflowError, zlib.error, HeaderDataError) as error:
        raise Unreadable(_one_line(str(error))) from error
    if voxels.dtype.kind not in "iuf":
        raise Unreadable("its voxels are not numbers")
    return voxels.astype(voxels.dtype.newbyteorder("="), copy=False), image.affine  # pandas needs it


def _has_finite_geometry(header: Mapping[str, Any]) -> bool:
    """Return True if spacing, origin and direction are finite.

    SimpleITK, and so nnU-Net, does not return from a matrix with an infinite element.
    """
    fields = []
    if header["qform_code"] > 0:
        fields += ["quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"]
    if header["sform_code"] > 0:
        fields += ["srow_x", "srow_y", "srow_z"]
    numbers = [header["pixdim"][: 1 + header["dim"][0]], *(header[field] for field in fields)]
    return all(np.all(np.abs(number) < _MAX_COORDINATE) for number in numbers)


def _check_dimensions(dimensions: int, allowed: tuple[int, ...]) -> None:
    if dimensions not in allowed:
        raise Unreadable(f"expected 3 dimensions, got {dimensions}")


def _difference(found: np.ndarray | tuple[int, ...], expected: np.ndarray | tuple[int, ...]) -> str:
    """Return both as text, with as many digits as show the difference."""
    for digits in (7, 9, 17):  # float32 headers read well with 7; 9 and 17 tell all floats apart
        texts = [
            "(" + ", ".join(f"{value + 0:.{digits}g}" for value in values) + ")"  # + 0 turns -0 into 0
            for values in (found, expected)
        ]
        if texts[0] != texts[1]:
            break
    return " instead of ".join(texts)


def _one_line(message: str) -> str:
    return " ".join(message.split()) or "damaged"
