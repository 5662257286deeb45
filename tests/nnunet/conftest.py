"""A small data set, planned and preprocessed by nnU-Net, for tests that run its commands."""

from __future__ import annotations

import json

import pytest
from nnunetv2.experiment_planning.plan_and_preprocess_entrypoints import plan_and_preprocess_entry
from workspace import PLANS, Workspace

from nnunet_cpr.nnunet import demo, phantom
from nnunet_cpr.nnunet.commands import nnunet_environment


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("nnunet")
    space = Workspace(folder, demo.DATASET, nnunet_environment(folder, processes=1))
    del space.environment["nnUNet_extTrainer"]  # every process finds the trainers by itself
    space.environment["nnUNet_compile"] = "f"
    phantom.write_dataset(folder / "nnUNet_raw" / space.dataset, training_cases=5)
    space.run_here(plan_and_preprocess_entry, "-d", "901", "-c", "3d_fullres", "-np", "1")
    preprocessed = folder / "nnUNet_preprocessed" / space.dataset
    demo.shrink_plans(preprocessed, "nnUNetPlans", PLANS)
    plans = json.loads((preprocessed / f"{PLANS}.json").read_text())
    configuration = plans["configurations"]["3d_fullres"]
    configuration["patch_size"] = [24, 24, 24]
    stages = configuration["architecture"]["arch_kwargs"]["n_stages"]
    configuration["architecture"]["arch_kwargs"]["features_per_stage"] = [4] * stages
    (preprocessed / f"{PLANS}.json").write_text(json.dumps(plans))
    # Loading in the training's own process: what it draws depends on its seed alone.
    space.environment["nnUNet_n_proc_DA"] = "0"
    return space
