"""nnU-Net's configurations, plans and commands with CPR, with the functions of the commands.

The cascade, regions and an ignore label are those of test_integration_flow.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk
import torch
from nnunetv2.ensembling.ensemble import entry_point_ensemble_folders
from nnunetv2.evaluation.find_best_configuration import find_best_configuration_entry_point
from nnunetv2.experiment_planning.plan_and_preprocess_entrypoints import (
    plan_experiment_entry,
    preprocess_entry,
)
from nnunetv2.postprocessing.remove_connected_components import entry_point_apply_postprocessing

from tests.helpers.workspace import UNSEEN, Workspace, make_workspace

WARM = "nnUNetTrainerCPR_ws3_ema_1epochs_6iters_seed1"
INITIAL = "nnUNetTrainerAdamCPR_ki0x0p9_warmup2_1epochs_6iters_seed1"
PLANS, RESIDUAL_PLANS = "nnUNetPlans", "nnUNetResEncUNetMPlans"

pytestmark = pytest.mark.release  # plans and trains four models


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a workspace with two plans, whose networks are small."""
    space = make_workspace(tmp_path_factory.mktemp("matrix"))
    space.run_here(preprocess_entry, "-d", "901", "-c", "2d", "-np", "1")
    with_threads = replace(space, environment={**space.environment, "nnUNet_n_proc_DA": "1"})
    with_threads.run_here(plan_experiment_entry, "-d", "901", "-pl", "nnUNetPlannerResEncM")
    for name in (PLANS, RESIDUAL_PLANS):
        file = Path(space.environment["nnUNet_preprocessed"]) / space.dataset / f"{name}.json"
        plans = json.loads(file.read_text())
        for configuration in plans["configurations"].values():
            if "architecture" in configuration:
                network = configuration["architecture"]["arch_kwargs"]
                network["features_per_stage"] = [4 * (i + 1) for i in range(network["n_stages"])]
                configuration["batch_size"] = 2
        file.write_text(json.dumps(plans))
    return replace(space, plans=PLANS)


@pytest.fixture(scope="module")
def predictions(full: Workspace) -> list[Path]:
    """Return the probabilities of models in 2D and 3D, and check what they leave."""
    folders = []
    for dimensions, space in ((2, replace(full, configuration="2d")), (3, full)):
        space.train_here(WARM, "--npz")
        check_record(space, WARM, dimensions)
        folders.append(space.predict_here(WARM, "--save_probabilities"))
    return folders


def check_record(space: Workspace, trainer: str, dimensions: int = 3) -> None:
    """Check that all kernels were regularized; U-Nets list some of them under several names."""
    first: dict[int, str] = {}
    for name, tensor in space.checkpoint(trainer)["network_weights"].items():
        if tensor.ndim == dimensions + 2:
            first.setdefault(tensor.data_ptr(), name)
    history = space.history(trainer)
    assert history["parameter"].tolist() == list(first.values()) and len(first) > 10
    assert (history["step"] == 6).all()
    assert np.isfinite(history["kappa"]).all() and (history["kappa"] > 0).all()
    assert np.isfinite(history["multiplier"]).all() and (history["multiplier"] > 0).any()
    assert (space.fold(trainer) / "cpr_progress.png").stat().st_size > 0


def test_commands_after_the_training_find_the_models(full: Workspace, predictions: list[Path]) -> None:
    ensemble = full.folder / "predictions" / "ensemble"
    inputs = map(str, predictions)
    full.run_here(entry_point_ensemble_folders, "-i", *inputs, "-o", str(ensemble), "-np", "1")
    mean = np.mean([np.load(f / f"{UNSEEN}.npz")["probabilities"] for f in predictions], axis=0)
    labels = sitk.GetArrayFromImage(sitk.ReadImage(str(ensemble / f"{UNSEEN}.nii.gz")))
    np.testing.assert_array_equal(labels, mean.argmax(axis=0))

    options = ("-c", "2d", "3d_fullres", "-tr", WARM, "-p", PLANS, "-f", "0", "-np", "1")
    full.run_here(find_best_configuration_entry_point, "901", *options)
    results = full.model(WARM).parent
    found = json.loads((results / "inference_information.json").read_text())
    single = {folder.name for folder in predictions}
    assert single < set(found["all_results"]) and len(found["all_results"]) == 3
    best = found["best_model_or_ensemble"]
    assert {model["trainer"] for model in best["selected_model_or_models"]} == {WARM}
    assert f"-tr {WARM}" in (results / "inference_instructions.txt").read_text()

    final = full.folder / "predictions" / "final"
    arguments = ("-i", str(predictions[1]), "-o", str(final), "-np", "1")
    rules = ("-pp_pkl_file", best["postprocessing_file"], "-plans_json", best["some_plans_file"])
    full.run_here(entry_point_apply_postprocessing, *arguments, *rules)
    assert (final / f"{UNSEEN}.nii.gz").exists()
    summary = full.fold(WARM) / "validation" / "summary.json"
    summary.unlink()
    full.train_here(WARM, "--val", "--val_best")
    assert summary.exists()


def test_training_on_all_cases_starts_from_pretrained_weights(
    full: Workspace, predictions: list[Path]
) -> None:
    start = full.fold(WARM) / "checkpoint_final.pth"
    space = replace(full, fold_id="all")
    space.train_here(INITIAL, "-pretrained_weights", str(start))
    check_record(space, INITIAL)
    # The bounds belong to the weights that were loaded, which came after the optimizer was built.
    loaded = torch.load(start, weights_only=False)["network_weights"]
    history = space.history(INITIAL).set_index("parameter")
    taken = [name for name in history.index if ".seg_layers." not in name]
    expected = [0.9 * float(loaded[name].square().mean()) for name in taken]
    np.testing.assert_allclose(history.loc[taken, "kappa"], expected, rtol=1e-5)
    space.predict_here(INITIAL)


def test_residual_encoder_trains_and_predicts(full: Workspace) -> None:
    space = replace(full, plans=RESIDUAL_PLANS)
    space.train_here(INITIAL)
    check_record(space, INITIAL)
    names = space.checkpoint(INITIAL)["optimizer_state"]["cpr"]["names"]
    assert any(".skip." in name for name in names) and any(".stem." in name for name in names)
    space.predict_here(INITIAL)
