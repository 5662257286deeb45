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
from nibabel import Nifti1Header, Nifti1Image

NIFTI = (".nii", ".nii.gz")
TIFF = (".tif", ".tiff")
_ENDINGS = (*NIFTI, ".nrrd", ".mha", ".mhd", ".mgz")


def is_nifti(path: Path) -> bool:
    """Return True if the name of a file is one of NIfTI."""
    return path.name.lower().endswith(NIFTI)


def is_image(path: Path) -> bool:
    """Return True if a file has the format or the name of an image, or a folder has DICOM slices.

    A damaged file with the name of an image is one, so that it is reported when it is read.
    """
    if path.is_dir():
        return bool(slices(path))
    if _is_of_sitk(path) or has_image_name(path):
        return True
    try:
        return bool(nibabel.load(path))
    except nibabel.filebasedimages.ImageFileError:
        return False


def has_image_name(path: Path) -> bool:
    """Return True if a file has the name of an image, whatever is in it."""
    return path.name.lower().endswith(_ENDINGS)


def slices(folder: Path) -> set[Path]:
    """Return the DICOM slices in a folder, of one image or of several."""
    sitk.ProcessObject.SetGlobalWarningDisplay(False)  # of other folders
    reader = sitk.ImageSeriesReader
    return {
        folder / Path(file).name
        for series in reader.GetGDCMSeriesIDs(str(folder))
        for file in reader.GetGDCMSeriesFileNames(str(folder), series)
    }


def parts(path: Path) -> set[Path]:
    """Return the files beside an image that belong to it, and may not exist."""
    endings = {".hdr": (".img",), ".mhd": (".raw", ".zraw"), ".nhdr": (".raw", ".raw.gz")}
    beside = {path.with_suffix(ending) for ending in endings.get(path.suffix.lower(), ())}
    spacing = spacing_file(path)
    return beside | {spacing} if spacing else beside


def files(path: Path) -> list[Path]:
    """Return the files of an image: those of a DICOM folder, or the file and those that belong to it."""
    return [*path.iterdir()] if path.is_dir() else [path, *filter(Path.exists, parts(path))]


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
        Exception: it is damaged or not 3-D; gzip, zlib, nibabel, NumPy and SimpleITK have their own.
    """
    if is_nifti(path):
        return _read_nifti(path)
    if path.is_dir():
        series = sitk.ImageSeriesReader.GetGDCMSeriesIDs(str(path))
        if len(series) > 1:
            raise ValueError(f"expected one DICOM series, got {len(series)}")
        files = sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(path))
        return _of_sitk(sitk.ReadImage(files))
    if _is_of_sitk(path):
        image = sitk.ReadImage(str(path))
        if path.suffix.lower() in TIFF:
            image.SetSpacing(_tiff_spacing(path)[: image.GetDimension()])
        return _of_sitk(image)
    other: Any = nibabel.load(path)
    _check_dimensions(len(other.shape))
    voxels = np.asarray(other.dataobj)
    return Nifti1Image(voxels, other.affine, dtype=voxels.dtype)


def _read_nifti(path: Path) -> Nifti1Image:
    """Read NIfTI with the geometry that SimpleITK and so nnU-Net see.

    nibabel prefers another one if a header has two, as in ACDC. It reads the voxels, since SimpleITK
    returns an image also if the file is truncated.
    """
    content = path.read_bytes()
    is_compressed, expected = content[:2] == b"\x1f\x8b", path.suffix.lower() == ".gz"
    if is_compressed and not expected:
        raise ValueError(f"expected no compression, got gzip; rename it to {path.name}.gz")
    if expected and not is_compressed:
        raise ValueError("Not a gzipped file; remove .gz from its name if it is an image")
    content = gzip.decompress(content) if expected else content
    if not Nifti1Header.may_contain_header(content):
        raise ValueError("expected NIfTI-1, which nnU-Net reads, got something else")
    image = Nifti1Image.from_bytes(content)
    if not np.isfinite(image.affine).all():
        raise ValueError("expected a finite affine matrix in the header")
    header = sitk.ImageFileReader()
    header.SetFileName(str(path))
    header.ReadImageInformation()
    # A fourth axis with one volume is dropped, as SimpleITK does.
    return _to_nifti(np.asarray(nibabel.squeeze_image(image).dataobj), header)


def _tiff_spacing(path: Path) -> list[float]:
    """Return the sides of a voxel in mm along x, y and z; nnU-Net's file has them along z, y and x."""
    file = spacing_file(path)
    spacing = [1.0, 1.0, 1.0] if file is None else json.loads(file.read_bytes())["spacing"]
    if len(spacing) != 3 or not all(side > 0 for side in spacing):
        raise ValueError(f"{file}: expected three positive numbers as spacing, got {spacing}")
    return [float(side) for side in reversed(spacing)]


def _is_of_sitk(path: Path) -> bool:
    return bool(sitk.ImageFileReader.GetImageIOFromFileName(str(path)))


def _of_sitk(image: sitk.Image) -> Nifti1Image:
    return _to_nifti(sitk.GetArrayFromImage(image).T, image)


def _to_nifti(voxels: np.ndarray, geometry: sitk.Image | sitk.ImageFileReader) -> Nifti1Image:
    """Return voxels with a geometry of SimpleITK, whose x and y axes point in the other direction."""
    _check_dimensions(geometry.GetDimension())
    _check_dimensions(voxels.ndim)  # one more for colors
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(geometry.GetDirection(), (3, 3)) * geometry.GetSpacing()
    affine[:3, 3] = geometry.GetOrigin()
    affine[:2] *= -1
    converted = Nifti1Image(voxels, affine, dtype=voxels.dtype)  # refuses int64 unless it is named
    converted.set_qform(affine, "scanner")  # SimpleITK takes it where rounding has tilted the sform
    return converted


def _check_dimensions(number: int) -> None:
    """Raise a ValueError that says what to do with an image that is not 3-D."""
    if number != 3:
        of_2d = "nnU-Net reads 2-D images such as PNG itself, see its documentation/dataset_format.md"
        advice = of_2d if number == 2 else "write each channel to a file of its own"
        raise ValueError(f"expected 3 dimensions, got {number}; {advice}")
