"""Archives that ``nnunet-cpr prepare`` refuses, with one line for each invalid case."""

from __future__ import annotations

import gzip
import math
import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk
import typer
from typer.testing import CliRunner

from nnunet_cpr.cli.errors import report_errors
from nnunet_cpr.cli.prepare import prepare
from tests.helpers import archives

app = typer.Typer()
app.command()(report_errors()(prepare))


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
        assert line.endswith("; extract it from the archive again")
    assert last.endswith(f": invalid cases: {len(expected)}, see above; nothing was written")
    assert os.listdir(raw) == []


def test_btcv_reports_every_invalid_case(raw: Path, tmp_path: Path) -> None:
    training = archives.make_btcv(tmp_path, cases=9) / "RawData" / "Training"

    def image(n: int) -> Path:
        return training / "img" / f"img{n:04d}.nii.gz"

    def label(n: int) -> Path:
        return training / "label" / f"label{n:04d}.nii.gz"

    def values(n: int) -> np.ndarray:
        return archives.labels(n, tuple(range(14)), np.float32)

    label(2).unlink()
    archives.cut(label(3), 0.995)  # complete voxels, truncated checksum
    image(4).write_bytes(b"<html>Please log in</html>")
    archives.write(label(5), np.where(values(5) == 2, np.float32(1.9999998), values(5)))
    archives.write(label(6), values(6)[:-1])
    archives.write(label(7), values(7), origin=(-171.5, 20.25, -297.625))
    sitk.WriteImage(sitk.GetImageFromArray(archives.picture(8)[0]), str(image(8)))
    header = bytearray(gzip.decompress(image(9).read_bytes()))
    struct.pack_into("<f", header, 292, math.inf)  # the x of the sform's offset
    image(9).write_bytes(gzip.compress(header))
    expected = {
        "img0002": "label0002.nii.gz is missing",
        "img0003": "label0003.nii.gz cannot be read (Compressed file ended",
        "img0004": "img0004.nii.gz cannot be read (Not a gzipped file",
        "img0005": "10, 11, 12, 13], got [1.9999997",  # with digits that show the difference
        "img0006": "img0006.nii.gz, got size (12, 10, 7) instead of (12, 10, 8)",
        "img0007": "img0007.nii.gz, got voxels up to 2.5 mm away",
        "img0008": "expected 3 dimensions, got 2",
        "img0009": "expected a finite affine matrix in the header",
    }
    assert_reported(refused("btcv", tmp_path), expected, raw)


@pytest.mark.parametrize("content", ["{", '{"labels": {"atrium": 1}}'])
def test_damaged_dataset_json_is_refused(content: str, raw: Path, tmp_path: Path) -> None:
    path = archives.make_decathlon(tmp_path) / "dataset.json"
    path.write_text(content)
    (line,) = refused("heart", tmp_path)
    assert f"{path} is missing, damaged or incomplete" in line
    assert os.listdir(raw) == []


@pytest.mark.parametrize(
    ("data_set", "name"),
    [
        ("heart", "imagesTr/la_099.nii.gz"),
        ("heart", "labelsTr/la_099.nii.gz"),
        ("heart", "imagesTs/la_099.nii.gz"),
        ("amos22", "imagesVa/amos_0009.nii.gz"),
    ],
)
def test_files_that_are_not_listed_are_refused(
    data_set: str, name: str, raw: Path, tmp_path: Path
) -> None:
    make = archives.make_decathlon if data_set == "heart" else archives.make_amos
    archives.write(make(tmp_path) / name, archives.labels(1, (0, 7)))
    (line,) = refused(data_set, tmp_path)
    assert f"got 1 others ({name}); move them away, or list them in dataset.json" in line
    assert os.listdir(raw) == []


@pytest.mark.parametrize("data_set", ["heart", "btcv"])
def test_unpacked_files_are_named_once(data_set: str, raw: Path, tmp_path: Path) -> None:
    """Kaggle strips ``.gz`` from names and content."""
    make = archives.make_decathlon if data_set == "heart" else archives.make_btcv
    for path in [*make(tmp_path / "archive").rglob("[!.]*.nii.gz")]:
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    (line,) = refused(data_set, tmp_path / "archive")
    assert "expected .nii.gz files, got .nii, as Kaggle" in line
    subprocess.run(line.partition("; run: ")[2], shell=True, check=True)
    result = CliRunner().invoke(app, [data_set, str(tmp_path / "archive"), "-np", "1"])
    assert result.exit_code == 0, result.output


def test_archive_before_the_end_of_amos22_is_named(raw: Path, tmp_path: Path) -> None:
    shutil.rmtree(archives.make_amos(tmp_path) / "labelsVa")
    (line,) = refused("amos22", tmp_path)
    assert "before the end of the challenge; download amos22.zip from https://zenodo.org" in line


def test_used_dataset_id_is_refused(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = archives.make_btcv(tmp_path)
    preprocessed = tmp_path / "preprocessed"
    monkeypatch.setenv("nnUNet_preprocessed", str(preprocessed))
    for taken in (raw / "Dataset017_BTCV", preprocessed / "Dataset017_Other"):
        taken.mkdir(parents=True)
        (line,) = refused("btcv", source)
        assert f"{taken} exists; remove it or choose another id with --dataset-id" in line
        taken.rmdir()
