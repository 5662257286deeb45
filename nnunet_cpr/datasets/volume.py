"""Reading one image file whole, and comparing the grids that two of them lie on."""

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

# nnU-Net's integrity check refuses spacings that differ by more than a part in 100,000, so more than
# that would only be refused later. It merely warns of origins and directions, although a label that is
# a voxel off is of no use, so they are refused here; but by a hundredth of a voxel and by 0.0001 in a
# cosine, which is 0.05 voxels at the end of 500: headers are single precision, often rounded from text
# or computed from quaternions, and what nnU-Net warns of (1e-8 beside a zero) occurs in good archives.
SPACING_TOLERANCE = 1e-5  # of the spacing
ORIGIN_TOLERANCE = 1e-2  # of the smallest spacing
DIRECTION_TOLERANCE = 1e-4  # of a direction's cosines
_FARTHEST = 1e9  # mm
_DEFLATION = 1032  # bytes that gzip can put into one, at the most


class Unreadable(ValueError):
    """The file cannot be read, or not to its end; the message says why, without its name."""


@dataclass(frozen=True)
class Volume:
    """One file's voxels and where they lie, the same whatever read it.

    Attributes:
        voxels: in any order of the axes.
        size: voxels along x, y, z.
        volumes: how many of that size the file holds; more than 1 in files of 4 dimensions.
        spacing: mm along x, y, z.
        origin: mm.
        direction: 3 x 3 cosines, a column for each axis.
    """

    voxels: np.ndarray
    size: tuple[int, ...]
    volumes: int
    spacing: np.ndarray
    origin: np.ndarray
    direction: np.ndarray


Reader = Callable[[Path], Volume]


def read_with_simpleitk(path: Path) -> Volume:
    """A file on the grid that nnU-Net's SimpleITKIO sees.

    Raises:
        Unreadable: it is damaged, not an image, or not of 3 or 4 dimensions.
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
    """A file on the grid that nnU-Net's NibabelIO sees, which takes axes that are not orthogonal too.

    Raises:
        Unreadable: it is damaged, not an image, or not of 3 dimensions.
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
    """What SimpleITK complains of, without where in its source."""
    return _one_line(str(error).rpartition("ERROR:")[2])


def differences(image: Volume, other: Volume) -> list[str]:
    """What tells the two grids apart, in words; nothing if they are the same."""
    found = []
    if image.size != other.size:
        found.append(f"size {_numbers(other.size)} instead of {_numbers(image.size)}")
    if not np.allclose(other.spacing, image.spacing, rtol=SPACING_TOLERANCE):
        found.append(f"spacing {_numbers(other.spacing)} instead of {_numbers(image.spacing)}")
    farthest = ORIGIN_TOLERANCE * image.spacing.min()
    if not np.allclose(other.origin, image.origin, rtol=0, atol=farthest):
        found.append(f"origin {_numbers(other.origin)} instead of {_numbers(image.origin)}")
    if not np.allclose(other.direction, image.direction, rtol=0, atol=DIRECTION_TOLERANCE):
        found.append(
            f"direction {_numbers(other.direction.ravel())} instead of "
            f"{_numbers(image.direction.ravel())}"
        )
    return found


def read_voxels(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """All voxels of a file that is whole, and its affine matrix.

    Not by SimpleITK: it returns a file that was cut short without an error, and 0 for NaN.

    Raises:
        Unreadable: it is damaged, or not an image.
    """
    try:
        image: Any = nibabel.load(path)
        declared = math.prod(map(int, image.dataobj.shape)) * image.dataobj.dtype.itemsize
        if declared > path.stat().st_size * _DEFLATION:  # or its memory would be asked for
            raise Unreadable("its header tells of more voxels than the file can hold")
        with ImageOpener(str(path)) as file:
            # Not image.header, which nibabel has set right where SimpleITK takes it as it is.
            header = type(image.header).from_fileobj(file, check=False)
        if not _is_somewhere(header):
            raise Unreadable("its header has no finite spacing, origin or direction")
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                while file.read(2**20):
                    pass  # at its end gzip compares the check sum, which may lie behind all voxels
        voxels = np.asarray(image.dataobj)
    except nibabel.filebasedimages.ImageFileError as error:
        raise Unreadable("damaged, or no NIfTI file") from error
    except MemoryError as error:
        raise Unreadable("there is not enough memory for its voxels") from error
    except (OSError, EOFError, ValueError, OverflowError, zlib.error, HeaderDataError) as error:
        raise Unreadable(_one_line(str(error))) from error
    if voxels.dtype.kind not in "iuf":
        raise Unreadable("its voxels are no single numbers")
    return voxels.astype(voxels.dtype.newbyteorder("="), copy=False), image.affine  # as pandas wants it


def _is_somewhere(header: Mapping[str, Any]) -> bool:
    """Whether the numbers that say where the voxels are can be computed with.

    SimpleITK, and so nnU-Net, never comes back from a matrix with an infinity in it.
    """
    fields = []
    if header["qform_code"] > 0:
        fields += ["quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"]
    if header["sform_code"] > 0:
        fields += ["srow_x", "srow_y", "srow_z"]
    numbers = [header["pixdim"][: 1 + header["dim"][0]], *(header[field] for field in fields)]
    return all(np.all(np.abs(number) < _FARTHEST) for number in numbers)


def _check_dimensions(dimensions: int, allowed: tuple[int, ...]) -> None:
    if dimensions not in allowed:
        raise Unreadable(f"{dimensions} dimensions instead of 3")


def _numbers(values: np.ndarray | tuple[int, ...]) -> str:
    return "(" + ", ".join(f"{value + 0:.7g}" for value in values) + ")"  # + 0: not "-0"


def _one_line(message: str) -> str:
    return " ".join(message.split()) or "damaged"
