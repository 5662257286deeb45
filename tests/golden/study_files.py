"""Study files that are shipped, and the runs that commands list for them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from nnunet_cpr.studies import data
from tests.golden.goldens import run_command
from tests.helpers import ROOT

STUDIES = sorted(
    [
        *(ROOT / "nnunet_cpr" / "studies" / "presets").glob("*.yaml"),
        *(ROOT / "benchmarks" / "real_data" / "studies").glob("*.yaml"),
    ]
)
TRAINERS = ROOT / "benchmarks" / "real_data" / "trainers"
DATASETS = (
    "Dataset004_Hippocampus",
    *("Dataset017_BTCV", "Dataset002_Heart", "Dataset082_BraTS2020"),
    *("Dataset218_AMOS2022_postChallenge_task1", "Dataset027_ACDC", "Dataset901_Golden"),
)
PLANS = (
    *("nnUNetPlans", "nnUNetPlansSmall", "nnUNetPlansSmallPatch"),
    *("nnUNetResEncUNetMPlans", "nnUNetResEncUNetLPlans"),
)
CONFIGURATIONS = ("2d", "3d_fullres")
FOLDS = 602
"""Folds of each data set; the study of fine-tuning numbers its up to 601."""


def make_data(folder: Path, datasets: tuple[str, ...] = DATASETS) -> dict[str, str]:
    """Write data sets that look preprocessed, without images, and return nnU-Net's variables."""
    for dataset in datasets:
        home = folder / "nnUNet_preprocessed" / dataset
        cases = [f"case_{i}" for i in range(10)]
        for name in CONFIGURATIONS:
            (home / name).mkdir(parents=True)
            for case in cases:
                (home / name / f"{case}.pkl").touch()
        (home / "gt_segmentations").mkdir()
        for case in cases:
            (home / "gt_segmentations" / f"{case}.nii.gz").touch()
        (home / "dataset.json").write_text(json.dumps({"file_ending": ".nii.gz", "numTraining": 10}))
        configurations = {name: {"data_identifier": name} for name in CONFIGURATIONS}
        for plans in PLANS:
            (home / f"{plans}.json").write_text(json.dumps({"configurations": configurations}))
        splits = [{"train": cases[1:], "val": cases[:1]}] * FOLDS
        (home / "splits_final.json").write_text(json.dumps(splits))
        (folder / "nnUNet_raw" / dataset).mkdir(parents=True)
        (folder / "nnUNet_raw" / dataset / "dataset.json").write_text(
            json.dumps({"file_ending": ".nii.gz", "numTraining": 10})
        )
    (folder / "nnUNet_results").mkdir()
    return {f"nnUNet_{n}": str(folder / f"nnUNet_{n}") for n in ("raw", "preprocessed", "results")}


def listed_runs(file: Path, environment: dict[str, str]) -> list[list[Any]]:
    """Return data set, configuration, plans, fold and trainer of each run of a study."""
    options = ["--dataset", "Dataset901_Golden"] if "datasets:" not in file.read_text() else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "check_pretrained", lambda *_: None)  # of weights that users have
        done = run_command("study", "commands", str(file), "--all", *options, environment=environment)
    assert done.status == 0, done.errors
    return [_run(line) for line in done.output.splitlines()]


def _run(line: str) -> list[Any]:
    words = shlex.split(line)
    dataset, configuration, fold = words[words.index("run-one") + 2 :][:3]
    trainer, plans = (words[words.index(option) + 1] for option in ("-tr", "-p"))
    return [dataset, configuration, plans, int(fold), trainer]


def folds_by_training(runs: list[list[Any]]) -> dict[str, list[int]]:
    """Return the folds of each trainer, data set, configuration and plans, in the order of the runs."""
    found: dict[str, list[int]] = {}
    for dataset, configuration, plans, fold, trainer in runs:
        found.setdefault(f"{dataset} {configuration} {plans} {trainer}", []).append(fold)
    return found
