"""Data sets that ``nnunet-cpr prepare folder`` makes of folders of images and segmentations."""

from __future__ import annotations

import gzip
import json
import locale
import os
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.datasets import formats
from tests.helpers import archives


def run(tmp_path: Path, *options: str, status: int = 0) -> str:
    """Run the command on the folders ``ct`` and ``masks``, and return its output."""
    folders = [str(tmp_path / "ct"), str(tmp_path / "masks")]
    command = ["prepare", "folder", *folders, "--name", "Liver", "-np", "1", *options]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    assert done.exit_code == status, done.output
    return done.output


def put_into_one_folder(parent: Path) -> None:
    """Put the segmentations to the images, as many archives have them, and give the folder twice."""
    for path in (parent / "masks").iterdir():
        path.rename(parent / "ct" / f"{path.stem}-label{path.suffix}")
    (parent / "masks").rmdir()
    (parent / "masks").symlink_to(parent / "ct")


def write_series(folder: Path, image: sitk.Image) -> None:
    """Write a DICOM series."""
    folder.mkdir(parents=True)
    encoding = locale.setlocale(locale.LC_CTYPE)
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    direction = np.reshape(image.GetDirection(), (3, 3))
    for k in range(image.GetDepth()):
        piece = image[:, :, k]
        position = image.TransformIndexToPhysicalPoint((0, 0, k))
        piece.SetMetaData("0020|0032", "\\".join(map(str, position)))
        piece.SetMetaData("0020|0037", "\\".join(map(str, [*direction[:, 0], *direction[:, 1]])))
        piece.SetMetaData("0020|000e", "1.2.3")
        writer.SetFileName(str(folder / f"{k}.dcm"))
        writer.Execute(piece)
    locale.setlocale(locale.LC_CTYPE, encoding)  # which GDCM's writer changes


@pytest.mark.parametrize("ending", [".nrrd", ".mha", ".nii", ".nii.gz", ".mgz", ""])
def test_formats_are_read_with_their_geometry(ending: str, tmp_path: Path) -> None:
    archives.write(tmp_path / "source.nii.gz", archives.picture(1))
    source, path = sitk.ReadImage(str(tmp_path / "source.nii.gz")), tmp_path / f"image{ending}"
    if ending == "":
        write_series(path, source)
    elif ending == ".mgz":
        image = formats.read(tmp_path / "source.nii.gz")
        nibabel.save(nibabel.MGHImage(np.asarray(image.dataobj), image.affine), path)
    else:
        sitk.WriteImage(source, str(path))
    assert formats.is_image(path)
    formats.read(path).to_filename(tmp_path / "written.nii.gz")
    written = sitk.ReadImage(str(tmp_path / "written.nii.gz"))
    np.testing.assert_array_equal(sitk.GetArrayFromImage(written), sitk.GetArrayFromImage(source))
    for name in ("Origin", "Spacing", "Direction"):
        one, other = (getattr(each, f"Get{name}")() for each in (written, source))
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_own_images_are_shown_and_then_written(raw: Path, tmp_path: Path) -> None:
    for n in range(1, 12):
        for m, channel in enumerate(("T2", "t1")):
            path = tmp_path / "ct" / "site A" / f"Jürgen-{n}_{channel}.nrrd"
            archives.write(path, archives.picture(10 * n + m, np.float32))
        archives.write(tmp_path / "masks" / f"{n}.seg.mha", archives.labels(n, (0, 1, 4), np.int16))
    (tmp_path / "masks" / "notes.txt").write_text("by two readers")  # no image
    options = ("--channels", "T1,T2", "--label-names", "liver,tumor")
    said = run(tmp_path, *options)
    assert "0.75 0.9 2.5" in said
    assert "and 1 more\n" in said
    assert "left out (no image, hidden, or a link to nowhere): masks/notes.txt\n" in said
    assert "value 1: liver\n" in said and "value 4: tumor, becomes 2\n" in said
    assert "11 cases would be written; add --channels and --write" in said
    assert max(map(len, said.splitlines()[:25])) <= 80
    assert os.listdir(raw) == []

    written = run(tmp_path, *options, "--write")
    assert "nnUNetv2_plan_and_preprocess -d 501" in written
    assert "--trainers nnUNetTrainerSGD,nnUNetTrainerCPR --seeds 1-3 --dataset Dataset501" in written
    folder = raw / "Dataset501_Liver"
    assert os.listdir(raw) == [folder.name]
    written = json.loads((folder / "dataset.json").read_text())
    assert written["channel_names"] == {"0": "T1", "1": "T2"} and written["numTraining"] == 11
    assert written["labels"] == {"background": 0, "liver": 1, "tumor": 2}
    for channel, m in ((0, 1), (1, 0)):
        path = folder / "imagesTr" / f"site A_Jürgen-2_{channel:04d}.nii.gz"
        np.testing.assert_array_equal(archives.read(path), archives.picture(20 + m, np.float32))
        geometry = sitk.ReadImage(str(path))
        np.testing.assert_allclose(geometry.GetDirection(), archives.DIRECTION, atol=1e-6)
        np.testing.assert_allclose(geometry.GetOrigin(), archives.ORIGIN, rtol=1e-6)
    expected = archives.labels(2, (0, 1, 4))
    after = archives.read(folder / "labelsTr" / "site A_Jürgen-2.nii.gz")
    np.testing.assert_array_equal(after, np.where(expected == 4, 2, expected))
    assert "exists; remove it or choose another id" in run(tmp_path, *options, "--write", status=1)


def test_every_file_is_taken_or_named(raw: Path, tmp_path: Path) -> None:
    """Also through symbolic links to files and folders, which archives of large data sets have."""
    far = tmp_path / "far"
    for n in range(2):
        archives.write(tmp_path / "ct" / f"a{n}" / "ct.nrrd", archives.picture(n))
        archives.write(tmp_path / "masks" / f"a{n}.nrrd", archives.labels(n, (0, 1)))
        archives.write(far / f"b{n}" / "ct.nrrd", archives.picture(n))
        archives.write(far / f"mask{n}.nrrd", archives.labels(n, (0, 1)))
        (tmp_path / "ct" / f"b{n}").symlink_to(far / f"b{n}")
        (tmp_path / "masks" / f"b{n}.nrrd").symlink_to(far / f"mask{n}.nrrd")
    write_series(tmp_path / "ct" / "c", sitk.ReadImage(str(far / "b0" / "ct.nrrd")))
    archives.write(tmp_path / "masks" / "c.nrrd", archives.labels(0, (0, 1)))
    (tmp_path / "ct" / "c" / "report.txt").touch()
    (tmp_path / "ct" / "loop").symlink_to(tmp_path / "ct")
    (tmp_path / "masks" / "gone.nrrd").symlink_to(far / "gone.nrrd")
    (tmp_path / "masks" / ".trash").mkdir()
    said = run(tmp_path, "--channels", "CT", "--write")
    named = {"ct/c/report.txt", "ct/loop", "masks/.trash", "masks/gone.nrrd"}
    (line,) = [line for line in said.splitlines() if line.startswith("left out")]
    assert set(line.partition(": ")[2].split(", ")) == named
    written = os.listdir(raw / "Dataset501_Liver" / "labelsTr")
    assert sorted(written) == [f"{name}.nii.gz" for name in ("a0", "a1", "b0", "b1", "c")]


def test_image_under_two_names_is_refused(raw: Path, tmp_path: Path) -> None:
    """One patient would be in the training and in the validation cases."""
    for n in range(2):
        archives.write(tmp_path / "ct" / f"a{n}" / "ct.nrrd", archives.picture(n))
        archives.write(tmp_path / "masks" / f"a{n}" / "seg.nrrd", archives.labels(n, (0, 1)))
    for folder in ("ct", "masks"):
        (tmp_path / folder / "latest").symlink_to(tmp_path / folder / "a1")
    said = run(tmp_path, "--channels", "CT", "--write", status=1)
    assert "latest/ct.nrrd: expected each image once, got it as" in said and os.listdir(raw) == []


def test_spacing_of_tiff_is_read_where_nnunet_reads_it(raw: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name, suffix in (("a", "_0000"), ("b", ""), ("plain", "")):
        for folder, channel in (("ct", suffix), ("masks", "")):
            path = tmp_path / folder / f"{name}{channel}.tif"
            path.parent.mkdir(exist_ok=True)
            image = sitk.GetImageFromArray(generator.integers(0, 2, (6, 12, 10)).astype(np.uint8))
            sitk.WriteImage(image, str(path))
            if name != "plain":
                path.with_name(f"{name}.json").write_text('{"spacing": [20.0, 5.0, 4.0]}')
    said = run(tmp_path, "--channels", "CT")
    rows = {
        line.split()[0]: " ".join(line.split()[5:8]) for line in said.splitlines() if ".tif " in line
    }
    assert rows == {"a_0000.tif": "4 5 20", "b.tif": "4 5 20", "plain.tif": "1 1 1"}
    assert "left out" not in said and "beside a.tif: ct/plain.tif, masks/plain.tif\n" in said
    (tmp_path / "ct" / "a.json").write_text('{"spacing": [20.0, 5.0]}')
    assert "a.json: expected three positive numbers as spacing" in run(tmp_path, status=1)


GRID = np.diag([-1.5, -1.5, 10.0, 1.0])
OTHER_SPACING = np.diag([-1.0, -1.0, 1.0, 1.0])
SHIFTED = GRID + np.outer([6.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0])


def write_with_sform(path: Path, sform: np.ndarray, code: int) -> None:
    """Write NIfTI with the qform GRID and a given sform."""
    voxels = np.zeros((10, 12, 8), np.int16)
    voxels[2:4] = 1
    image = nibabel.Nifti1Image(voxels, GRID)
    image.set_qform(GRID, 1)
    image.set_sform(sform, code)
    path.parent.mkdir(exist_ok=True)
    image.to_filename(path)


def test_geometry_is_compared_as_nnunet_reads_it(raw: Path, tmp_path: Path) -> None:
    """Headers of ACDC have an sform with other voxels, and nnU-Net takes only sforms with the code 1."""
    for name, sform, code in (("acdc", OTHER_SPACING, 1), ("shifted", SHIFTED, 2)):
        write_with_sform(tmp_path / "ct" / f"{name}.nii.gz", sform, code)
        write_with_sform(tmp_path / "masks" / f"{name}.nii.gz", GRID, 1)
    said = run(tmp_path, "--channels", "MR", "--write")
    assert said.count(" 1.5 1.5 10 ") == 2
    folder = raw / "Dataset501_Liver"
    for name in ("acdc", "shifted"):
        paths = (folder / "imagesTr" / f"{name}_0000.nii.gz", folder / "labelsTr" / f"{name}.nii.gz")
        one, other = (sitk.ReadImage(str(path)) for path in paths)
        for quantity in ("Origin", "Spacing", "Direction"):
            assert getattr(one, f"Get{quantity}")() == getattr(other, f"Get{quantity}")()


def test_geometries_that_only_nibabel_reads_as_equal_are_refused(raw: Path, tmp_path: Path) -> None:
    write_with_sform(tmp_path / "ct" / "a.nii.gz", SHIFTED, 2)
    write_with_sform(tmp_path / "masks" / "a.nii.gz", SHIFTED, 1)
    said = run(tmp_path, "--channels", "MR", "--write", status=1)
    assert "got voxels up to 6 mm away" in said and os.listdir(raw) == []


def test_sides_of_voxels_are_compared_as_nnunet_does(raw: Path, tmp_path: Path) -> None:
    """Its check refuses a difference of 0.01 %, which moves no voxel by a tenth of its size."""
    archives.write(tmp_path / "ct" / "a.nrrd", archives.picture(0), spacing=(1.0, 1.0, 2.0))
    path = tmp_path / "masks" / "a.nrrd"
    archives.write(path, archives.labels(0, (0, 1)), spacing=(1.0, 1.0, 2.0002))
    said = run(tmp_path, status=1)
    assert "got voxels of 1 x 1 x 2.0002 mm instead of 1 x 1 x 2 mm" in said


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.nii", gzip.compress(b"\x5c\x01", mtime=0), "got gzip; rename it to a.nii.gz"),
        ("a.nii.gz", b"\x5c\x01", "Not a gzipped file; remove .gz from its name if it is an image"),
        ("a.nii", b"<html>Please log in</html>", "expected NIfTI-1, which nnU-Net reads, got something"),
        ("a.nrrd", b"NRRD0004\n", "a.nrrd cannot be read ("),
        ("a.png", None, "expected 3 dimensions, got 2; nnU-Net reads 2-D images such as PNG itself"),
        ("a.mha", b"<html>Please log in</html>", "a.mha cannot be read ("),
    ],
)
def test_file_that_is_no_image_is_explained(
    name: str, content: bytes | None, expected: str, raw: Path, tmp_path: Path
) -> None:
    archives.write(tmp_path / "masks" / "a.nrrd", archives.labels(0, (0, 1)))
    (tmp_path / "ct").mkdir()
    if content is None:
        sitk.WriteImage(sitk.Image(8, 8, sitk.sitkUInt8), str(tmp_path / "ct" / name))
    else:
        (tmp_path / "ct" / name).write_bytes(content)
    line, last = run(tmp_path, "--channels", "CT", "--write", status=1).splitlines()[-2:]
    assert expected in line and "mend the file, or move the case away" in line
    assert last.endswith("invalid cases: 1, see above; nothing was written")


def test_labels_are_named_and_numbered_anew(raw: Path, tmp_path: Path) -> None:
    """Values of FreeSurfer are above 255; a segmentation without any is named."""
    for n, values in enumerate(((0, 17, 1035), (0, 1035), (0,), (0,))):
        archives.write(tmp_path / "ct" / f"p{n}" / "t1.mha", archives.picture(n))
        ending = (".mha", ".nii.gz")[n % 2]
        path = tmp_path / "masks" / f"p{n}" / f"aseg{ending}"
        archives.write(path, archives.labels(n, values, np.int64))
    shown = run(tmp_path, "--channels", "T1", "--label-names", "hippocampus,insula")
    assert "value 17: hippocampus, becomes 1\nvalue 1035: insula, becomes 2\n" in shown
    assert "0 is the only value of: p2, p3\n" in shown and "channel T1: ZScoreNormalization\n" in shown
    assert "p1/t1.mha" in shown and "p1/aseg.nii.gz" in shown
    said = run(tmp_path, "--channels", "T1", "--label-names", "insula", "--write", status=1)
    assert "p1/aseg.nii.gz" in said  # with the values that need names
    assert said.endswith("--label-names: expected a name for each of the values [17, 1035], got 1\n")
    run(tmp_path, "--channels", "T1", "--write")
    folder = raw / "Dataset501_Liver"
    before = archives.labels(0, (0, 17, 1035), np.int64)
    after = archives.read(folder / "labelsTr" / "p0.nii.gz")
    np.testing.assert_array_equal(after, np.searchsorted([0, 17, 1035], before))
    written = json.loads((folder / "dataset.json").read_text())
    assert written["labels"] == {"background": 0, "label 17": 1, "label 1035": 2}


@pytest.mark.parametrize(
    ("values", "got"), [((0,), "got 0 in all"), (tuple(range(300)), "got 299 in all")]
)
def test_images_in_place_of_labels_are_refused(
    values: tuple[int, ...], got: str, raw: Path, tmp_path: Path
) -> None:
    archives.write(tmp_path / "ct" / "a.nrrd", archives.picture(0))
    archives.write(tmp_path / "masks" / "a.nrrd", archives.labels(0, values, np.int16))
    said = run(tmp_path, "--channels", "CT", "--write", status=1)
    assert f"masks: expected 1 to 255 values above 0, {got}" in said and os.listdir(raw) == []


def test_all_cases_and_files_are_shown_on_request(raw: Path, tmp_path: Path) -> None:
    for n in range(12):
        archives.write(tmp_path / "ct" / f"p{n}.nrrd", archives.picture(n))
        archives.write(tmp_path / "masks" / f"p{n}.nrrd", archives.labels(n, (0, 1)))
        (tmp_path / "ct" / f"notes {n}.txt").touch()
    shown = run(tmp_path)
    assert "--all shows them and 2 more\n" in shown and ", 2 more, which --all shows\n" in shown
    shown = run(tmp_path, "--all")
    assert "more" not in shown and "p9.nrrd" in shown and "notes 9.txt" in shown
    for n in range(7, 12):
        (tmp_path / "masks" / f"p{n}.nrrd").unlink()
    assert "without one: ['p10', 'p11', 'p7', '2 more, which --all shows']" in run(tmp_path, status=1)
    assert "without one: ['p10', 'p11', 'p7', 'p8', 'p9']" in run(tmp_path, "--all", status=1)


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        (
            lambda p: archives.write(p / "ct" / "new.nrrd", archives.picture(1)),
            (),
            "without one: ['new'], and labels without image: []",
        ),
        (lambda p: (p / "ct" / "a.nrrd").unlink(), (), "labels without image: ['a']"),
        (lambda p: archives.write(p / "ct" / "a.mha", archives.picture(1)), (), "a: expected one file"),
        (
            lambda p: archives.write(p / "ct" / "a_0000.mha", archives.picture(1)),
            (),
            "a: expected one file a channel",
        ),
        (lambda p: put_into_one_folder(p), (), "expected images and segmentations in two folders"),
        (lambda p: None, ("--channels", "T1,T2"), "a: expected the channels [0, 1], got [0]"),
        (lambda p: None, ("--label-names", "liver,tumor"), "a name for each of the values [1], got 2"),
        (lambda p: None, ("--label-names", "background"), "expected different names, no background"),
        (lambda p: None, ("--write",), "--channels: expected their names"),
        (
            lambda p: archives.write(p / "masks" / "a.nrrd", archives.labels(1, (0, 1))[:-1]),
            (),
            "got size (12, 10, 7) instead of (12, 10, 8); mend the file, or move the case away",
        ),
        (
            lambda p: archives.write(p / "ct" / "a.nrrd", np.full((8, 10, 12), np.nan)),
            (),
            "a.nrrd: expected finite voxels, got 960 that are NaN or infinite",
        ),
        (lambda p: None, ("--channels", "CT,"), "--channels: expected names such as CT, or T1,T2"),
        (lambda p: None, ("--match", "("), "--match: expected a regular expression, got '('"),
        (lambda p: None, ("--match", "[0-9]+"), "left out (by --channels or --match): ct/a.nrrd, "),
        (
            lambda p: archives.write(p / "masks" / "a.nrrd", archives.picture(1, np.float32)),
            (),
            "expected labels from 0 to 65535, got [-",
        ),
        (
            lambda p: write_series(p / "masks" / "new", sitk.ReadImage(str(p / "ct" / "a.nrrd"))),
            (),
            "labels without image: ['new']",
        ),
    ],
)  # fmt: skip
def test_own_images_that_do_not_agree_are_refused(
    change: Callable[[Path], None], options: tuple[str, ...], expected: str, raw: Path, tmp_path: Path
) -> None:
    for n, name in enumerate("abcde"):
        archives.write(tmp_path / "ct" / f"{name}.nrrd", archives.picture(n))
        archives.write(tmp_path / "masks" / f"{name}.nrrd", archives.labels(n, (0, 1)))
    change(tmp_path)
    assert expected in run(tmp_path, *options, status=1)
    assert os.listdir(raw) == []
