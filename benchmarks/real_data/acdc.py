"""Write ACDC as nnU-Net's Dataset027_ACDC, from the HDF5 volumes of the repository WSL4MIS.

    python benchmarks/real_data/acdc.py WSL4MIS/data/ACDC/ACDC_training_volumes
    nnUNetv2_plan_and_preprocess -d 27 -c 2d
    python benchmarks/real_data/acdc.py --splits
    python benchmarks/real_data/small_plans.py Dataset027_ACDC 2d --batch-size 4 --patch-size 192 160

Needs ``h5py``. The volumes have intensities scaled to [0, 1] and no spacing; all get the same one,
typical for cine MRI. Both frames of a patient are in the same fold. ACDC's terms allow non-commercial
research.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import h5py
import numpy as np
import SimpleITK

NAME = "Dataset027_ACDC"
LABELS = {"background": 0, "right ventricle": 1, "myocardium": 2, "left ventricle": 3}
SPACING = (1.5, 1.5, 10.0)
"""Spacing in mm, x, y, z."""
FOLDS = 5


def write_raw(volumes: Path, raw: Path) -> None:
    """Write images, labels and ``dataset.json``."""
    files = sorted(volumes.glob("patient*_frame*.h5"))
    if len(files) != 200:
        raise SystemExit(f"{volumes}: expected the 200 volumes of ACDC, found {len(files)}")
    for folder in ("imagesTr", "labelsTr"):
        (raw / folder).mkdir(parents=True)
    for path in files:
        with h5py.File(path) as volume:
            _write(
                volume["image"][...].astype(np.float32), raw / "imagesTr" / f"{path.stem}_0000.nii.gz"
            )
            _write(volume["label"][...].astype(np.uint8), raw / "labelsTr" / f"{path.stem}.nii.gz")
    description = {
        "channel_names": {"0": "MRI"},
        "labels": LABELS,
        "numTraining": len(files),
        "file_ending": ".nii.gz",
    }
    (raw / "dataset.json").write_text(json.dumps(description, indent=2))


def _write(array: np.ndarray, path: Path) -> None:
    image = SimpleITK.GetImageFromArray(array)
    image.SetSpacing(SPACING)
    SimpleITK.WriteImage(image, path)


def write_splits(raw: Path, preprocessed: Path) -> None:
    """Write nnU-Net's ``splits_final.json`` with folds of whole patients."""
    cases = sorted(path.name.removesuffix(".nii.gz") for path in (raw / "labelsTr").glob("*.nii.gz"))
    patients = sorted({case.split("_")[0] for case in cases})
    fold_of = dict(zip(np.random.default_rng(0).permutation(patients), np.arange(len(patients)) % FOLDS))
    splits = [
        {
            "train": [case for case in cases if fold_of[case.split("_")[0]] != fold],
            "val": [case for case in cases if fold_of[case.split("_")[0]] == fold],
        }
        for fold in range(FOLDS)
    ]
    (preprocessed / "splits_final.json").write_text(json.dumps(splits, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write ACDC as a data set of nnU-Net.")
    parser.add_argument("volumes", nargs="?", type=Path, help="folder of the HDF5 volumes")
    parser.add_argument("--splits", action="store_true", help="write the folds, after preprocessing")
    options = parser.parse_args()
    raw_folder = Path(os.environ["nnUNet_raw"], NAME)
    if options.volumes is not None:
        write_raw(options.volumes, raw_folder)
    if options.splits:
        write_splits(raw_folder, Path(os.environ["nnUNet_preprocessed"], NAME))
