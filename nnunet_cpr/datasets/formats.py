"""Images in the formats that SimpleITK or nibabel read; DICOM images are folders."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import SimpleITK as sitk
from nibabel import Nifti1Image

NIFTI = (".nii", ".nii.gz")
TIFF = (".tif", ".tiff")


def is_image(path: Path) -> bool:
    """Return True if SimpleITK or nibabel knows the format of a file, or a folder has DICOM slices."""
    if path.is_dir():
        return bool(slices(path))
    try:
        return _is_of_sitk(path) or bool(nibabel.load(path))
    except nibabel.filebasedimages.ImageFileError:
        return False


def slices(folder: Path) -> set[Path]:
    """Return the DICOM slices in a folder, of one image or of several."""
    sitk.ProcessObject.SetGlobalWarningDisplay(False)  # of other folders
    reader = sitk.ImageSeriesReader
    return {
        folder / Path(file).name
        for series in reader.GetGDCMSeriesIDs(str(folder))
        for file in reader.GetGDCMSeriesFileNames(str(folder), series)
    }


def spacing_file(path: Path) -> Path | None:
    """Return the file with the spacing of a TIFF image if there is one.

    nnU-Net reads the spacing from ``case.json`` beside ``case_0000.tif`` or the segmentation
    ``case.tif``, and nothing from the image itself.
    """
    names = (path.stem, re.sub(r"_[0-9]{4}$", "", path.stem))
    files = [path.with_name(f"{name}.json") for name in names]
    return next(filter(Path.is_file, files), None) if path.suffix.lower() in TIFF else None


def lacks_spacing(path: Path) -> bool:
    """Return True if nnU-Net would assume a spacing of 1 mm."""
    return path.suffix.lower() in TIFF and spacing_file(path) is None


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
        image = sitk.ReadImage(str(path))
        if path.suffix.lower() in TIFF:
            image.SetSpacing(_tiff_spacing(path)[: image.GetDimension()])
        return _to_nifti(image)
    other: Any = nibabel.load(path)
    return Nifti1Image(np.asarray(other.dataobj), other.affine)


def _tiff_spacing(path: Path) -> list[float]:
    """Return the sides of a voxel in mm along x, y and z; nnU-Net's file has them along z, y and x."""
    file = spacing_file(path)
    spacing = [1.0, 1.0, 1.0] if file is None else json.loads(file.read_bytes())["spacing"]
    if len(spacing) != 3 or not all(side > 0 for side in spacing):
        raise ValueError(f"{file}: expected three positive numbers as spacing, got {spacing}")
    return [float(side) for side in reversed(spacing)]


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
