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
    plans = {"dataset_name": "Dataset004_Hippocampus", "plans_name": "nnUNetPlans"}
    dataset = {
        "name": "Hippocampus",
        "licence": "CC-BY-SA 4.0",
        "labels": {"background": 0, "anterior": 1, "whole": [1, 2]},
        "channel_names": {"0": "MRI"},
        "numTraining": 260,
    }
    summary = {"foreground_mean": {"Dice": 0.85123}, "metric_per_case": [{}] * 52}
    write(folder / "plans.json", plans)
    write(folder / "dataset.json", dataset)
    write(folder / "fold_0" / "validation" / "summary.json", summary)
    write(folder / "fold_0" / "cpr_history.csv", HISTORY)
    (folder / "fold_1").mkdir()
    target = tmp_path / "shared" / "nnUNetTrainer__nnUNetPlans__3d_fullres"
    return ExportedModel(folder, target, TRAINER, "3d_fullres", ["0", "1"], ["checkpoint_final.pth"])


def test_card_has_the_facts_of_the_model(model: ExportedModel) -> None:
    card = model_card(model)
    assert "# Dataset004_Hippocampus, 3d_fullres\n" in card
    assert "-m nnUNetTrainer__nnUNetPlans__3d_fullres -f 0 1 -i" in card
    for row in (
        f"| trainer | {TRAINER} |",
        "| licence of the data | CC-BY-SA 4.0 |",
        "| labels | background (0), anterior (1), whole (\\[1, 2\\]) |",
    ):
        assert row in card.splitlines()


def test_card_leaves_the_licence_to_the_user(model: ExportedModel) -> None:
    header = yaml.safe_load(model_card(model).split("---")[1])
    assert header["license"] is None
    assert "constrained-parameter-regularization" in header["tags"]


def test_card_has_dice_and_verdict_and_names_what_is_missing(model: ExportedModel) -> None:
    lines = model_card(model).splitlines()
    verdict = "OK: bounds active and held: all 2 matrices active, R / bound 1.000 to 1.000"
    assert f"| 0 | 52 | 85.12 | {verdict} |" in lines
    assert "| 1 | not recorded | not recorded | not recorded |" in lines


def test_card_names_another_checkpoint(model: ExportedModel) -> None:
    best = replace(model, checkpoints=["checkpoint_best.pth"])
    assert "-f 0 1 -chk checkpoint_best.pth -i IMAGES" in model_card(best)


def test_values_of_others_stay_in_their_cell(model: ExportedModel) -> None:
    dataset = {"name": "a | b\n\n# heading <script> [link](x)", "labels": {"background": 0}}
    write(model.source / "dataset.json", dataset)
    (line,) = [line for line in model_card(model).splitlines() if "heading" in line]
    assert line == "| data set | a \\| b # heading \\<script> \\[link\\](x) |"


def test_damaged_file_is_named(model: ExportedModel) -> None:
    path = model.source / "fold_0" / "validation" / "summary.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json: expected JSON"):
        model_card(model)
