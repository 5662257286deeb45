"""Images in the formats that SimpleITK or nibabel read; DICOM images are folders."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import SimpleITK as sitk
from nibabel import Nifti1Image

NIFTI = (".nii", ".nii.gz")


def is_image(path: Path) -> bool:
    """Return True if SimpleITK or nibabel knows the format of a file, or a folder has DICOM slices."""
    if path.is_dir():
        sitk.ProcessObject.SetGlobalWarningDisplay(False)  # of other folders
        return bool(sitk.ImageSeriesReader.GetGDCMSeriesIDs(str(path)))
    try:
        return _is_of_sitk(path) or bool(nibabel.load(path))
    except nibabel.filebasedimages.ImageFileError:
        return False


def read(path: Path) -> Nifti1Image:
    """Read an image up to its last byte, which includes the checksum of gzip.

    Raises:
        Exception: it is damaged; gzip, zlib, nibabel, NumPy and SimpleITK have their own.
    """
    if path.name.endswith(NIFTI):
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        # A fourth axis with one volume is dropped, as SimpleITK does.
        return nibabel.squeeze_image(Nifti1Image.from_bytes(content))
    if path.is_dir():
        series = sitk.ImageSeriesReader.GetGDCMSeriesIDs(str(path))
        if len(series) > 1:
            raise ValueError(f"expected one DICOM series, got {len(series)}")
        return _to_nifti(sitk.ReadImage(sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(path))))
    if _is_of_sitk(path):
        return _to_nifti(sitk.ReadImage(str(path)))
    other: Any = nibabel.load(path)
    return Nifti1Image(np.asarray(other.dataobj), other.affine)


def _is_of_sitk(path: Path) -> bool:
    return bool(sitk.ImageFileReader.GetImageIOFromFileName(str(path)))


def _to_nifti(image: sitk.Image) -> Nifti1Image:
    """Return an image of SimpleITK, whose x and y axes point in the other direction."""
    if image.GetDimension() != 3:
        raise ValueError(f"expected 3 dimensions, got {image.GetDimension()}")
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    affine[:2] *= -1
    converted = Nifti1Image(sitk.GetArrayFromImage(image).T, affine)
    converted.set_qform(affine, "scanner")  # SimpleITK takes it where rounding has tilted the sform
    return converted
