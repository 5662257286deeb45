"""Writing and verification of nnU-Net's raw format."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk
from rich.console import Console

from nnunet_cpr.datasets import _run_converter
from nnunet_cpr.datasets.archive import Archive, Case, PrepareError, map_in_threads, progress_bar
from nnunet_cpr.datasets.volume import Unreadable, read_voxels, simpleitk_reason
from nnunet_cpr.nnunet.commands import FOLDER_VARIABLES, CommandFailed, run


def write_cases(
    archive: Archive,
    folder: Path,
    threads: int,
    console: Console,
    labels: Mapping[str, int | Sequence[int]],
    new_values: Mapping[int, int] | None = None,
    **dataset_json: Any,
) -> None:
    """Write every case with SimpleITK, and ``dataset.json``.

    Images keep their voxel type; labels become uint8. All files of a case get the geometry of its first
    image, which the check has found equal up to rounding.

    Args:
        archive: a checked archive with one channel in each image file.
        folder: new folder of the data set.
        threads: number of cases to write in parallel.
        console: for a progress bar.
        labels: labels in ``dataset.json``.
        new_values: new value of each label value of the archive; None keeps them.
        dataset_json: further entries of ``dataset.json``.
    """
    from nnunetv2.dataset_conversion.generate_dataset_json import generate_dataset_json

    for part in ("imagesTr", "labelsTr", *(["imagesTs"] if archive.unseen else [])):
        (folder / part).mkdir(parents=True)
    table = np.zeros(256, np.uint8)
    for value in archive.labels.values():
        table[value] = value if new_values is None else new_values[value]

    def write(case: Case) -> None:
        first: sitk.Image | None = None
        for channel, path in enumerate(case.images):
            image = sitk.ReadImage(str(path))
            first = image if first is None else first
            image.CopyInformation(first)
            part = "imagesTs" if case.label is None else "imagesTr"
            _write(image, folder / part / f"{case.name}_{channel:04d}.nii.gz")
        if case.label is not None:
            values = sitk.GetArrayFromImage(sitk.ReadImage(str(case.label)))
            label = sitk.GetImageFromArray(table[values.astype(np.uint8)])
            label.CopyInformation(first)
            _write(label, folder / "labelsTr" / f"{case.name}.nii.gz")

    map_in_threads(write, archive.cases, threads, "writing", console)
    generate_dataset_json(
        str(folder),
        channel_names=dict(enumerate(archive.channels)),
        labels=dict(labels),
        num_training_cases=len(archive.training),
        file_ending=".nii.gz",
        overwrite_image_reader_writer="SimpleITKIO",
        converted_by="nnunet-cpr",
        license="see reference",
        **dataset_json,
    )


def convert_with_nnunet(
    module: str,
    function: str,
    arguments: Mapping[str, Any],
    archive: Archive,
    folder: Path,
    console: Console,
) -> None:
    """Run a converter of nnU-Net.

    Args:
        module, function, arguments: the converter.
        archive: the archive that it converts, for the progress bar.
        folder: new folder ``DatasetXXX_Name``, whose parent is the converter's ``nnUNet_raw``. The
            converter's own name of the data set is replaced.
        console: for the progress bar.
    """
    raw = folder.parent
    images = len(archive.cases) * len(archive.channels)
    with progress_bar(console) as progress:
        bar = progress.add_task("writing", total=images)

        def show() -> None:
            progress.update(bar, completed=sum(1 for _ in raw.glob("Dataset*/images*/*")))

        _call(module, function, arguments, raw, show)
        show()
    (written,) = raw.glob("Dataset*")
    written.rename(folder)


def verify_data_set(folder: Path, processes: int, console: Console) -> None:
    """Read all written files completely and run nnU-Net's integrity check.

    SimpleITK, which the converters use as well, does not report a full disk, and nnU-Net's check reads
    missing voxels as zeros.

    Raises:
        PrepareError: a file is incomplete.
        CommandFailed: nnU-Net's check failed; the message names the file with its output.
    """

    def check(path: Path) -> None:
        try:
            read_voxels(path)
        except Unreadable as error:
            place = path.relative_to(folder.parent)
            raise PrepareError(f"{place} is incomplete ({error}); is the disk full?") from error

    map_in_threads(check, sorted(folder.glob("*/*.nii.gz")), processes, "verifying", console)
    with console.status("nnU-Net's integrity check"):
        _call(
            "nnunetv2.experiment_planning.verify_dataset_integrity",
            "verify_dataset_integrity",
            {"folder": str(folder), "num_processes": processes},
            folder.parent,
        )


def _call(
    module: str,
    function: str,
    arguments: Mapping[str, Any],
    raw: Path,
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Call a function of nnU-Net in a new process, with ``raw`` as its ``nnUNet_raw``.

    Its other folders are unset, since their data sets would make the dataset id ambiguous.
    """
    environment = {**os.environ, "nnUNet_raw": str(raw)}
    for name in FOLDER_VARIABLES[1:]:
        environment.pop(name, None)
    descriptor, log = tempfile.mkstemp(prefix="nnunet-cpr-prepare-", suffix=".log")
    os.close(descriptor)
    command = [sys.executable, "-m", _run_converter.__name__, module, function, json.dumps(arguments)]
    try:
        run(command, Path(log), environment, on_wait)
    except CommandFailed:  # the message names the log
        raise
    except BaseException:
        os.unlink(log)
        raise
    os.unlink(log)


def _write(image: sitk.Image, path: Path) -> None:
    try:
        sitk.WriteImage(image, str(path), useCompression=True)
    except RuntimeError as error:
        reason = simpleitk_reason(error)
        raise PrepareError(f"{path} cannot be written ({reason}); is the disk full?") from error
