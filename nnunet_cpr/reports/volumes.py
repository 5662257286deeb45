"""Slices of a case for its pictures: read, cropped to the structures, and turned upright."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import SimpleITK as sitk

_MARGIN = 0.25
"""Margin around the structures, relative to their size."""
_SMALLEST_PICTURE = 24
"""Minimum side of a picture in voxels, so that tiny structures keep some surroundings."""
_FEWEST_SLICES = 8
_COARSE = 3
"""Ratio of slice distance to voxel size beyond which only the fine plane is shown."""
_WITHOUT_ORIENTATION = (".png", ".bmp", ".tif", ".tiff", ".jpg", ".jpeg")

SOFT_TISSUE = (40.0, 400.0)
"""Level and width in Hounsfield units of the window in which CT is shown."""


@dataclass(frozen=True)
class View:
    """One slice, in the orientation in which it is drawn.

    Attributes:
        plane: ``axial``, ``coronal``, ``sagittal``, or ``slice`` if the header has no orientation.
        position: number of the slice, from 1.
        slices: number of slices of the image along this axis.
        image: grey values, [rows, columns].
        labels: label maps like ``image``: ground truth, then predictions.
        aspect: height of a voxel divided by its width.
        edges: letters of the patient's sides at the left, right, top and bottom; empty if unknown.
    """

    plane: str
    position: int
    slices: int
    image: np.ndarray
    labels: tuple[np.ndarray, ...]
    aspect: float
    edges: tuple[str, ...]


# Arrays are [z, y, x] in LPS: x grows to the left of the patient, y to posterior, z to superior.
_PLANES = {
    0: ("axial", ("R", "L", "A", "P")),
    1: ("coronal", ("R", "L", "S", "I")),
    2: ("sagittal", ("A", "P", "S", "I")),
}


def read_views(
    image_file: Path, label_files: Sequence[Path], ignored: int | None = None
) -> tuple[list[View], tuple[float, float]]:
    """Read a case and return up to three slices with the largest disagreement of the label maps.

    The voxels are turned to the patient orientation of the image's header: axial slices have anterior
    on top and the patient's right side on the left, coronal and sagittal slices superior on top.
    Images with few or distant slices have one view, in their fine plane. Formats without an
    orientation in the header are shown as stored.

    Args:
        image_file: the image; of several colour channels the first is used.
        label_files: ground truth, then predictions.
        ignored: label of the ground truth whose voxels have no known class.

    Returns:
        The views, and the 1st and 99th percentile of the grey values in them.

    Raises:
        ValueError: the files differ in size or have neither two nor three dimensions.
        RuntimeError: a file cannot be read.
    """
    image = _read(image_file)
    maps = [_read(path) for path in label_files]
    if any(each.GetSize() != image.GetSize() for each in maps):
        raise ValueError("image, ground truth and predictions differ in size")
    if image.GetDimension() not in (2, 3):
        raise ValueError(f"{image_file.name} has {image.GetDimension()} dimensions")
    # Views into SimpleITK's memory: images of whole bodies are neither copied nor resampled.
    grey, *labels = (_as_3d(sitk.GetArrayViewFromImage(each)) for each in (image, *maps))
    spacing = np.ones(3)
    spacing[3 - image.GetDimension() :] = image.GetSpacing()[::-1]
    upright = _has_orientation(image_file, image)
    if upright:
        # nnU-Net works on voxels; the orientation of the image holds for the labels as well.
        order, flips = _turn(image.GetDirection())
        grey, *labels = (np.flip(array.transpose(order), tuple(flips)) for array in (grey, *labels))
        spacing = spacing[order]
    total = np.array(grey.shape)
    region = _region(labels, spacing)
    grey, *labels = (array[region] for array in (grey, *labels))
    known = labels[0] != ignored if ignored is not None else np.ones(labels[0].shape, bool)
    truth = labels[0] = np.where(known, labels[0], 0)
    wrong = sum((((each != truth) & known).astype(np.uint8) for each in labels[1:]), np.uint8(0) * known)
    offset = [part.start for part in region]
    views = [
        _view(axis, grey, labels, wrong, spacing, offset, total, upright)
        for axis in (_axes(total, spacing) if upright else [0])
    ]
    shown = np.concatenate([view.image.ravel() for view in views])
    shown = shown[np.isfinite(shown)]
    low, high = np.percentile(shown, [1, 99]) if shown.size else (0.0, 1.0)
    return views, (float(low), float(high))


def soft_tissue_window() -> tuple[float, float]:
    """Return the grey values of black and white for CT.

    Example:
        >>> soft_tissue_window()
        (-160.0, 240.0)
    """
    level, width = SOFT_TISSUE
    return level - width / 2, level + width / 2


def _as_3d(array: np.ndarray) -> np.ndarray:
    return array[None] if array.ndim == 2 else array


def _read(path: Path) -> sitk.Image:
    image = sitk.ReadImage(str(path))
    if image.GetNumberOfComponentsPerPixel() > 1:
        return sitk.VectorIndexSelectionCast(image, 0)
    return image


def _has_orientation(path: Path, image: sitk.Image) -> bool:
    """Return True if the header tells the sides of the patient."""
    if image.GetDimension() != 3 or path.name.lower().endswith(_WITHOUT_ORIENTATION):
        return False
    keys = ("qform_code", "sform_code")  # NIfTI: both are 0 in a header without an orientation
    codes = [image.GetMetaData(key) for key in keys if image.HasMetaDataKey(key)]
    return not codes or any(code.strip() != "0" for code in codes)


def _turn(direction: Sequence[float]) -> tuple[list[int], list[int]]:
    """Return the order of the stored axes [z, y, x] in LPS, and the LPS axes to flip after that."""
    voxel = sitk.Image(1, 1, 1, sitk.sitkUInt8)
    voxel.SetDirection(direction)
    orient = sitk.DICOMOrientImageFilter()
    orient.SetDesiredCoordinateOrientation("LPS")
    orient.Execute(voxel)
    # SimpleITK permutes first; its axes are [x, y, z].
    order = [2 - axis for axis in orient.GetPermuteOrder()[::-1]]
    return order, [2 - axis for axis, flip in enumerate(orient.GetFlipAxes()) if flip]


def _region(labels: Sequence[np.ndarray], spacing: np.ndarray) -> tuple[slice, ...]:
    """Return a cube (in mm) around the foreground of all label maps, or the whole image without any."""
    boxes = [box for box in map(_bounding_box, labels) if box is not None]
    shape = labels[0].shape
    if not boxes:
        return tuple(slice(0, length) for length in shape)
    ends = [
        (min(box[axis][0] for box in boxes), max(box[axis][1] for box in boxes))
        for axis in range(len(shape))
    ]
    return tuple(_square(ends, spacing, shape))


def _bounding_box(array: np.ndarray) -> list[tuple[int, int]] | None:
    """Return first and last + 1 index of the foreground along each axis; None without foreground."""
    first = np.flatnonzero(array.any(axis=tuple(range(1, array.ndim))))
    if not first.size:
        return None
    # The other axes are searched in the slices with foreground only.
    flat = np.asarray(array[first[0] : first[-1] + 1].any(axis=0))
    box = [(int(first[0]), int(first[-1]) + 1)]
    for axis in range(flat.ndim):
        found = np.flatnonzero(np.moveaxis(flat, axis, 0).reshape(flat.shape[axis], -1).any(axis=1))
        box.append((int(found[0]), int(found[-1]) + 1))
    return box


def _square(
    ends: Sequence[tuple[int, int]], spacing: Sequence[float] | np.ndarray, shape: Sequence[int]
) -> list[slice]:
    """Return the slices of a square or cube (in mm) with a margin around the given ends."""
    side = max((last - first) * mm for (first, last), mm in zip(ends, spacing)) * (1 + 2 * _MARGIN)
    side = max(side, _SMALLEST_PICTURE * min(spacing))
    parts = []
    for (first, last), mm, length in zip(ends, spacing, shape):
        middle, half = (first + last) / 2, side / mm / 2
        parts.append(slice(max(0, math.floor(middle - half)), min(length, math.ceil(middle + half))))
    return parts


def _axes(size: np.ndarray, spacing: np.ndarray) -> list[int]:
    """Return the axes across which slices are shown."""
    if size.min() < _FEWEST_SLICES:
        return [int(np.argmin(size))]
    if spacing.max() > _COARSE * np.sort(spacing)[1]:
        return [int(np.argmax(spacing))]
    return [0, 1, 2]


def _view(
    axis: int,
    grey: np.ndarray,
    labels: Sequence[np.ndarray],
    wrong: np.ndarray,
    spacing: np.ndarray,
    offset: Sequence[int],
    total: np.ndarray,
    upright: bool,
) -> View:
    position = most_wrong_slice(wrong, labels[0], axis)
    planes = [array[(slice(None),) * axis + (position,)] for array in (grey, *labels)]
    height, width = (float(mm) for a, mm in enumerate(spacing) if a != axis)
    if upright and axis:
        planes = [plane[::-1] for plane in planes]  # superior on top
    rows, columns = crop(planes[1:], (height, width))
    # Copies: the arrays are views into images that end with read_views.
    image, *maps = (plane[rows, columns].copy() for plane in planes)
    name, edges = _PLANES[axis] if upright else ("slice", ())
    return View(
        name,
        offset[axis] + position + 1,
        int(total[axis]),
        image,
        tuple(maps),
        height / width,
        edges,
    )


def most_wrong_slice(wrong: np.ndarray, truth: np.ndarray, axis: int) -> int:
    """Return the slice with most wrong voxels, or without any the one with most foreground."""
    others = tuple(a for a in range(truth.ndim) if a != axis)
    counts = wrong.sum(axis=others)
    if not counts.any():
        counts = (truth > 0).sum(axis=others)
    return int(np.argmax(counts)) if counts.any() else truth.shape[axis] // 2


def crop(planes: Sequence[np.ndarray], spacing: tuple[float, float]) -> tuple[slice, slice]:
    """Return the part of a slice in a square (in mm) around the foreground of all planes."""
    boxes = [box for box in map(_bounding_box, planes) if box is not None]
    if not boxes:
        return slice(None), slice(None)
    ends = [(min(b[axis][0] for b in boxes), max(b[axis][1] for b in boxes)) for axis in (0, 1)]
    rows, columns = _square(ends, spacing, planes[0].shape)
    return rows, columns
