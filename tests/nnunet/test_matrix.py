"""nnU-Net's configurations, plans, options and commands with CPR.

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
from nnunetv2.experiment_planning.plan_and_preprocess_entrypoints import (
    plan_experiment_entry,
    preprocess_entry,
)

from nnunet_cpr.nnunet.run_record import read_record
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
    """Return the probabilities of models of two folds in 2D and 3D, and check what they leave."""
    folders = []
    for dimensions, space in ((2, replace(full, configuration="2d")), (3, full)):
        for fold in ("0", "1"):
            replace(space, fold_id=fold).train_here(WARM, "--npz")
        check_record(space, WARM, dimensions)
        folders.append(space.predict_here(WARM, "-f", "0", "1", "--save_probabilities"))
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


def test_commands_after_the_training_find_the_models(
    full: Workspace, predictions: list[Path], tmp_path: Path
) -> None:
    """nnU-Net's real commands, with two folds of a model in 2D and one in 3D."""
    model = ("-tr", WARM, "-p", PLANS, "-f", "0", "1")
    ensemble = tmp_path / "ensemble"
    full.run("nnUNetv2_ensemble", "-i", *map(str, predictions), "-o", str(ensemble), "-np", "1")
    mean = np.mean([np.load(f / f"{UNSEEN}.npz")["probabilities"] for f in predictions], axis=0)
    labels = sitk.GetArrayFromImage(sitk.ReadImage(str(ensemble / f"{UNSEEN}.nii.gz")))
    np.testing.assert_array_equal(labels, mean.argmax(axis=0))

    configurations = ("-c", "2d", "3d_fullres", "-np", "1")
    full.run("nnUNetv2_find_best_configuration", "901", *configurations, *model)
    results = full.model(WARM).parent
    found = json.loads((results / "inference_information.json").read_text())
    single = {folder.name for folder in predictions}
    assert single < set(found["all_results"]) and len(found["all_results"]) == 3
    best = found["best_model_or_ensemble"]
    assert {model["trainer"] for model in best["selected_model_or_models"]} == {WARM}
    assert f"-tr {WARM}" in (results / "inference_instructions.txt").read_text()

    final = tmp_path / "final"
    arguments = ("-i", str(predictions[1]), "-o", str(final), "-np", "1")
    rules = ("-pp_pkl_file", best["postprocessing_file"], "-plans_json", best["some_plans_file"])
    full.run("nnUNetv2_apply_postprocessing", *arguments, *rules)
    assert (final / f"{UNSEEN}.nii.gz").exists()

    validation, trained = full.fold(WARM) / "validation", full.model(WARM)
    described = ("-djfile", str(trained / "dataset.json"), "-pfile", str(trained / "plans.json"))
    truths = Path(full.environment["nnUNet_preprocessed"]) / full.dataset / "gt_segmentations"
    evaluated = tmp_path / "summary.json"
    options = ("-o", str(evaluated), "-np", "1", "--chill")
    full.run("nnUNetv2_evaluate_folder", str(truths), str(validation), *described, *options)
    first, again = (json.loads(f.read_text()) for f in (validation / "summary.json", evaluated))
    assert again["foreground_mean"] == first["foreground_mean"]


def test_zip_file_of_a_model_predicts_where_it_is_installed(
    full: Workspace, predictions: list[Path], tmp_path: Path
) -> None:
    archive, model = tmp_path / "model.zip", ("-tr", WARM, "-p", PLANS, "-f", "0", "1")
    full.run("nnUNetv2_export_model_to_zip", "-d", "901", "-o", str(archive), "-c", "3d_fullres", *model)
    installed = full.with_results_in(tmp_path)
    (tmp_path / "nnUNet_results").mkdir()
    installed.run("nnUNetv2_install_pretrained_model_from_zip", str(archive))
    images = Path(full.environment["nnUNet_raw"]) / full.dataset / "imagesTs"
    selected = ("-d", "901", "-c", "3d_fullres", *model, "-device", "cpu", "-npp", "1", "-nps", "1")
    output = tmp_path / "labels"
    installed.run("nnUNetv2_predict", "-i", str(images), "-o", str(output), *selected)
    ours, theirs = (
        sitk.GetArrayFromImage(sitk.ReadImage(str(folder / f"{UNSEEN}.nii.gz")))
        for folder in (predictions[1], output)
    )
    np.testing.assert_array_equal(ours, theirs)


def test_best_checkpoint_is_validated_by_the_commands_option(
    full: Workspace, predictions: list[Path]
) -> None:
    summary = full.fold(WARM) / "validation" / "summary.json"
    summary.unlink()
    full.train(WARM, "--val", "--val_best")
    assert summary.exists()
    validated = {"checkpoint": "checkpoint_best.pth", "epochs": 1}
    assert read_record(full.fold(WARM)).validated == validated


def test_several_gpus_on_a_cpu_are_refused_by_nnunet(full: Workspace, tmp_path: Path) -> None:
    space = full.with_results_in(tmp_path)
    done = space.train(WARM, "-num_gpus", "2", check=False)
    assert done.returncode != 0 and "only implemented for cuda devices" in done.stderr
    assert not space.model(WARM).exists()


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
