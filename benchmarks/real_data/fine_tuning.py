"""Write a data set to pretrain on, and folds to fine-tune on, from the two halves of Hippocampus.

    python benchmarks/real_data/fine_tuning.py
    nnUNetv2_plan_and_preprocess -d 14 --no_pp
    nnUNetv2_move_plans_between_datasets -s 4 -t 14 -sp nnUNetPlansSmallPatch -tp nnUNetPlansSmallPatch
    nnUNetv2_preprocess -d 14 -plans_name nnUNetPlansSmallPatch -c 3d_fullres
    nnUNetv2_train 14 3d_fullres all -p nnUNetPlansSmallPatch -device cpu -tr \
nnUNetTrainerSGD_lr1en1_momentum0p9_warmup100_40epochs_50iters_seed1_on_nnUNetTrainerFastCPU

Needs the splits that the first training or ``nnunet-cpr study run`` with five folds writes, and comes
after ``few_cases.py``, which removes these folds. ``Dataset014_HippocampusHalf`` has one half of the
cases and the anterior label only, the posterior part being background. The folds are of the other
half, with both labels: 500, 501 and 502 to compare, 600 and 601 to choose settings. All have 12
training cases, no case is in two of the folds 500 to 502, and none of theirs is in 600 or 601. The
same cases are drawn every time. nnU-Net takes a fold's number as its position in
``splits_final.json``; positions in between repeat fold 0.
"""

import json
import os
import random
import shutil
from pathlib import Path

import SimpleITK

SOURCE = "Dataset004_Hippocampus"
HALF = "Dataset014_HippocampusHalf"
ANTERIOR = 1
TRAINING_CASES = 12
COMPARE, TUNE = (500, 501, 502), (600, 601)
TUNING_CASES = 28
"""Cases of the folds in ``TUNE``; a fold trains on some of the other's validation cases."""


def write_half(source: Path, target: Path, cases: list[str]) -> None:
    """Write images, labels and ``dataset.json`` of the data set to pretrain on."""
    for folder in ("imagesTr", "labelsTr"):
        (target / folder).mkdir(parents=True)
    for case in cases:
        name = f"{case}_0000.nii.gz"
        shutil.copyfile(source / "imagesTr" / name, target / "imagesTr" / name)
        labels = SimpleITK.ReadImage(source / "labelsTr" / f"{case}.nii.gz")
        SimpleITK.WriteImage(
            SimpleITK.Cast(labels == ANTERIOR, SimpleITK.sitkUInt8),
            target / "labelsTr" / f"{case}.nii.gz",
        )
    description = json.loads((source / "dataset.json").read_text())
    description |= {"labels": {"background": 0, "Anterior": ANTERIOR}, "numTraining": len(cases)}
    (target / "dataset.json").write_text(json.dumps(description, indent=2))


def write_folds(file: Path, cases: list[str]) -> None:
    """Add the folds to nnU-Net's ``splits_final.json``.

    Args:
        file: the file, with at least one fold.
        cases: cases to fine-tune on, in random order.
    """
    splits = json.loads(file.read_text())
    splits += [splits[0]] * (TUNE[-1] + 1 - len(splits))
    tuning, comparing = cases[:TUNING_CASES], cases[TUNING_CASES:]
    each = len(comparing) // len(COMPARE)
    for position, fold in enumerate(COMPARE):
        own = comparing[position * each :][:each]
        splits[fold] = _split(own[:TRAINING_CASES], own[TRAINING_CASES:])
    first, second = tuning[: TUNING_CASES // 2], tuning[TUNING_CASES // 2 :]
    splits[TUNE[0]] = _split(first[:TRAINING_CASES], second)
    splits[TUNE[1]] = _split(second[:TRAINING_CASES], first)
    file.write_text(json.dumps(splits))


def _split(training: list[str], validation: list[str]) -> dict[str, list[str]]:
    return {"train": sorted(training), "val": sorted(validation)}


if __name__ == "__main__":
    raw = Path(os.environ["nnUNet_raw"])
    labels = (raw / SOURCE / "labelsTr").glob("*.nii.gz")
    all_cases = sorted(file.name.removesuffix(".nii.gz") for file in labels)
    random.Random(0).shuffle(all_cases)
    middle = len(all_cases) // 2
    write_half(raw / SOURCE, raw / HALF, sorted(all_cases[:middle]))
    write_folds(Path(os.environ["nnUNet_preprocessed"], SOURCE, "splits_final.json"), all_cases[middle:])
