"""Layouts of published data sets, and names of one's own, that ``nnunet-cpr prepare folder`` reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest
from nnunetv2.experiment_planning import verify_dataset_integrity
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from tests.helpers import archives


class Layout(NamedTuple):
    """Files, arguments, and the expected cases or the words of the refusal.

    Attributes:
        files: paths of images, and of segmentations, which are those with a ``!``.
        arguments: IMAGES, LABELS and options.
        cases: names of the cases that are written, or words of the only line.
        channels: number of channels.
    """

    files: str
    arguments: str
    cases: str
    channels: int = 1


AMOS = "imagesTr/amos_{0}.nii.gz !labelsTr/amos_{0}.nii.gz"
AUTOPET = " ".join(
    f"PETCT_{patient}/{study}/{name}.nii.gz"
    for patient, study in (("0a", "2003-NA"), ("0a", "2004-NA"), ("1b", "2003-NA"))
    for name in ("CT", "CTres", "PET", "SUV")
)
AUTOPET_LABELS = "!PETCT_0a/2003-NA/SEG.nii.gz !PETCT_0a/2004-NA/SEG.nii.gz !PETCT_1b/2003-NA/SEG.nii.gz"
TOTAL_SEGMENTATOR = (
    "s0001/ct.nii.gz !s0001/segmentations/aorta.nii.gz !s0001/segmentations/liver.nii.gz "
    "s0002/ct.nii.gz !s0002/segmentations/aorta.nii.gz !s0002/segmentations/liver.nii.gz meta.csv"
)
BRATS = "BraTS-GLI-00000-000 BraTS-GLI-00002-001"
LAYOUTS = {
    "KiTS": Layout(
        "case_00000/imaging.nii.gz !case_00000/segmentation.nii.gz "
        "case_00001/imaging.nii.gz !case_00001/segmentation.nii.gz kits.json",
        ". */segmentation.nii.gz --channels CT",
        "case_00000 case_00001",
    ),
    "KiTS, one case": Layout(
        "case_00000/imaging.nii.gz !case_00000/segmentation.nii.gz",
        "*/imaging.nii.gz */segmentation.nii.gz --channels CT",
        "case_00000",
    ),
    "KiTS, one folder": Layout(
        "case_00000/imaging.nii.gz !case_00000/segmentation.nii.gz",
        ". . --channels CT",
        "give a pattern that only the segmentations have",
    ),
    "TotalSegmentator": Layout(
        TOTAL_SEGMENTATOR,
        "*/ct.nii.gz */segmentations --channels CT",
        "['s0001_segmentations_aorta', 's0001_segmentations_liver']; give a pattern of one structure",
    ),
    "TotalSegmentator, one structure": Layout(
        TOTAL_SEGMENTATOR,
        "*/ct.nii.gz */segmentations/liver.nii.gz --channels CT",
        "s0001 s0002",
    ),
    "TopCoW": Layout(
        "imagesTr/topcow_ct_001_0000.nii.gz !cow_seg_labelsTr/topcow_ct_001.nii.gz "
        "imagesTr/topcow_mr_001_0000.nii.gz !cow_seg_labelsTr/topcow_mr_001.nii.gz "
        "roi_loc_labelsTr/topcow_ct_001.txt",
        "imagesTr cow_seg_labelsTr --channels MR",
        "topcow_ct_001 topcow_mr_001",
    ),
    "autoPET": Layout(
        f"{AUTOPET} {AUTOPET_LABELS}",
        ". */*/SEG.nii.gz --channels CT=CTres,PET=SUV",
        "PETCT_0a_2003-NA PETCT_0a_2004-NA PETCT_1b",
        channels=2,
    ),
    "autoPET, a label is missing": Layout(
        f"{AUTOPET} {AUTOPET_LABELS.partition(' ')[2]}",
        ". */*/SEG.nii.gz --channels CT=CTres,PET=SUV",
        "got images without one: ['PETCT_0a_2003-NA'], and labels without image: []",
    ),
    "ACDC": Layout(
        "p001/p001_4d.nii.gz p001/p001_frame01.nii.gz !p001/p001_frame01_gt.nii.gz "
        "p001/p001_frame12.nii.gz !p001/p001_frame12_gt.nii.gz p001/Info.cfg.txt",
        "*/*_frame??.nii.gz */*_gt.nii.gz --channels MR --match p[0-9]+_frame[0-9]+",
        "p001_frame01 p001_frame12",
    ),
    "LiTS": Layout(
        "volume-1.nii !segmentation-1.nii volume-2.nii !segmentation-2.nii",
        ". segmentation* --channels CT",
        "volume-1 volume-2",
    ),
    "BraTS 2023": Layout(
        " ".join(
            f"{'!' * (kind == 'seg')}{case}/{case}-{kind}.nii.gz"
            for case in BRATS.split()
            for kind in ("t1n", "t1c", "t2w", "t2f", "seg")
        ),
        ". */*-seg.nii.gz --channels t1n,t1c,t2w,t2f",
        BRATS,
        channels=4,
    ),
    "numbers of cases": Layout(
        " ".join(AMOS.format(n) for n in ("0001", "0004", "0005")),
        "imagesTr labelsTr --channels CT",
        "amos_0001 amos_0004 amos_0005",
    ),
    "numbers of cases from 0": Layout(
        " ".join(AMOS.format(n) for n in ("0000", "0001")),
        "imagesTr labelsTr --channels CT",
        "amos_0000 amos_0001",
    ),
    "numbers of cases, a label is missing": Layout(
        f"{AMOS.format('0001')} {AMOS.format('0004')} imagesTr/amos_0005.nii.gz",
        "imagesTr labelsTr --channels CT",
        "got images without one: ['amos_0005'], and labels without image: []",
    ),
    "numbers of channels": Layout(
        "ct/p_0000_0000.mha ct/p_0000_0001.mha !seg/p_0000.mha "
        "ct/p_0001_0000.mha ct/p_0001_0001.mha !seg/p_0001.mha",
        "ct seg --channels T1,T2",
        "p_0000 p_0001",
        channels=2,
    ),
    "a channel is missing": Layout(
        "ct/p_0000.mha ct/p_0001.mha !seg/p.mha ct/q_0000.mha !seg/q.mha",
        "ct seg --channels T1,T2",
        "q: expected the channels [0, 1], got [0]",
    ),
    "two files an image": Layout("ct/p.mhd !seg/p.img", "ct seg --channels CT", "p"),
    "capital letters": Layout(
        "ct/P0.NII.GZ !seg/P0.nii.gz ct/P1.nii.gz !seg/P1.NII.GZ", "ct seg --channels CT", "P0 P1"
    ),
    "one pair of two names": Layout(
        "ct/patientA.nii.gz !seg/patientB.nii.gz",
        "ct seg --channels CT",
        "without one: ['patientA'], and labels without image: ['patientB']; rename or move them, "
        "give patterns or --channels, or --match with the part of a path that names the case",
    ),
    "one pair that is matched": Layout(
        "ct/patientA.nii.gz !seg/patientB.nii.gz", "ct seg --channels CT --match patient", "patient"
    ),
    "names that begin with the site": Layout(
        "a/ct-p1.nrrd b/ct-p2.nrrd !seg/p1-x.nrrd !seg/p2-y.nrrd a/scout.nrrd",
        "[ab]/* seg --channels CT --match p[0-9]",
        "p1 p2",
    ),
}  # fmt: skip


def make(layout: Layout, folder: Path) -> None:
    for n, name in enumerate(layout.files.split()):
        path = folder / name.removeprefix("!")
        if path.suffix in (".csv", ".json", ".txt"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("notes")
            continue
        voxels = archives.labels(n, (0, 1)) if name.startswith("!") else archives.picture(n)
        written = path.with_name(path.name.replace(".NII.GZ", ".nii.gz"))
        archives.write(written, voxels)
        written.rename(path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_written_or_explained(
    name: str, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, folder = LAYOUTS[name], tmp_path / "data"
    make(layout, folder)
    monkeypatch.chdir(folder)
    # It starts processes, and test_own_folder.py calls it.
    monkeypatch.setattr(verify_dataset_integrity, "verify_dataset_integrity", lambda *_: None)
    command = ["prepare", "folder", *layout.arguments.split(), "--name", "New", "--write", "-np", "1"]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    if not os.listdir(raw):
        assert done.exit_code == 1 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert layout.cases in line
        return
    assert done.exit_code == 0, done.output
    (written,) = raw.iterdir()
    cases = layout.cases.split()
    assert sorted(os.listdir(written / "labelsTr")) == [f"{case}.nii.gz" for case in cases]
    expected = [f"{case}_{n:04d}.nii.gz" for case in cases for n in range(layout.channels)]
    assert sorted(os.listdir(written / "imagesTr")) == expected
    assert len(json.loads((written / "dataset.json").read_text())["channel_names"]) == layout.channels
