"""The flow of nnU-Net's own integration tests with a CPR trainer, as a study of each of four data sets.

The data sets are Hippocampus with plain labels, with regions, with an ignore label and with both. Each
is trained at low resolution and as a cascade in five folds, then the best configuration is found and a
case is predicted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk
import torch
import yaml

from nnunet_cpr.datasets.small_plans import write_small_plans
from nnunet_cpr.nnunet.commands import nnunet_environment

pytestmark = pytest.mark.release
TRAINER = "nnUNetTrainerCPR_anytime_ws1_1epochs_2iters"
PLANS = "nnUNetPlansTiny"
STAGES = ("3d_lowres", "3d_cascade_fullres")
CASES = 6
DATA_SETS = {
    "Dataset996_Plain": {"background": 0, "anterior": 1, "posterior": 2},
    "Dataset997_Regions": {"background": 0, "whole": [1, 2], "posterior": 2},
    "Dataset998_Ignore": {"background": 0, "anterior": 1, "posterior": 2, "ignore": 3},
    "Dataset999_Both": {"background": 0, "whole": [1, 2], "posterior": 2, "ignore": 3},
}


def write_data_set(folder: Path, source: Path, labels: dict[str, int | list[int]]) -> None:
    """Write the first cases; with an ignore label every third slice has it."""
    images, truths = folder / "imagesTr", folder / "labelsTr"
    for each in (images, truths):
        each.mkdir(parents=True)
    for path in sorted((source / "imagesTr").glob("hippocampus_*.nii.gz"))[:CASES]:
        sitk.WriteImage(
            sitk.ReadImage(str(path)), str(images / path.name.replace(".nii.gz", "_0000.nii.gz"))
        )
        truth = sitk.ReadImage(str(source / "labelsTr" / path.name))
        voxels = sitk.GetArrayFromImage(truth).astype(np.uint8)
        if "ignore" in labels:
            voxels[::3] = 3
        changed = sitk.GetImageFromArray(voxels)
        changed.CopyInformation(truth)
        sitk.WriteImage(changed, str(truths / path.name))
    document = {
        **{"channel_names": {"0": "MRI"}, "labels": labels, "numTraining": CASES},
        "file_ending": ".nii.gz",
        **({"regions_class_order": [1, 2]} if "whole" in labels else {}),
    }
    (folder / "dataset.json").write_text(json.dumps(document))


def add_cascade(home: Path) -> None:
    """Add a low resolution and a cascade to the plans, which Hippocampus is too small for."""
    file = home / f"{PLANS}.json"
    plans = json.loads(file.read_text())
    fullres = plans["configurations"]["3d_fullres"]
    plans["configurations"]["3d_lowres"] = {
        **fullres,
        "data_identifier": f"{PLANS}_3d_lowres",
        "spacing": [1.5 * side for side in fullres["spacing"]],
        "next_stage": "3d_cascade_fullres",
    }
    cascade = {"inherits_from": "3d_fullres", "previous_stage": "3d_lowres"}
    plans["configurations"]["3d_cascade_fullres"] = cascade
    file.write_text(json.dumps(plans))


@pytest.mark.parametrize("name", DATA_SETS)  # 6 minutes each
def test_study_of_cascades_on_regions_and_ignore_labels(
    name: str, real_data: Path, tmp_path: Path
) -> None:
    environment = {**nnunet_environment(tmp_path, processes=1), "nnUNet_compile": "f"}

    def run(*command: str) -> str:
        program = Path(sysconfig.get_path("scripts"), command[0])
        done = subprocess.run(
            [program, *command[1:]], env=environment, capture_output=True, text=True, timeout=3600
        )
        assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout

    raw, preprocessed, results = (
        tmp_path / f"nnUNet_{folder}" for folder in ("raw", "preprocessed", "results")
    )
    write_data_set(raw / name, real_data, DATA_SETS[name])
    number = name[len("Dataset") :][:3]
    run("nnUNetv2_plan_and_preprocess", "-d", number, "-c", "3d_fullres", "--no_pp")
    write_small_plans(preprocessed / name, "nnUNetPlans", PLANS, patch=32)
    add_cascade(preprocessed / name)
    results.mkdir()
    file = tmp_path / "flow.yaml"
    definition = {"datasets": name, "configurations": list(STAGES)[::-1], "plans": PLANS}
    file.write_text(yaml.safe_dump({**definition, "folds": "all", "trainers": TRAINER}))
    said = run("nnunet-cpr", "study", "run", str(file), "--device", "cpu", "--npz", "--jobs", "2")
    assert "all done" in said
    run("nnunet-cpr", "study", "report", str(file))
    table = (results / "studies" / "flow" / "report" / "table.csv").read_text()
    assert len(table.splitlines()) == 1 + len(STAGES)

    model = ("-tr", TRAINER, "-p", PLANS)
    run("nnUNetv2_find_best_configuration", number, "-c", *STAGES, *model, "-np", "1")
    images, lowres, output = (tmp_path / folder for folder in ("images", "low", "full"))
    images.mkdir()
    case = sorted((raw / name / "imagesTr").iterdir())[0]
    os.link(case, images / case.name)
    options = ("-f", "0", "-device", "cpu", "-npp", "1", "-nps", "1", "-d", number, *model)
    run("nnUNetv2_predict", "-i", str(images), "-o", str(lowres), "-c", STAGES[0], *options)
    options = (*options, "-prev_stage_predictions", str(lowres))
    run("nnUNetv2_predict", "-i", str(images), "-o", str(output), "-c", STAGES[1], *options)
    assert len(list(output.glob("*.nii.gz"))) == 1
    fold = results / name / f"{TRAINER}__{PLANS}__{STAGES[1]}" / "fold_0"
    weights = torch.load(fold / "checkpoint_final.pth", weights_only=False)["network_weights"]
    # A channel and two labels of the stage before; with regions no head for the background.
    assert weights["encoder.stages.0.0.convs.0.conv.weight"].shape[1] == 3
    assert len(weights["decoder.seg_layers.0.weight"]) == 3 - ("whole" in DATA_SETS[name])
