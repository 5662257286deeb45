"""Model card of an exported model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nnunet_cpr.nnunet.tools.model_card import ExportedModel, model_card

TRAINER = "nnUNetTrainerCPR_ws2000"
HISTORY = """epoch,step,parameter,measure,kappa,multiplier
0,250,a.weight,0.5,inf,0
0,250,b.weight,0.2,inf,0
1,500,a.weight,0.4,0.4,0.01
1,500,b.weight,0.1,0.1,0.02
2,750,a.weight,0.4,0.4,0.01
2,750,b.weight,0.1,0.1,0.02
"""


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def model(tmp_path: Path) -> ExportedModel:
    folder = tmp_path / f"{TRAINER}__nnUNetPlans__3d_fullres"
    configuration = {
        "batch_size": 2,
        "patch_size": [40, 56, 40],
        "spacing": [1.0, 1.0, 2.5],
        "architecture": {"network_class_name": "architectures.unet.PlainConvUNet"},
    }
    plans = {
        "dataset_name": "Dataset004_Hippocampus",
        "plans_name": "nnUNetPlans",
        "configurations": {"3d_fullres": configuration},
    }
    dataset = {
        "name": "Hippocampus",
        "licence": "CC-BY-SA 4.0",
        "labels": {"background": 0, "anterior": 1, "whole": [1, 2]},
        "channel_names": {"0": "MRI"},
        "numTraining": 260,
    }
    mean = {"1": {"Dice": 0.9}, "(1, 2)": {"Dice": float("nan")}}
    summary = {"foreground_mean": {"Dice": 0.85123}, "mean": mean, "metric_per_case": [{}] * 52}
    write(folder / "plans.json", plans)
    write(folder / "dataset.json", dataset)
    write(folder / "fold_0" / "validation" / "summary.json", summary)
    write(folder / "fold_0" / "debug.json", {"torch_version": "2.15.0", "hostname": "secret"})
    write(folder / "fold_0" / "cpr_history.csv", HISTORY)
    (folder / "fold_1").mkdir()
    target = tmp_path / "shared" / "nnUNetTrainer__nnUNetPlans__3d_fullres"
    return ExportedModel(folder, target, TRAINER, "3d_fullres", ["0", "1"], ["checkpoint_final.pth"])


def test_card_has_the_facts_of_the_model(model: ExportedModel) -> None:
    card = model_card(model)
    assert "# Dataset004_Hippocampus, 3d_fullres\n" in card
    assert "-m nnUNetTrainer__nnUNetPlans__3d_fullres -f 0 1 -i" in card
    for row in (
        f"| trainer | `{TRAINER}` |",
        "| licence of the data | CC-BY-SA 4.0 |",
        "| patch size | 40 x 56 x 40 |",
        "| voxel spacing in mm | 1 x 1 x 2.5 |",
        "| network | PlainConvUNet |",
        "| structures | anterior (1), whole ([1, 2]) |".replace("[", "\\[").replace("]", "\\]"),
        "| torch, training | 2.15.0 |",
    ):
        assert row in card.splitlines()
    assert "secret" not in card


def test_card_leaves_the_licence_to_the_user(model: ExportedModel) -> None:
    header = yaml.safe_load(model_card(model).split("---")[1])
    assert header["license"] is None
    assert "constrained-parameter-regularization" in header["tags"]


def test_card_has_bounds_and_verdict(model: ExportedModel) -> None:
    (row,) = [line for line in model_card(model).splitlines() if "active and held" in line]
    assert row.startswith("| 0 | 2 | 0.1 to 0.4 | 500 | active and held: all 2 matrices active")


def test_card_has_dice_and_names_what_is_missing(model: ExportedModel) -> None:
    lines = model_card(model).splitlines()
    assert "| 0 | 52 | 85.12 | 90.00 | not recorded |" in lines
    assert "| 1 | not recorded | not recorded | not recorded | not recorded |" in lines


def test_card_names_another_checkpoint(model: ExportedModel) -> None:
    best = replace(model, checkpoints=["checkpoint_best.pth"])
    assert "-f 0 1 -chk checkpoint_best.pth -i IMAGES" in model_card(best)


def test_card_without_cpr_has_no_bounds(model: ExportedModel) -> None:
    (model.source / "fold_0" / "cpr_history.csv").unlink()
    assert "Constrained Parameter" not in model_card(model)


def test_values_of_others_stay_in_their_cell(model: ExportedModel) -> None:
    dataset = {"name": "a | b\n\n# heading <script> [link](x)", "labels": {"background": 0}}
    write(model.source / "dataset.json", dataset)
    (line,) = [line for line in model_card(model).splitlines() if "heading" in line]
    assert line == "| name | a \\| b # heading \\<script> \\[link\\](x) |"


def test_damaged_file_is_named(model: ExportedModel) -> None:
    path = model.source / "fold_0" / "validation" / "summary.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json: expected JSON"):
        model_card(model)
