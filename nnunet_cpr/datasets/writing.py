"""Writing nnU-Net's raw format so that a data set appears whole and checked, or not at all."""

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
from nnunet_cpr.datasets.archive import Archive, Case, PrepareError, in_parallel, progress_bar
from nnunet_cpr.datasets.volume import Unreadable, read_voxels, simpleitk_reason
from nnunet_cpr.nnunet.commands import CommandFailed, run


def write_cases(
    archive: Archive,
    folder: Path,
    processes: int,
    console: Console,
    labels: Mapping[str, int | Sequence[int]],
    new_values: Mapping[int, int] | None = None,
    **dataset_json: Any,
) -> None:
    """Write every case with SimpleITK, and ``dataset.json``.

    Images keep their type of voxels; labels become uint8. All files of a case get the geometry of its
    first image, which the check has found equal up to rounding: so nnU-Net sees no difference at all.

    Args:
        archive: a checked one with one channel in each image file.
        folder: the data set's; not there yet.
        processes: how many cases at the same time.
        console: for a progress bar.
        labels: for ``dataset.json``.
        new_values: what each value of the archive's labels becomes, if not what it is.
        dataset_json: more entries for it.
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

    in_parallel(write, archive.cases, processes, "writing", console)
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


def convert(
    module: str,
    function: str,
    arguments: Mapping[str, Any],
    archive: Archive,
    folder: Path,
    console: Console,
) -> None:
    """Run one of nnU-Net's converters, which write to the ``nnUNet_raw`` of their environment.

    Args:
        module, function, arguments: the converter.
        archive: what it converts, for the progress bar.
        folder: ``DatasetXXX_Name``, in a folder that is ``nnUNet_raw`` meanwhile. The converter makes
            a name of its own, which this one replaces.
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


def verify(folder: Path, processes: int, console: Console) -> None:
    """Read all that was written to its end, then nnU-Net's own check of a data set.

    SimpleITK, which the converters use, too, says nothing when the disk is full, and nnU-Net's check
    takes what is missing in a file for zeros.

    Raises:
        PrepareError: a file is not whole.
        CommandFailed: nnU-Net found something; the message names the file with its words.
    """

    def check(path: Path) -> None:
        try:
            read_voxels(path)
        except Unreadable as error:
            place = path.relative_to(folder.parent)
            raise PrepareError(f"{place} was not written whole ({error}); is the disk full?") from error

    in_parallel(check, sorted(folder.glob("*/*.nii.gz")), processes, "reading what was written", console)
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
    """Call a function of nnU-Net in a process of its own, with ``raw`` as its ``nnUNet_raw``.

    Its other folders are unknown there: whether a number is free has been seen before.
    """
    environment = {**os.environ, "nnUNet_raw": str(raw)}
    for name in ("nnUNet_preprocessed", "nnUNet_results"):
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
