"""The Decathlon's Hippocampus data through nnU-Net's own converter and commands, where it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from workspace import PLANS, Workspace

from nnunet_cpr.nnunet import demo
from nnunet_cpr.nnunet.commands import nnunet_environment

TRAINER = "nnUNetTrainerCPR_ws20_2epochs_40iters"


@pytest.mark.slow
def test_converted_planned_trained_and_continued(real_data: Path, tmp_path: Path) -> None:
    cores = os.cpu_count() or 1
    space = Workspace(tmp_path, "Dataset004_Hippocampus", nnunet_environment(tmp_path, cores))
    space.environment["nnUNet_compile"] = "f"
    (tmp_path / "nnUNet_raw").mkdir()
    space.run("nnUNetv2_convert_MSD_dataset", "-i", str(real_data), "-np", str(cores))
    space.run("nnUNetv2_plan_and_preprocess", "-d", "4", "-c", "3d_fullres", "-np", str(cores))
    demo.shrink_plans(tmp_path / "nnUNet_preprocessed" / space.dataset, "nnUNetPlans", PLANS)

    space.train_and_kill(TRAINER, "Epoch 1")
    space.train(TRAINER, "--c")
    assert space.history(TRAINER)["step"].unique().tolist() == [40, 80]
    last = space.history(TRAINER).query("epoch == 1")
    assert (last["multiplier"] > 0).any()
    # Held at their bounds, which only the first epoch set.
    assert last["measure"].div(last["kappa"]).between(0.8, 1.2).all()
    summary = json.loads((space.fold(TRAINER) / "validation" / "summary.json").read_text())
    assert len(summary["metric_per_case"]) == 52
