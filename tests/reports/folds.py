"""Synthetic result folders of nnU-Net."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import numpy as np
import SimpleITK as sitk

from nnunet_cpr.studies.study import Run, Study, TrainerEntry

DATASET = "Dataset001_Toy"
LABELS = {"background": 0, "liver": 1, "left_kidney": 2}
NAN = float("nan")


def study(*trainers: str | TrainerEntry, **changes: object) -> Study:
    values = {
        "name": "toy",
        "datasets": (DATASET,),
        "folds": (0, 1),
        **changes,
    }
    return Study(trainers=trainers, **values)


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_fold(
    results: Path,
    trainer: str,
    fold: int,
    dice: Mapping[str, Mapping[str, float]],
    dataset: str = DATASET,
    labels: Mapping[str, object] = LABELS,
    plans: str = "nnUNetPlans",
) -> Path:
    """Write a validated fold; ``dice`` is {case: {class's key in nnU-Net's file: Dice}}."""
    run = Run(dataset, "3d_fullres", plans, fold, trainer)
    folder = run.folder(results)
    cases = [
        {
            "metrics": {key: {"Dice": value, "IoU": 0.0} for key, value in classes.items()},
            "prediction_file": f"/somewhere/else/validation/{case}.nii.gz",
            "reference_file": f"/somewhere/else/gt_segmentations/{case}.nii.gz",
        }
        for case, classes in dice.items()
    ]
    values = [value for classes in dice.values() for value in classes.values()]
    summary = {
        "metric_per_case": cases,
        "foreground_mean": {"Dice": fmean(values) if values else math.nan},
    }
    write_json(folder / "validation" / "summary.json", summary)
    write_json(folder.parent / "dataset.json", {"labels": labels, "file_ending": ".nii.gz"})
    return folder


def both(value: float) -> dict[str, float]:
    return {"1": value, "2": value}


def write_log(folder: Path, epochs: Mapping[int, tuple[float, float, float, float]]) -> None:
    """Write a log; ``epochs`` is {epoch: (training loss, validation loss, pseudo Dice, seconds)}."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = "2026-01-02 03:04:05.678901:"
    lines = ["", "#######", "Please cite the following paper", ""]
    for epoch, (train, val, dice, seconds) in epochs.items():
        lines += [
            f"{stamp}  ",
            f"{stamp} Epoch {epoch} ",
            f"{stamp} Current learning rate: 0.01 ",
            f"{stamp} train_loss {train} ",
            f"{stamp} val_loss {val} ",
            f"{stamp} Pseudo dice [np.float32({dice}), np.float32(nan), {dice}] ",
            f"{stamp} Epoch time: {seconds} s ",
        ]
    (folder / "training_log_2026_1_2_03_04_05.txt").write_text("\n".join(lines) + "\n")


def write_history(folder: Path, kappa: float) -> None:
    text = f"epoch,step,parameter,measure,kappa,multiplier\n0,10,stage.0.weight,0.1,{kappa},0\n"
    (folder / "cpr_history.csv").write_text(text)


def write_volume(
    array: np.ndarray, path: Path, spacing: tuple[float, float, float] = (2.0, 1.0, 1.0)
) -> None:
    """Write an array [z, y, x] as an image with voxels of this size in mm along each axis."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = sitk.GetImageFromArray(array)
    image.SetSpacing(spacing[::-1])
    sitk.WriteImage(image, str(path))


def sphere(radius: float, shape: tuple[int, int, int] = (12, 32, 40)) -> np.ndarray:
    z, y, x = np.indices(shape)
    distance = np.sqrt((2 * (z - 6)) ** 2 + (y - 16) ** 2 + (x - 18) ** 2)
    return ((distance < radius).astype(np.uint8)) + (distance < radius / 2)


def whole(folder: Path, planned: Study, cases: int = 8, epochs: int = 6) -> tuple[Path, Path, Path]:
    """Write results, raw and preprocessed data of a study and return their folders."""
    rng = np.random.default_rng(0)
    results, raw, preprocessed = (folder / f"nnUNet_{n}" for n in ("results", "raw", "preprocessed"))
    for dataset in planned.datasets:
        write_json(preprocessed / dataset / "dataset.json", {"labels": LABELS, "file_ending": ".nii.gz"})
        for fold in planned.folds:
            names = [f"case_{fold}{number:03d}" for number in range(cases)]
            hard = {name: rng.uniform(0.6, 0.95) for name in names}
            for name in names[:3]:
                image = 100 * sphere(9).astype(np.float32) + rng.normal(0, 20, (12, 32, 40))
                write_volume(
                    image.astype(np.float32), raw / dataset / "imagesTr" / f"{name}_0000.nii.gz"
                )
                for folder in (raw / dataset / "labelsTr", preprocessed / dataset / "gt_segmentations"):
                    write_volume(sphere(9), folder / f"{name}.nii.gz")
            for position, row in enumerate(planned.trainers):
                gains = rng.normal(0.004 * position, 0.02, cases)
                dice = {name: both(min(hard[name] + gain, 1)) for name, gain in zip(names, gains)}
                run = write_fold(results, row.trainer, fold, dice, dataset)
                for name in names[:3]:
                    write_volume(sphere(8 + position), run / "validation" / f"{name}.nii.gz")
                write_log(run, {e: (-0.1 * e, 0.1 - 0.1 * e, 0.1 * e, 20.0) for e in range(epochs)})
                write_json(run / "resources.json", {"seconds": 5000.0})
                if "CPR" in row.trainer:
                    write_history(run, kappa=0.1)
    return results, raw, preprocessed
