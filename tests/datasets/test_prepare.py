"""Data sets that ``nnunet-cpr prepare`` writes from tiny archives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nibabel
import numpy as np
import SimpleITK as sitk
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.datasets.challenges import DATA_SETS
from nnunet_cpr.files import TEMPORARY_PREFIX
from nnunet_cpr.studies.study_file import load
from tests.helpers import archives


def run(*arguments: object) -> str:
    """Run the command and return its output."""
    done = CliRunner().invoke(app, ["prepare", *map(str, arguments), "-np", "1"])
    assert done.exit_code == 0, done.output
    return done.stdout


def description(folder: Path) -> dict:
    return json.loads((folder / "dataset.json").read_text())


def files(folder: Path, part: str) -> list[str]:
    return sorted(path.name for path in (folder / part).iterdir())


def assert_same(written: Path, source: Path) -> None:
    """Check that voxels, voxel type and geometry are equal."""
    one, other = sitk.ReadImage(str(written)), sitk.ReadImage(str(source))
    assert one.GetPixelID() == other.GetPixelID()
    np.testing.assert_array_equal(sitk.GetArrayFromImage(one), sitk.GetArrayFromImage(other))
    assert_on_grid(written)


def assert_on_grid(path: Path) -> None:
    image = sitk.ReadImage(str(path))
    assert image.GetSize() == archives.SIZE
    np.testing.assert_allclose(image.GetSpacing(), archives.SPACING, rtol=1e-6)
    np.testing.assert_allclose(image.GetOrigin(), archives.ORIGIN, rtol=1e-6)
    np.testing.assert_allclose(image.GetDirection(), archives.DIRECTION, atol=1e-6)


def test_data_sets_have_names_of_the_presets() -> None:
    for preset, data_set in DATA_SETS.items():
        assert load(preset).datasets == (f"Dataset{data_set.number:03d}_{data_set.name}",)


def test_btcv_is_converted(raw: Path, tmp_path: Path) -> None:
    source = archives.make_btcv(tmp_path)
    folder = raw / "Dataset017_BTCV"
    assert run("btcv", source).splitlines()[-3:] == [
        f"{folder}: 5 cases. Next:",
        "  nnUNetv2_plan_and_preprocess -d 17 --verify_dataset_integrity",
        "  nnunet-cpr study run btcv --dataset Dataset017_BTCV",
    ]
    assert os.listdir(raw) == ["Dataset017_BTCV"]
    assert files(folder, "imagesTr") == [f"img000{n}_0000.nii.gz" for n in (1, 2, 3, 4)]
    assert files(folder, "labelsTr") == [f"img000{n}.nii.gz" for n in (1, 2, 3, 4)]
    assert files(folder, "imagesTs") == ["img0061_0000.nii.gz"]
    training = source / "RawData" / "Training"
    assert_same(folder / "imagesTr" / "img0002_0000.nii.gz", training / "img" / "img0002.nii.gz")
    label = folder / "labelsTr" / "img0002.nii.gz"
    assert archives.read(label).dtype == np.uint8
    expected = archives.read(training / "label" / "label0002.nii.gz")
    np.testing.assert_array_equal(archives.read(label), expected)
    assert_on_grid(label)
    written = description(folder)
    assert written["channel_names"] == {"0": "CT"} and written["numTraining"] == 4
    assert written["labels"]["background"] == 0 and written["labels"]["left adrenal gland"] == 13
    assert sorted(written["labels"].values()) == list(range(14))
    assert written["overwrite_image_reader_writer"] == "SimpleITKIO"


def test_fourth_axis_with_one_volume_is_dropped(raw: Path, tmp_path: Path) -> None:
    training = archives.make_btcv(tmp_path) / "RawData" / "Training"
    for path in (training / "img" / "img0001.nii.gz", training / "label" / "label0001.nii.gz"):
        image = nibabel.load(path)
        with_axis = nibabel.Nifti1Image(np.asarray(image.dataobj)[..., None], image.affine, image.header)
        path.unlink()
        with_axis.to_filename(path)
        assert nibabel.load(path).shape == (*archives.SIZE, 1)
    run("btcv", tmp_path)
    for written in ("imagesTr/img0001_0000.nii.gz", "labelsTr/img0001.nii.gz"):
        assert_on_grid(raw / "Dataset017_BTCV" / written)


def test_brats2020_is_converted(raw: Path, tmp_path: Path) -> None:
    source = archives.make_brats(tmp_path)
    strange = "W39_1998.09.19_Segm.nii"  # as case 355 of the challenge has it
    case = source / "BraTS20_Training_002"
    (case / "BraTS20_Training_002_seg.nii").rename(case / strange)
    (source / "BraTS20_Training_003.zip").write_bytes(b"PK")
    run("brats2020", tmp_path)
    folder = raw / "Dataset082_BraTS2020"
    for n in (1, 2, 3):
        name = f"BraTS20_Training_{n:03d}"
        for channel, modality in enumerate(("t1", "t1ce", "t2", "flair")):
            written = folder / "imagesTr" / f"{name}_{channel:04d}.nii.gz"
            assert_same(written, source / name / f"{name}_{modality}.nii")
        before = archives.read(source / name / (strange if n == 2 else f"{name}_seg.nii"))
        after = archives.read(folder / "labelsTr" / f"{name}.nii.gz")
        assert after.dtype == np.uint8
        for old, new in ((0, 0), (1, 2), (2, 1), (4, 3)):
            assert (before == old).any()
            np.testing.assert_array_equal(before == old, after == new)
        assert_on_grid(folder / "labelsTr" / f"{name}.nii.gz")
    written = description(folder)
    assert written["channel_names"] == {"0": "T1", "1": "T1ce", "2": "T2", "3": "Flair"}
    assert written["labels"] == {
        "background": 0,
        "whole tumor": [1, 2, 3],
        "tumor core": [2, 3],
        "enhancing tumor": [3],
    }
    assert written["regions_class_order"] == [1, 2, 3]


def test_heart_is_converted_with_another_id_and_name(raw: Path, tmp_path: Path) -> None:
    source = archives.make_decathlon(tmp_path)
    output = run("heart", source, "--dataset-id", 502, "--name", "Left_Atrium")
    folder = raw / "Dataset502_Left_Atrium"
    assert os.listdir(raw) == [folder.name]
    assert "study run heart --dataset Dataset502_Left_Atrium\n" in output
    assert_same(folder / "imagesTr/la_003_0000.nii.gz", source / "imagesTr/la_003.nii.gz")
    assert_same(folder / "labelsTr/la_003.nii.gz", source / "labelsTr/la_003.nii.gz")
    assert len(files(folder, "imagesTr")) == 3 and files(folder, "imagesTs") == ["la_001_0000.nii.gz"]
    written = description(folder)
    assert written["channel_names"] == {"0": "MRI"} and written["numTraining"] == 3
    assert written["labels"] == {"background": 0, "left atrium": 1}


def test_amos22_is_converted(raw: Path, tmp_path: Path) -> None:
    source = archives.make_amos(tmp_path)
    archives.cut(source / "imagesTr" / "amos_0507.nii.gz")  # MRI, which is ignored
    run("amos22", tmp_path)
    folder = raw / "Dataset218_AMOS2022_postChallenge_task1"
    assert os.listdir(raw) == [folder.name]
    assert files(folder, "labelsTr") == [f"amos_000{n}.nii.gz" for n in (1, 4, 8)]
    assert files(folder, "imagesTs") == ["amos_0002_0000.nii.gz"]
    for n, part in ((1, "Tr"), (4, "Tr"), (8, "Va")):
        name = f"amos_{n:04d}"
        assert_same(folder / f"imagesTr/{name}_0000.nii.gz", source / f"images{part}/{name}.nii.gz")
        assert_same(folder / f"labelsTr/{name}.nii.gz", source / f"labels{part}/{name}.nii.gz")
    assert description(folder)["numTraining"] == 3


def test_interrupted_command_leaves_nothing(raw: Path, tmp_path: Path) -> None:
    source = archives.make_decathlon(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", "from nnunet_cpr.cli import main; main()"]
        + ["prepare", "heart", str(source), "-np", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 600
    while not list(raw.glob(f"{TEMPORARY_PREFIX}*/Dataset*")):  # it has begun to write
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors == "nnunet-cpr: interrupted; nothing was written\n"
    assert os.listdir(raw) == []
