"""Data sets that ``nnunet-cpr prepare`` writes from tiny archives."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk
import typer
from rich.console import Console
from typer.testing import CliRunner

from nnunet_cpr._files import TEMPORARY_PREFIX, atomic_directory
from nnunet_cpr.cli import _errors
from nnunet_cpr.cli.prepare import prepare
from nnunet_cpr.datasets import _run_converter, writing
from nnunet_cpr.datasets.archive import check_cases
from nnunet_cpr.datasets.registry import DATA_SETS
from nnunet_cpr.datasets.volume import read_with_simpleitk
from nnunet_cpr.studies.definition import load
from tests.helpers import archives

QUIET = Console(quiet=True)
COMMAND = [sys.executable, "-c", "from nnunet_cpr.cli import main; main()", "prepare"]
app = typer.Typer()
app.command()(prepare)


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "nnUNet_raw"
    folder.mkdir()
    monkeypatch.setenv("nnUNet_raw", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for the log that a killed command leaves
    for name in ("nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.delenv(name, raising=False)
    return folder


def run(*arguments: object) -> str:
    """Run the real command in a process of its own, and return what it prints."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments), "-np", "1"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def run_here(*arguments: object) -> str:
    """Run the command and the functions of nnU-Net that it calls in this process; return its output."""

    def call_here(module: str, function: str, arguments: dict, raw: Path, *_: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("nnUNet_raw", str(raw))
            getattr(importlib.import_module(module), function)(**json.loads(json.dumps(arguments)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_call", call_here)
        # Python may lose a SIGTERM that reaches a forked process of nnU-Net's pool at its start.
        patch.setattr(_errors, "raise_on_termination", contextlib.nullcontext)
        done = CliRunner().invoke(app, [*map(str, arguments), "-np", "1"])
    assert done.exit_code == 0, done.output
    return done.output


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


@pytest.mark.slow
def test_btcv_is_converted(raw: Path, tmp_path: Path) -> None:
    source = archives.make_btcv(tmp_path)
    output = run("btcv", source)
    folder = raw / "Dataset017_BTCV"
    for line in (
        "note: expected the 30 training cases of the challenge, found 4",
        f"{folder} is ready. Next:",
        "nnUNetv2_plan_and_preprocess -d 17 --verify_dataset_integrity",
        "nnunet-cpr study run btcv --dataset Dataset017_BTCV\n",
    ):
        assert line in output
    assert os.listdir(raw) == ["Dataset017_BTCV"]
    assert files(folder, "imagesTr") == [f"img000{n}_0000.nii.gz" for n in (1, 2, 3, 4)]
    assert files(folder, "labelsTr") == [f"img000{n}.nii.gz" for n in (1, 2, 3, 4)]
    assert files(folder, "imagesTs") == ["img0061_0000.nii.gz"]
    training = source / "RawData" / "Training"
    for n in (1, 2, 3, 4):
        assert_same(folder / "imagesTr" / f"img{n:04d}_0000.nii.gz", training / f"img/img{n:04d}.nii.gz")
        label = folder / "labelsTr" / f"img{n:04d}.nii.gz"
        assert sitk.ReadImage(str(label)).GetPixelID() == sitk.sitkUInt8
        expected = archives.read(training / f"label/label{n:04d}.nii.gz")
        np.testing.assert_array_equal(archives.read(label), expected)
        assert_on_grid(label)
    written = description(folder)
    assert written["channel_names"] == {"0": "CT"} and written["numTraining"] == 4
    assert written["labels"]["background"] == 0 and written["labels"]["left adrenal gland"] == 13
    assert sorted(written["labels"].values()) == list(range(14))
    assert (
        written["file_ending"] == ".nii.gz" and written["overwrite_image_reader_writer"] == "SimpleITKIO"
    )


def test_brats2020_is_converted(raw: Path, tmp_path: Path) -> None:
    source = archives.make_brats(tmp_path)
    strange = "W39_1998.09.19_Segm.nii"  # as case 355 of the challenge has it
    case = source / "BraTS20_Training_002"
    (case / "BraTS20_Training_002_seg.nii").rename(case / strange)
    output = run_here("brats2020", tmp_path)
    assert f"BraTS20_Training_002: using {strange} as BraTS20_Training_002_seg" in output
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
    assert len(files(folder, "imagesTr")) == 12 and len(files(folder, "labelsTr")) == 3
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
    output = run_here("heart", source, "--dataset-id", 502, "--name", "Left_Atrium")
    folder = raw / "Dataset502_Left_Atrium"
    assert os.listdir(raw) == [folder.name]
    assert "nnUNetv2_plan_and_preprocess -d 502" in output
    assert "nnunet-cpr study run heart --dataset Dataset502_Left_Atrium\n" in output
    for n in (3, 4, 5):
        assert_same(folder / f"imagesTr/la_{n:03d}_0000.nii.gz", source / f"imagesTr/la_{n:03d}.nii.gz")
        assert_same(folder / f"labelsTr/la_{n:03d}.nii.gz", source / f"labelsTr/la_{n:03d}.nii.gz")
    assert len(files(folder, "imagesTr")) == 3 and files(folder, "imagesTs") == ["la_001_0000.nii.gz"]
    written = description(folder)
    assert written["channel_names"] == {"0": "MRI"} and written["numTraining"] == 3
    assert written["labels"] == {"background": 0, "left atrium": 1}


def test_amos22_is_converted(raw: Path, tmp_path: Path) -> None:
    source = archives.make_amos(tmp_path)
    archives.cut(source / "imagesTr" / "amos_0507.nii.gz")  # MRI, which is ignored
    run_here("amos22", tmp_path)
    folder = raw / "Dataset218_AMOS2022_postChallenge_task1"
    assert os.listdir(raw) == [folder.name]
    assert files(folder, "labelsTr") == [f"amos_000{n}.nii.gz" for n in (1, 4, 8)]
    assert files(folder, "imagesTs") == ["amos_0002_0000.nii.gz"]
    for n, part in ((1, "Tr"), (4, "Tr"), (8, "Va")):
        name = f"amos_{n:04d}"
        assert_same(folder / f"imagesTr/{name}_0000.nii.gz", source / f"images{part}/{name}.nii.gz")
        assert_same(folder / f"labelsTr/{name}.nii.gz", source / f"labels{part}/{name}.nii.gz")
    written = description(folder)
    assert written["numTraining"] == 3 and sorted(written["labels"].values()) == list(range(16))


@pytest.mark.release  # test_archive_to_report.py does so in the slow stage
def test_prepared_data_set_can_be_preprocessed(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "SIZE", (32, 28, 16))
    run("brats2020", archives.make_brats(tmp_path))
    preprocessed = tmp_path / "nnUNet_preprocessed"
    monkeypatch.setenv("nnUNet_preprocessed", str(preprocessed))
    monkeypatch.setenv("nnUNet_results", str(tmp_path / "nnUNet_results"))
    program = Path(sys.executable).parent / "nnUNetv2_plan_and_preprocess"
    done = subprocess.run(
        [program, "-d", "82", "-c", "3d_fullres", "-np", "1", "--verify_dataset_integrity"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = preprocessed / "Dataset082_BraTS2020" / "nnUNetPlans_3d_fullres"
    assert len(list(folder.glob("*.pkl"))) == 3


@pytest.mark.slow
def test_real_hippocampus_archive_is_converted(raw: Path, real_data: Path) -> None:
    run("hippocampus", real_data)
    cases = len(description(real_data)["training"])
    assert len(files(raw / "Dataset004_Hippocampus", "labelsTr")) == cases


@pytest.mark.parametrize("place", [".", "Abdomen", "Abdomen/RawData", "Abdomen/RawData/Training"])
def test_btcv_is_found_in_each_folder(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archives.make_btcv(tmp_path)
    monkeypatch.chdir(tmp_path / place)
    archive = DATA_SETS["btcv"].open(Path("."))
    assert len(archive.training) == 4
    assert [case.name for case in archive.unseen] == ["img0061"]
    check_cases(archive, 2, QUIET)


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_brats2020_may_be_compressed(tmp_path: Path, ending: str) -> None:
    source = archives.make_brats(tmp_path, ending=ending)
    archive = DATA_SETS["brats2020"].open(source)
    check_cases(archive, 2, QUIET)
    assert archive.training[0].label == source / f"BraTS20_Training_001/BraTS20_Training_001_seg{ending}"


def test_fourth_dimension_holds_channels(tmp_path: Path) -> None:
    source = archives.make_decathlon(tmp_path, "Task04_Hippocampus", channels=2)
    archive = DATA_SETS["hippocampus"].open(source)
    check_cases(archive, 2, QUIET)
    assert archive.channels == ["MRI0", "MRI1"]


def test_rounding_differences_in_geometry_are_removed(tmp_path: Path) -> None:
    training = archives.make_btcv(tmp_path) / "RawData" / "Training"
    archives.write(
        training / "label" / "label0002.nii.gz",
        archives.labels(2, tuple(range(14))),
        origin=tuple(x + 1e-4 for x in archives.ORIGIN),
        spacing=tuple(x * (1 + 2e-6) for x in archives.SPACING),
    )
    data_set = DATA_SETS["btcv"]
    archive = data_set.open(training)
    check_cases(archive, 1, QUIET)
    folder = tmp_path / "Dataset017_BTCV"
    data_set.write(archive, folder, 2, QUIET)
    image = read_with_simpleitk(folder / "imagesTr" / "img0002_0000.nii.gz")
    label = read_with_simpleitk(folder / "labelsTr" / "img0002.nii.gz")
    np.testing.assert_array_equal(image.origin, label.origin)
    np.testing.assert_array_equal(image.spacing, label.spacing)
    np.testing.assert_array_equal(image.direction, label.direction)


def start_and_signal(raw: Path, tmp_path: Path, number: int) -> tuple[int, str]:
    """Signal the command when it has begun to write; return its exit status and stderr."""
    source = archives.make_decathlon(tmp_path)
    process = subprocess.Popen(
        [*COMMAND, "heart", str(source), "-np", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 600
    while not list(raw.glob(f"{TEMPORARY_PREFIX}*/Dataset*")):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=600)
    return process.returncode, said


def test_interrupt_leaves_nothing(raw: Path, tmp_path: Path) -> None:
    status, said = start_and_signal(raw, tmp_path, signal.SIGINT)
    assert status == 130 and said == "nnunet-cpr: interrupted; nothing was written\n"
    assert os.listdir(raw) == []


def test_killed_preparation_leaves_no_data_set(raw: Path, tmp_path: Path) -> None:
    status, _ = start_and_signal(raw, tmp_path, signal.SIGKILL)
    assert status == -signal.SIGKILL
    (left,) = os.listdir(raw)
    assert not left.startswith("Dataset")
    with atomic_directory(raw / "Dataset001_Next") as folder:
        assert not (raw / left).exists()
        folder.mkdir()
    assert os.listdir(raw) == ["Dataset001_Next"]


def test_converter_exits_with_the_killed_command() -> None:
    arguments = json.dumps({"args": ["sh", "-c", "echo started; sleep 3600"]})
    converter = [sys.executable, "-m", _run_converter.__name__, "subprocess", "run", arguments]
    command = f"import subprocess; subprocess.run({converter!r}, start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    process.kill()
    process.communicate(timeout=300)  # the pipe closes when the last of them has ended


def test_concurrent_runs_keep_their_temporary_folders(raw: Path) -> None:
    with atomic_directory(raw / "Dataset001_A") as one, atomic_directory(raw / "Dataset002_B") as other:
        assert one.parent.is_dir()
        one.mkdir()
        other.mkdir()
    assert sorted(os.listdir(raw)) == ["Dataset001_A", "Dataset002_B"]


def test_full_disk_leaves_nothing(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = archives.make_btcv(tmp_path)

    def fail(image: sitk.Image, path: str, **_: object) -> None:
        Path(path).write_bytes(b"half")
        raise RuntimeError("Exception thrown in SimpleITK: ITK ERROR: cannot\nwrite")

    monkeypatch.setattr(sitk, "WriteImage", fail)
    result = CliRunner().invoke(app, ["btcv", str(source)])
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("nnunet-cpr: ") and "cannot be written (cannot write)" in line
    assert os.listdir(raw) == []


@pytest.mark.slow
def test_data_set_failing_the_integrity_check_is_removed(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = archives.make_btcv(tmp_path)
    data_set = DATA_SETS["btcv"]
    write = type(data_set).write

    def lose_a_label(self: object, archive: object, folder: Path, *rest: object) -> None:
        write(data_set, archive, folder, *rest)
        (folder / "labelsTr" / "img0001.nii.gz").unlink()

    monkeypatch.setattr(type(data_set), "write", lose_a_label)
    result = CliRunner().invoke(app, ["btcv", str(source), "-np", "1"])
    assert result.exit_code == 1 and os.listdir(raw) == []
    (line,) = result.stderr.splitlines()
    assert "not all training cases have a label file" in line
