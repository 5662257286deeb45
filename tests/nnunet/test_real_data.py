"""Training on the Decathlon's Hippocampus data, if it is available."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nnunet_cpr import demo
from nnunet_cpr.nnunet.commands import nnunet_environment
from tests.helpers.workspace import PLANS, Workspace

TRAINER = "nnUNetTrainerCPR_ws20_2epochs_40iters"
CASES = 40
"""Number of the 260 cases to use, to save time."""


def first_cases(archive: Path, folder: Path) -> Path:
    """Copy the first cases of an archive of the Decathlon."""
    description = json.loads((archive / "dataset.json").read_text())
    description["training"] = description["training"][:CASES]
    description["numTraining"] = CASES
    for case in description["training"]:
        for file in map(Path, case.values()):
            (folder / file.parent).mkdir(parents=True, exist_ok=True)
            (folder / file).symlink_to(archive / file)
    (folder / "imagesTs").mkdir()
    (folder / "dataset.json").write_text(json.dumps(description))
    return folder


def keep_patch_size(preprocessed: Path) -> None:
    """Keep the patch size of nnU-Net's plans, which covers a whole case."""
    own, tiny = (
        json.loads((preprocessed / f"{plans}.json").read_text()) for plans in ("nnUNetPlans", PLANS)
    )
    patch_size = own["configurations"]["3d_fullres"]["patch_size"]
    tiny["configurations"]["3d_fullres"]["patch_size"] = patch_size
    (preprocessed / f"{PLANS}.json").write_text(json.dumps(tiny))


@pytest.mark.slow
def test_hippocampus_is_trained_and_continued(real_data: Path, tmp_path: Path) -> None:
    cores = os.cpu_count() or 1
    space = Workspace(tmp_path, "Dataset004_Hippocampus", nnunet_environment(tmp_path, cores))
    space.environment["nnUNet_compile"] = "f"
    (tmp_path / "nnUNet_raw").mkdir()
    archive = first_cases(real_data, tmp_path / "Task04_Hippocampus")
    space.run("nnUNetv2_convert_MSD_dataset", "-i", str(archive), "-np", str(cores))
    space.run("nnUNetv2_plan_and_preprocess", "-d", "4", "-c", "3d_fullres", "-np", str(cores))
    preprocessed = tmp_path / "nnUNet_preprocessed" / space.dataset
    demo.shrink_plans(preprocessed, "nnUNetPlans", PLANS)
    keep_patch_size(preprocessed)

    space.train_and_kill(TRAINER, "Epoch 1")
    space.train(TRAINER, "--c")
    assert space.history(TRAINER)["step"].unique().tolist() == [40, 80]
    last = space.history(TRAINER).query("epoch == 1")
    assert (last["multiplier"] > 0).any()
    # Held at their bounds, which only the first epoch set.
    assert last["measure"].div(last["kappa"]).between(0.8, 1.2).all()
    summary = json.loads((space.fold(TRAINER) / "validation" / "summary.json").read_text())
    assert len(summary["metric_per_case"]) == CASES / 5
