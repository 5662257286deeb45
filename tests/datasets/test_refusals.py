"""Archives that ``nnunet-cpr prepare`` refuses, with all problems at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk
import typer
from typer.testing import CliRunner

from nnunet_cpr.cli.prepare import prepare
from nnunet_cpr.datasets.registry import DATA_SETS
from tests.helpers import archives

app = typer.Typer()
app.command()(prepare)
ORGANS = tuple(range(14))


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "nnUNet_raw"
    folder.mkdir()
    monkeypatch.setenv("nnUNet_raw", str(folder))
    for name in ("nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.delenv(name, raising=False)
    return folder


def refused(*arguments: object) -> list[str]:
    """Return the lines on stderr of the command, which must fail."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    return result.stderr.splitlines()


def assert_reported(lines: list[str], expected: dict[str, str], raw: Path) -> None:
    """Check that each case has a line with the expected words and that nothing was written."""
    *reported, last = lines
    assert [line.partition(": ")[0] for line in reported] == list(expected)
    for line, words in zip(reported, expected.values()):
        assert words in line, line
        assert "again" in line  # what to do
    assert last.endswith(f": {len(expected)} problems, see above; nothing was written")
    assert os.listdir(raw) == []


def test_btcv_reports_every_invalid_case(raw: Path, tmp_path: Path) -> None:
    training = archives.make_btcv(tmp_path, cases=16) / "RawData" / "Training"

    def image(n: int) -> Path:
        return training / "img" / f"img{n:04d}.nii.gz"

    def label(n: int) -> Path:
        return training / "label" / f"label{n:04d}.nii.gz"

    def values(n: int, dtype: type = np.uint8) -> np.ndarray:
        return archives.labels(n, ORGANS, dtype)

    label(2).unlink()
    image(3).unlink()
    archives.cut(image(4))
    archives.cut(label(5), 0.995)  # complete voxels, truncated checksum
    image(6).write_bytes(b"")
    image(7).write_bytes(b"<html>Please log in</html>")
    archives.write(label(8), np.where(values(8) == 13, 14, values(8)))
    archives.write(label(9), values(9, np.float32) + np.float32(0.5) * (values(9) == 3))
    archives.write(label(10), np.where(values(10) == 13, -1, values(10).astype(np.int16)))
    archives.write(label(11), values(11)[:-1])
    archives.write(label(12), values(12), spacing=(0.75, 0.9, 2.51))
    archives.write(label(13), values(13), origin=(-171.5, 20.25, -297.625))
    archives.write(label(14), values(14), direction=(1, 0, 0, 0, 1, 0, 0, 0, 1))
    flat = sitk.GetImageFromArray(np.zeros((12, 10), np.int16))
    sitk.WriteImage(flat, str(image(15)))
    lost = archives.picture(16, np.float32)
    lost[0, 0, 0] = np.nan
    archives.write(image(16), lost)
    archives.cut(training.parent / "Testing" / "img" / "img0061.nii.gz")
    expected = {
        "img0002": "label label/label0002.nii.gz is missing",
        "img0003": "image img/img0003.nii.gz is missing",
        "img0004": "image img/img0004.nii.gz cannot be read (Compressed file ended",
        "img0005": "label label/label0005.nii.gz cannot be read (Compressed file ended",
        "img0006": "cannot be read (damaged, or not a NIfTI file)",
        "img0007": "cannot be read (damaged, or not a NIfTI file)",
        "img0008": "label label/label0008.nii.gz: expected values of 0, 1, 2, 3, 4",
        "img0009": "13, got 3.5; ",
        "img0010": "13, got -1; ",
        "img0011": "expected the geometry of img/img0011.nii.gz, got size (12, 10, 7) instead",
        "img0012": "got spacing (0.75, 0.9, 2.51) instead of (0.75, 0.9, 2.5)",
        "img0013": "got origin (-171.5, 20.25, -297.625) instead of (-171.5, 20.25, -300.125)",
        "img0014": "got direction (1, 0, 0, 0, 1, 0, 0, 0, 1) instead of (-0.9553365,",
        "img0015": "expected 3 dimensions, got 2",
        "img0016": "has NaN or infinite voxels",
        "img0061": "image ../Testing/img/img0061.nii.gz cannot be read",
    }
    assert_reported(refused("btcv", tmp_path), expected, raw)


def test_brats2020_reports_every_invalid_case(raw: Path, tmp_path: Path) -> None:
    source = archives.make_brats(tmp_path, cases=8)

    def file(n: int, what: str) -> Path:
        return source / f"BraTS20_Training_{n:03d}" / f"BraTS20_Training_{n:03d}_{what}.nii"

    file(2, "t1ce").unlink()
    archives.cut(file(3, "t2"))
    archives.write(file(4, "seg"), archives.labels(4, (0, 1, 2, 3), np.int16))
    archives.write(file(5, "flair"), archives.picture(5), spacing=(1, 1, 1))
    file(6, "seg").unlink()
    (file(6, "seg").parent / "notes_mask.nii").write_bytes(b"not called a segmentation")
    file(7, "seg").rename(file(7, "seg").with_name("A_Segm.nii"))
    archives.write(file(7, "seg").with_name("B_Segm.nii"), archives.labels(7, (0, 1)))  # which one?
    four = sitk.JoinSeries([sitk.ReadImage(str(file(8, "t1")))] * 2)
    sitk.WriteImage(four, str(file(8, "t1")))
    expected = {
        "BraTS20_Training_002": "BraTS20_Training_002_t1ce.nii.gz is missing",
        "BraTS20_Training_003": "BraTS20_Training_003_t2.nii cannot be read (Expected 1920 bytes, got",
        "BraTS20_Training_004": "expected values of 0, 1, 2, 4, got 3; ",
        "BraTS20_Training_005": "got spacing (1, 1, 1) instead of",
        "BraTS20_Training_006": "label BraTS20_Training_006/BraTS20_Training_006_seg",
        "BraTS20_Training_007": "BraTS20_Training_007_seg.nii.gz is missing",
        "BraTS20_Training_008": "BraTS20_Training_008_t1.nii: expected 1 volumes, got 2",
    }
    assert_reported(refused("brats2020", source), expected, raw)


def test_heart_reports_every_invalid_case(raw: Path, tmp_path: Path) -> None:
    source = archives.make_decathlon(tmp_path, cases=7)  # la_003 to la_009
    (source / "labelsTr" / "la_004.nii.gz").unlink()
    (source / "imagesTr" / "la_005.nii.gz").unlink()
    archives.cut(source / "imagesTr" / "la_006.nii.gz")
    archives.write(source / "labelsTr" / "la_007.nii.gz", archives.labels(7, (0, 1, 2)))
    archives.write(source / "labelsTr" / "la_008.nii.gz", archives.labels(8, (0, 1)), spacing=(1, 1, 1))
    archives.write(source / "imagesTr" / "la_099.nii.gz", archives.picture(99, np.float32))
    archives.write(source / "labelsTr" / "la_099.nii.gz", archives.labels(99, (0, 1)))
    (source / "imagesTs" / "la_001.nii.gz").unlink()
    expected = {
        "la_099": "not listed in dataset.json",
        "la_004": "label labelsTr/la_004.nii.gz is missing",
        "la_005": "image imagesTr/la_005.nii.gz is missing",
        "la_006": "image imagesTr/la_006.nii.gz cannot be read",
        "la_007": "expected values of 0, 1, got 2; ",
        "la_008": "got spacing (1, 1, 1) instead of",
        "la_001": "image imagesTs/la_001.nii.gz is missing",
    }
    assert_reported(refused("heart", source), expected, raw)


def test_amos22_reports_every_invalid_case(raw: Path, tmp_path: Path) -> None:
    source = archives.make_amos(tmp_path)
    archives.write(source / "labelsTr" / "amos_0001.nii.gz", archives.labels(1, tuple(range(17))))
    archives.write(
        source / "labelsTr" / "amos_0004.nii.gz", archives.labels(4, (0, 1)), origin=(0, 0, 0)
    )
    (source / "labelsVa" / "amos_0008.nii.gz").unlink()
    archives.cut(source / "imagesTs" / "amos_0002.nii.gz")
    expected = {
        "amos_0001": "15, got 16; ",
        "amos_0004": "got origin (0, 0, 0) instead of",
        "amos_0008": "label labelsVa/amos_0008.nii.gz is missing",
        "amos_0002": "image imagesTs/amos_0002.nii.gz cannot be read",
    }
    assert_reported(refused("amos22", tmp_path), expected, raw)


def test_incomplete_dataset_json_is_refused(raw: Path, tmp_path: Path) -> None:
    source = archives.make_decathlon(tmp_path)
    path = source / "dataset.json"
    whole = json.loads(path.read_text())
    for key in ("labels", "training", "test", "modality"):
        path.write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        (line,) = refused("heart", source)
        assert f"{path} has no entry '{key}'" in line
    for damaged in ("{", "[]", json.dumps({**whole, "labels": {"atrium": 1}})):
        path.write_text(damaged)
        (line,) = refused("heart", source)
        assert f"{path} is damaged" in line
    path.write_text(json.dumps({**whole, "numTraining": 20}))
    assert "expected numTraining 3, the length of its list, got 20" in refused("heart", source)[0]
    assert os.listdir(raw) == []


def test_refusals_print_digits_that_show_the_difference(raw: Path, tmp_path: Path) -> None:
    training = archives.make_btcv(tmp_path, cases=2) / "RawData" / "Training"
    values = archives.labels(1, ORGANS, np.float32)
    values[values == 2] = np.float32(1.9999998)
    archives.write(training / "label" / "label0001.nii.gz", values)
    small = {"spacing": (1e-3, 1e-3, 1e-3), "direction": (1, 0, 0, 0, 1, 0, 0, 0, 1)}
    archives.write(training / "img" / "img0002.nii.gz", archives.picture(2), origin=(0, 0, 5e3), **small)
    values = archives.labels(2, ORGANS)
    shifted = training / "label" / "label0002.nii.gz"
    archives.write(shifted, values, origin=(0, 0, 5000.0005), **small)
    first, second, _ = refused("btcv", tmp_path)
    assert "13, got 1.9999998; " in first
    assert "got origin (0, 0, 5000.00049) instead of (0, 0, 5000); " in second


# SOURCE


@pytest.mark.parametrize("preset", DATA_SETS)
def test_other_layouts_are_refused(raw: Path, tmp_path: Path, preset: str) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    (line,) = refused(preset, folder)
    assert line.startswith(f"nnunet-cpr: {folder}: expected ") and line.endswith(", found nothing")
    for name in "abcdefgh":
        (folder / name).mkdir()
    (line,) = refused(preset, folder)
    assert line.endswith("found a, b, c, d, e, f and 2 more")


def test_source_that_is_no_folder_is_refused(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "RawData.zip").write_bytes(b"PK")
    for name, found in (("RawData.zip", "a file"), ("nowhere", "nothing")):
        expected = f"{tmp_path / name}: expected the folder of the extracted archive, found {found}"
        assert refused("btcv", tmp_path / name) == [f"nnunet-cpr: {expected}"]


def test_renamed_decathlon_task_is_refused(raw: Path, tmp_path: Path) -> None:
    source = archives.make_decathlon(tmp_path).rename(tmp_path / "heart")
    (line,) = refused("heart", source)
    assert "expected the name Task02_Heart" in line and "rename it" in line


# nnUNet_raw and options


def test_used_dataset_id_is_refused(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = archives.make_btcv(tmp_path)
    for taken in ("Dataset017_BTCV", "Dataset017_Other"):
        (raw / taken).mkdir()
        (line,) = refused("btcv", source)
        assert f"{raw / taken} exists; remove it or choose another id with" in line
        (raw / taken).rmdir()
    preprocessed = tmp_path / "preprocessed"
    monkeypatch.setenv("nnUNet_preprocessed", str(preprocessed))
    (preprocessed / "Dataset500_Other").mkdir(parents=True)
    (line,) = refused("btcv", source, "--dataset-id", "500")
    assert f"{preprocessed / 'Dataset500_Other'} exists" in line
    assert os.listdir(raw) == []


def test_missing_nnunet_raw_is_refused(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("nnUNet_raw", str(tmp_path / "gone"))
    assert refused("btcv", tmp_path) == [
        f"nnunet-cpr: nnUNet_raw: {tmp_path / 'gone'} does not exist; run: mkdir -p {tmp_path / 'gone'}"
    ]
    monkeypatch.delenv("nnUNet_raw")
    (line,) = refused("btcv", tmp_path)
    assert "nnUNet_raw not set" in line


def test_unknown_data_set_and_name_are_refused(raw: Path, tmp_path: Path) -> None:
    assert refused("lits", tmp_path) == [
        "nnunet-cpr: unknown data set 'lits'; choose from btcv, heart, brats2020, amos22, hippocampus"
    ]
    assert "--name: expected letters" in refused("btcv", tmp_path, "--name", "../up")[0]


def test_help_lists_every_data_set() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    for preset in DATA_SETS:
        assert preset in shown


def test_prepare_is_a_registered_command(raw: Path, tmp_path: Path) -> None:
    code = "from nnunet_cpr.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "prepare", "btcv", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"nnunet-cpr: {tmp_path}: expected RawData/Training")
