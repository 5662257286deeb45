"""nnU-Net's configurations, architectures and commands with CPR."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from tests.helpers.matrix_space import (
    REGIONS,
    UNSEEN,
    MatrixSpace,
    Model,
    array,
    make_space,
)

WARM = "nnUNetTrainerCPR_ws3_1epochs_6iters_seed1"
INITIAL = "nnUNetTrainerAdamCPR_ki0x0p9_warmup2_1epochs_6iters_seed1"
STEPS = 6

FLAT = Model(WARM, "2d")
FULL = Model(WARM, "3d_fullres")
LOW = Model(INITIAL, "3d_lowres", fold="all")  # so that the cascade has a prediction of every case
CASCADE = Model(INITIAL, "3d_cascade_fullres")
RESIDUAL = Model(INITIAL, "3d_fullres", plans="nnUNetResEncUNetMPlans")

pytestmark = pytest.mark.release  # plans and trains six configurations


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> MatrixSpace:
    return make_space(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def pair(space: MatrixSpace) -> dict[Model, Path]:
    """Train two configurations with ``--npz`` and predict with probabilities."""
    for model in (FLAT, FULL):
        space.train_model(model, "--npz")
    return {model: space.predict(model, "--save_probabilities") for model in (FLAT, FULL)}


@pytest.fixture(scope="module")
def low(space: MatrixSpace, pair: dict[Model, Path]) -> Path:
    """Train the low resolution from the weights of the full resolution and predict."""
    start = space.fold_folder(FULL) / "checkpoint_final.pth"
    space.train_model(LOW, "-pretrained_weights", str(start))
    return space.predict(LOW)


def check_model(space: MatrixSpace, model: Model, predictions: Path, dimensions: int = 3) -> None:
    checkpoint = space.final(model)
    check_record(space, model, kernels(checkpoint["network_weights"], dimensions))
    check_prediction(space, predictions)


def kernels(weights: dict[str, torch.Tensor], dimensions: int) -> list[str]:
    """Return the convolution kernels; nnU-Net's U-Nets list some of them under several names."""
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        if tensor.ndim == dimensions + 2:
            first.setdefault(tensor.data_ptr(), name)
    return list(first.values())


def check_record(space: MatrixSpace, model: Model, names: list[str]) -> None:
    history = pd.read_csv(space.fold_folder(model) / "cpr_history.csv")
    assert history["parameter"].tolist() == names and len(names) > 10
    assert (history["step"] == STEPS).all()
    assert np.isfinite(history["kappa"]).all() and (history["kappa"] > 0).all()
    assert np.isfinite(history["multiplier"]).all() and (history["multiplier"] > 0).any()
    assert (space.fold_folder(model) / "cpr_progress.png").stat().st_size > 0


def check_prediction(space: MatrixSpace, predictions: Path) -> None:
    assert [path.name for path in predictions.glob("*.nii.gz")] == [f"{UNSEEN}.nii.gz"]
    image = array(space.raw / "imagesTs" / f"{UNSEEN}_0000.nii.gz")
    assert array(predictions / f"{UNSEEN}.nii.gz").shape == image.shape
    assert set(np.unique(array(predictions / f"{UNSEEN}.nii.gz"))) <= {0, 1, 2}


@pytest.mark.parametrize(("model", "dimensions"), [(FLAT, 2), (FULL, 3)], ids=["2d", "3d_fullres"])
def test_configurations_train_and_predict(
    space: MatrixSpace, pair: dict[Model, Path], model: Model, dimensions: int
) -> None:
    check_model(space, model, pair[model], dimensions)
    checkpoint = space.final(model)
    shapes = checkpoint["optimizer_state"]["cpr"]["shapes"]
    assert shapes[0][1] == 2  # channels
    heads = checkpoint["network_weights"]["decoder.seg_layers.0.weight"]
    assert len(heads) == len(REGIONS)  # none for the background, none for what is ignored


def test_low_resolution_starts_from_pretrained_weights(space: MatrixSpace, low: Path) -> None:
    check_model(space, LOW, low)
    # The bounds belong to the weights that were loaded, which came after the optimizer was built.
    loaded = space.final(FULL)["network_weights"]
    history = pd.read_csv(space.fold_folder(LOW) / "cpr_history.csv").set_index("parameter")
    taken = [name for name in history.index if ".seg_layers." not in name]
    assert len(taken) > 10
    expected = [0.9 * float(loaded[name].square().mean()) for name in taken]
    np.testing.assert_allclose(history.loc[taken, "kappa"], expected, rtol=1e-5)


def test_cascade_trains_and_predicts(space: MatrixSpace, low: Path) -> None:
    space.train_model(CASCADE)
    predictions = space.predict(CASCADE, "-prev_stage_predictions", str(low))
    check_model(space, CASCADE, predictions)
    next_stage = space.model_folder(LOW) / "predicted_next_stage" / CASCADE.configuration
    assert len([path for path in next_stage.iterdir() if path.name.startswith("phantom_")]) == 5
    shapes = space.final(CASCADE)["optimizer_state"]["cpr"]["shapes"]
    assert shapes[0][1] == 2 + 2  # channels and the labels of the stage before


def test_residual_encoder_trains_and_predicts(space: MatrixSpace) -> None:
    space.train_model(RESIDUAL)
    check_model(space, RESIDUAL, space.predict(RESIDUAL))
    names = space.final(RESIDUAL)["optimizer_state"]["cpr"]["names"]
    assert any(".skip." in name for name in names) and any(".stem." in name for name in names)


def test_ensemble_and_best_configuration_are_found(space: MatrixSpace, pair: dict[Model, Path]) -> None:
    ensemble = space.folder / "predictions" / "ensemble"
    inputs = [str(folder) for folder in pair.values()]
    space.run("nnUNetv2_ensemble", "-i", *inputs, "-o", str(ensemble), "-np", "1")
    check_prediction(space, ensemble)
    mean = np.mean([np.load(f / f"{UNSEEN}.npz")["probabilities"] for f in pair.values()], axis=0)
    expected = np.zeros(mean.shape[1:], np.uint8)
    for label, probability in zip((1, 2), mean):
        expected[probability > 0.5] = label
    np.testing.assert_array_equal(array(ensemble / f"{UNSEEN}.nii.gz"), expected)

    space.run(
        "nnUNetv2_find_best_configuration", "902", "-c", "2d", "3d_fullres", "-tr", WARM,
        "-f", "0", "-np", "1",
    )  # fmt: skip
    found = json.loads((space.results / "inference_information.json").read_text())
    single = {space.model_folder(model).name for model in pair}
    assert single < set(found["all_results"]) and len(found["all_results"]) == 3
    best = found["best_model_or_ensemble"]
    assert {model["trainer"] for model in best["selected_model_or_models"]} == {WARM}
    assert f"-tr {WARM}" in (space.results / "inference_instructions.txt").read_text()
