"""Images and label maps of cases: location on the disk, voxels and spacing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import SimpleITK as sitk


def existing(path: Path, kind: str) -> Path:
    """Return the path of a file.

    Raises:
        FileNotFoundError: there is no such file; the message has its ``kind`` and is one line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{kind} {path.name} not found in {path.parent.name}")
    return path


def truth_file(
    name: str, dataset: str, raw: Path | None, preprocessed: Path | None, reference: Path | None = None
) -> Path:
    """Return the path of a case's ground truth.

    Args:
        name: file name.
        dataset: nnU-Net's name of the data set.
        raw: nnU-Net's ``nnUNet_raw``, if there is one.
        preprocessed: nnU-Net's ``nnUNet_preprocessed``, if there is one.
        reference: where the file was during the validation, if known; it comes first.

    Raises:
        FileNotFoundError: the file is in none of these folders; the message is one line.
    """
    places = [] if reference is None else [reference]
    if preprocessed is not None:
        places.append(preprocessed / dataset / "gt_segmentations" / name)
    if raw is not None:
        places.append(raw / dataset / "labelsTr" / name)
    if not places:
        raise FileNotFoundError(f"ground truth {name} not found; set nnUNet_raw or nnUNet_preprocessed")
    return existing(next((path for path in places if path.is_file()), places[-1]), "ground truth")


def read_volume(path: Path) -> tuple[np.ndarray, tuple[float, float, float]]:
    """Return voxels [z, y, x], of the first colour channel if any, and their spacing in mm.

    Raises:
        ValueError: the image has more than three dimensions.
        RuntimeError: SimpleITK cannot read the file.
    """
    image = sitk.ReadImage(str(path))
    if image.GetNumberOfComponentsPerPixel() > 1:
        image = sitk.VectorIndexSelectionCast(image, 0)
    array, spacing = sitk.GetArrayFromImage(image), image.GetSpacing()[::-1]
    if array.ndim == 2:
        return array[None], (1.0, spacing[0], spacing[1])
    if array.ndim != 3:
        raise ValueError(f"{path.name} has {array.ndim} dimensions")
    return array, (spacing[0], spacing[1], spacing[2])
