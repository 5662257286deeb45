"""Writing of nnU-Net's raw format, here or by a converter of nnU-Net."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from nibabel import Nifti1Image

from nnunet_cpr.datasets.archive import Archive, Case, map_cases, read_image
from nnunet_cpr.datasets.formats import is_nifti
from nnunet_cpr.nnunet.commands import FOLDER_VARIABLES, run


def write_cases(
    archive: Archive,
    folder: Path,
    threads: int,
    channels: Sequence[str],
    new_values: Mapping[int, int],
    **dataset_json: Any,
) -> None:
    """Write every case and ``dataset.json``; NIfTI images are copied, labels become uint8.

    Args:
        archive: a checked archive.
        folder: new folder of the data set.
        threads: number of cases to write in parallel.
        channels: names of the channels.
        new_values: new value of each label value of the archive.
        dataset_json: further arguments of nnU-Net's ``generate_dataset_json``.
    """
    from nnunetv2.dataset_conversion.generate_dataset_json import generate_dataset_json

    for part in {"imagesTr", "labelsTr", *(_images_folder(case) for case in archive.cases)}:
        (folder / part).mkdir(parents=True)
    table = np.array([new_values.get(value, 0) for value in range(max(new_values) + 1)], np.uint8)

    def write(case: Case) -> None:
        for channel, path in enumerate(case.images):
            copy_image(path, folder / _images_folder(case) / f"{case.name}_{channel:04d}.nii.gz")
        if case.label is not None:
            _write_label(case.label, table, folder / "labelsTr" / f"{case.name}.nii.gz")

    map_cases(write, archive, threads, "writing")
    generate_dataset_json(
        str(folder),
        channel_names=dict(enumerate(channels)),
        num_training_cases=sum(case.label is not None for case in archive.cases),
        file_ending=".nii.gz",
        overwrite_image_reader_writer="SimpleITKIO",
        converted_by="nnunet-cpr",
        license="see reference",
        **dataset_json,
    )


def run_converter(command: list[str], folder: Path) -> None:
    """Run a converter of nnU-Net, and rename its data set.

    Args:
        command: the converter and its arguments.
        folder: new folder ``DatasetXXX_Name``, whose parent is the converter's ``nnUNet_raw``.

    Raises:
        Refusal: the converter failed; its log is kept.
    """
    # Without nnU-Net's other folders, whose data sets could have the same id.
    environment = {name: text for name, text in os.environ.items() if name not in FOLDER_VARIABLES}
    environment["nnUNet_raw"] = str(folder.parent)
    log = Path(tempfile.mkdtemp(prefix="nnunet-cpr-prepare-")) / "converter.log"
    run(command, log, environment)
    shutil.rmtree(log.parent)
    (written,) = folder.parent.glob("Dataset*")
    written.rename(folder)


def _images_folder(case: Case) -> str:
    return "imagesTs" if case.label is None else "imagesTr"


def copy_image(source: Path, target: Path) -> None:
    """Write an image of any format as ``.nii.gz``, with the voxels and the geometry of the source.

    Raises:
        Refusal: an image other than NIfTI, which is copied unread, cannot be read.
    """
    if not is_nifti(source):
        read_image(source).to_filename(target)
    elif source.suffix.lower() == ".gz":
        shutil.copyfile(source, target)
    else:  # with the compression of gzip's command; Python's default takes twice the time
        with open(source, "rb") as plain, gzip.open(target, "wb", 6) as compressed:
            shutil.copyfileobj(plain, compressed)


def _write_label(source: Path, table: np.ndarray, target: Path) -> None:
    """Write a segmentation with new values and the geometry of the source."""
    image = read_image(source)
    label = Nifti1Image(table[np.asarray(image.dataobj, np.uint16)], image.affine, image.header)
    label.set_data_dtype(np.uint8)
    label.to_filename(target)
